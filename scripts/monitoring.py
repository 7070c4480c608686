"""Write the Grafana dashboard and the Prometheus alert rules from the metric table: `python scripts/monitoring.py` (docs/monitoring/)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from hexad.common.metric_table import METRICS, PREFIX, Metric, find

FOLDER = Path(__file__).parents[1] / "docs" / "monitoring"
DASHBOARD, ALERTS = FOLDER / "grafana-dashboard.json", FOLDER / "alerts.yaml"
ROWS = {"engine": "Engine", "request": "Requests", "http": "HTTP"}
QUANTILES = (0.5, 0.95, 0.99)
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
RATE = "$__rate_interval"
API = 'route=~"/v1/.*"'


def selector(metric: Metric) -> str:
    """Label matchers: the chosen model, where the metric has that label."""
    return '{model_name=~"$model"}' if "model_name" in metric.labels else ""


def series(metric: Metric, part: str = "") -> str:
    """The name that the page shows: counters end in _total, histograms have parts."""
    return PREFIX + metric.name + ("_total" if metric.kind == "counter" else f"_{part}" if metric.kind == "histogram" else "")


def queries(metric: Metric) -> list[tuple[str, str]]:
    """(expression, legend) of a metric's panel."""
    if metric.kind == "histogram":
        buckets = f"sum by (le) (rate({series(metric, 'bucket')}{selector(metric)}[{RATE}]))"
        return [(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in QUANTILES]
    if metric.kind == "counter":
        labels = [label for label in metric.labels if label != "model_name"]
        by = f" by ({', '.join(labels)})" if labels else ""
        return [
            (f"sum{by} (rate({series(metric)}{selector(metric)}[{RATE}]))", " ".join(f"{{{{{label}}}}}" for label in labels) or metric.name)
        ]
    return [(f"{series(metric)}{selector(metric)}", "{{instance}}")]


def unit(metric: Metric) -> str:
    """Grafana's name of the unit."""
    if metric.name.endswith("_seconds"):
        return "percentunit" if metric.kind == "counter" else "s"
    return "percentunit" if metric.name.endswith("_perc") else "short"


def panel(metric: Metric, number: int, x: int, y: int) -> dict[str, Any]:
    targets = [{"refId": chr(65 + i), "expr": expr, "legendFormat": legend} for i, (expr, legend) in enumerate(queries(metric))]
    return {
        "id": number,
        "type": "table" if metric.kind == "info" else "timeseries",
        "title": metric.name.replace("_", " "),
        "description": metric.help + (" Rate per second." if metric.kind == "counter" else ""),
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit(metric), "min": 0}, "overrides": []},
        "targets": targets,
    }


def dashboard() -> dict[str, Any]:
    """A row per source, a panel per metric."""
    panels: list[dict[str, Any]] = []
    y = number = 0
    for source, title in ROWS.items():
        number += 1
        panels.append(
            {"id": number, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "collapsed": False, "panels": []}
        )
        y += 1
        own = [metric for metric in METRICS if metric.source == source]
        for i, metric in enumerate(own):
            number += 1
            panels.append(panel(metric, number, i % COLUMNS * WIDTH, y + i // COLUMNS * HEIGHT))
        y += -(-len(own) // COLUMNS) * HEIGHT
    models = f"label_values({PREFIX}request_success_total, model_name)"
    source = {"type": "prometheus", "uid": "$datasource"}
    return {
        "uid": "hexad",
        "title": "Hexad",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {"name": "model", "type": "query", "datasource": source, "query": models, "includeAll": True, "multi": True, "refresh": 2},
            ]
        },
        "panels": panels,
    }


class Alert(NamedTuple):
    name: str
    expr: str
    wait: str
    severity: str
    summary: str


def _quantile(q: float, name: str) -> str:
    return f"histogram_quantile({q}, sum by (le, model_name) (rate({series(find(name), 'bucket')}[5m])))"


def _share(extra: str) -> str:
    """The share of API requests whose status matches."""
    name = series(find("http_requests"))
    return f"sum(rate({name}{{{extra}}}[5m])) / sum(rate({name}{{{API}}}[5m]))"


def alerts() -> list[Alert]:
    """What should wake somebody, or be seen in the morning."""
    waiting, running = series(find("num_requests_waiting")), series(find("num_requests_running"))
    up, memory, preempted = series(find("engine_up")), series(find("kv_cache_usage_perc")), series(find("num_preemptions"))
    failed = series(find("request_success")) + '{finished_reason="error"}'
    first, gap = _quantile(0.95, "time_to_first_token_seconds"), _quantile(0.99, "inter_token_latency_seconds")
    wrong, refused = _share(API + ',status=~"5..",status!="503"'), _share(API + ',status="503"')
    rows = (
        ("HexadEngineDown", f"{up} == 0", "1m", "critical", "The engine process does not answer."),
        ("HexadServerErrors", f"{wrong} > 0.01", "5m", "critical", "More than 1 % of requests end with a 5xx."),
        ("HexadRequestsFail", f"sum by (model_name) (rate({failed}[5m])) > 0.1", "5m", "warning", "Requests fail inside the engine."),
        ("HexadRefuses", f"{refused} > 0.05", "10m", "warning", "More than 5 % of requests are refused for lack of capacity."),
        ("HexadQueueGrows", f"{waiting} > 2 * {running} and {waiting} > 10", "10m", "warning", "More than twice as many wait as run."),
        ("HexadKVMemoryFull", f"{memory} > 0.95", "10m", "warning", "The KV memory is all but full."),
        ("HexadPreempts", f"rate({preempted}[5m]) > 0.2", "10m", "warning", "Requests are preempted all the time."),
        ("HexadSlowFirstToken", f"{first} > 10", "10m", "warning", "p95 of the first token is over 10 s."),
        ("HexadSlowTokens", f"{gap} > 1", "10m", "warning", "p99 between two tokens is over 1 s."),
    )
    return [Alert(*row) for row in rows]


def alert_file() -> str:
    """The rules as Prometheus reads them. JSON strings are YAML strings."""
    lines = ["# Written by scripts/monitoring.py from the metric table.", "groups:", "  - name: hexad", "    rules:"]
    for alert in alerts():
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expr)}",
            f"        for: {alert.wait}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
        ]
    return "\n".join(lines) + "\n"


def files() -> dict[Path, str]:
    return {DASHBOARD: json.dumps(dashboard(), indent=1) + "\n", ALERTS: alert_file()}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
        print(path)
