"""The dashboard and the alert rules speak of metrics that exist, by the names that the page shows; all of them are there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from monitoring import ALERTS, DASHBOARD, alerts, dashboard, files, queries

from hexad.common.metric_table import METRICS, PREFIX
from hexad.common.metrics import MetricsRegistry, RequestRecord

NAME = re.compile(r"(hexad:\w+)(\{[^}]*\})?")


@pytest.fixture(scope="module")
def shown() -> dict[str, set[str]]:
    """Sample name -> its label names, on a page with everything on it."""
    registry = MetricsRegistry("m")
    registry.set_cache_info(block_size=16, num_blocks=4, cache_dtype="auto")
    stats: dict[str, float | int | str | None] = {metric.stat: 1.0 for metric in METRICS if metric.source == "engine" and metric.stat}
    stats |= {f"{metric.stat}_sum": 1.0 for metric in METRICS if metric.kind == "histogram" and metric.source == "engine"}
    registry.set_engine_stats(stats)
    registry.observe_http("GET", "/v1/models", 200, 0.1)
    registry.observe_request(
        RequestRecord(prompt_tokens=1, generation_tokens=2, finish_reason="stop", arrived_s=0, ended_s=1, first_token_s=0.5, queued_s=0.1)
    )
    found: dict[str, set[str]] = {}
    for line in registry.render().decode().splitlines():
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', rest))
    return found


def check(expression: str, shown: dict[str, set[str]]) -> None:
    names = NAME.findall(expression)
    assert names, expression
    for name, labels in names:
        assert name in shown, f"{name} is not on the page: {expression}"
        assert set(re.findall(r"(\w+)(?:=~|!=|=)", labels)) <= shown[name], expression
    for by in re.findall(r"by \(([^)]*)\)", expression):
        assert set(re.split(r",\s*", by)) <= set().union(*(shown[name] for name, _ in names)), expression
    assert expression.count("(") == expression.count(")")


def test_files_are_what_the_table_gives() -> None:
    for path, text in files().items():
        assert path.read_text() == text, f"{path.name} is old: run python scripts/monitoring.py"


def test_every_metric_has_a_panel(shown: dict[str, set[str]]) -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    for expression in expressions:
        check(expression.replace("$__rate_interval", "5m"), shown)
    text = " ".join(expressions)
    for metric in METRICS:
        assert re.search(rf"{PREFIX}{metric.name}\b|{PREFIX}{metric.name}_(total|bucket)", text), metric.name
        assert queries(metric)
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    boxes = [tuple(panel["gridPos"][k] for k in "xy") for panel in panels]
    assert len(boxes) == len(set(boxes))
    assert json.loads(DASHBOARD.read_text())["title"] == "Hexad"


def test_alerts_speak_of_what_exists(shown: dict[str, set[str]]) -> None:
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in alerts()]
    for rule in rules:
        check(rule["expr"], shown)
        assert rule["labels"]["severity"] in ("critical", "warning")
    with pytest.raises(AssertionError):
        check("rate(hexad:no_such_thing_total[5m]) > 1", shown)
    with pytest.raises(AssertionError):
        check('hexad:engine_up{colour="red"} == 0', shown)


# Prometheus' own tool (the package `prometheus` of Debian has it).

with_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here")


def promtool(*words: str, page: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["promtool", *words], input=page, capture_output=True, check=False)


@with_promtool
def test_promtool_agrees_with_rules_and_panels(tmp_path: Path) -> None:
    panels = [target["expr"].replace("$__rate_interval", "5m") for p in dashboard()["panels"] for target in p.get("targets", ())]
    recorded = [{"record": f"panel_{i}", "expr": expression} for i, expression in enumerate(panels)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    for path in (ALERTS, tmp_path / "panels.yaml"):
        done = promtool("check", "rules", str(path))
        assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "panels.yaml").write_text((tmp_path / "panels.yaml").read_text().replace("rate(", "rate((", 1))
    assert promtool("check", "rules", str(tmp_path / "panels.yaml")).returncode != 0


@with_promtool
def test_promtool_reads_the_page() -> None:
    """It dislikes the colons, which vLLM's dashboards need, and a histogram called ..._total, which is vLLM's name; nothing else."""
    registry = MetricsRegistry("m")
    registry.observe_http("GET", "/v1/models", 200, 0.1)
    registry.set_engine_stats({metric.stat: 1.0 for metric in METRICS if metric.source == "engine" and metric.stat})
    done = promtool("check", "metrics", page=registry.render())
    said = (done.stdout + done.stderr).decode().splitlines()
    assert [line for line in said if "contain ':'" not in line and "iteration_tokens_total" not in line] == []
    assert done.returncode in (0, 3)
    assert promtool("check", "metrics", page=b"not a page").returncode not in (0, 3)


QUIET_LABELS = {"severity": "critical", "model_name": "m"}


@with_promtool
def test_alerts_fire_and_only_when_they_should(tmp_path: Path) -> None:
    firing = [{"exp_labels": QUIET_LABELS, "exp_annotations": {"summary": "The engine process does not answer."}}]
    case = {
        "interval": "15s",
        "input_series": [{"series": 'hexad:engine_up{model_name="m"}', "values": "1x8 0x16 1x8"}],
        "alert_rule_test": [
            {"eval_time": time, "alertname": "HexadEngineDown", "exp_alerts": expected}
            for time, expected in (("1m", []), ("2m30s", []), ("5m", firing), ("8m", []))
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [case]}))
    done = promtool("test", "rules", str(tmp_path / "test.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
