"""Markdown tables from result files: measured, floor, share. What docs and release notes print comes from here, never from memory."""

from __future__ import annotations

from typing import Any

from hexad.common.errors import ConfigError

# metric -> (heading, digits)
HEADLINES = {
    "output_tok_s": ("output tok/s", 0), "total_s": ("s in all", 2), "ttft_ms": ("TTFT, ms", 1), "tpot_ms": ("TPOT, ms", 2),
    "ms_per_step": ("ms a step", 2), "prefill_tok_s": ("prefill tok/s", 0), "itl_ms": ("ITL, ms", 2), "goodput": ("good requests/s", 2),
    "ready_s": ("ready, s", 1), "first_token_s": ("first token, s", 1), "perplexity": ("perplexity", 3), "kl_mean": ("KL, nats", 5),
    "top1_agreement": ("top-1 agreement", 4), "cpu_ms": ("host CPU, ms a step", 3), "step_ms_median": ("host CPU, ms a step", 3),
}  # fmt: skip


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """One row a metric (and point of a sweep) of each result, which the last column names."""
    lines = ["| model | format | load | metric | measured | floor | at | file |", "|---|---|---|---|---|---|---|---|"]
    for file, result in results.items():
        name = result["load"]["name"] + (" (partial)" if result.get("partial") else "")
        for metric, (heading, digits) in HEADLINES.items():
            if metric == "ms_per_step" and _waves(result) > 1:
                continue  # the time over the tokens of one request is no step when others wait for it to end
            for point, value in points(result["metrics"].get(metric)):
                floor = dict(points((result.get("floors") or {}).get(metric))).get(point)
                cells = [result["model"], result["format"], name, f"{heading}{f' [{point}]' if point else ''}", f"{value:,.{digits}f}"]
                cells += [f"{floor:,.{digits}f}", f"{_share(metric, value, floor):.0%}"] if floor and value else ["", ""]
                lines.append("| " + " | ".join([*cells, file]) + " |")
    return "\n".join(lines)


def _waves(result: dict[str, Any]) -> float:
    """How many times as many requests as can run at once."""
    at_once = result.get("engine", {}).get("config", {}).get("scheduler", {}).get("max_num_seqs")
    return (result["load"].get("requests") or 0) / at_once if at_once and result.get("kind") == "offline" else 0


BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def insert(document: str, table: str) -> str:
    """`document` with `table` between its marks.

    Raises:
        ConfigError: it has no marks.
    """
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the document has no marks: put {BEGIN} and {END} where the table belongs")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def points(metric: Any) -> list[tuple[str, float]]:
    """(point of the sweep or "", typical value) pairs of a metric."""
    if isinstance(metric, int | float):
        return [("", float(metric))]
    if not isinstance(metric, dict):
        return []
    if "p50" in metric:
        return [("", float(metric["p50"]))]
    return [(str(key), value) for key, sub in metric.items() for _, value in points(sub)[:1]]


def _share(metric: str, value: float, floor: float) -> float:
    return value / floor if metric.endswith("tok_s") else floor / value
