"""What a profile says, in words that follow from its numbers: work on gaps, on operators, on fewer bits, or on two of them."""

from __future__ import annotations

from typing import Any

from hexad.bench.floors import decode_bound
from hexad.hardware.registry import Device
from hexad.models.costs import ModelCosts

GAPS_LIMIT = 0.25  # of a step outside operators: then scheduling, not operators, is the first thing to mend
NEAR_BOUND = 0.8  # of its bound: no kernel wins much more, only less work does
FAR_BOUND = 0.6  # below this share a better kernel is the first thing to mend
_MATTERS = 0.05  # of the step: what takes less is not worth a line
_TINY_US = 2.0  # of work in a call: calling it is what takes the time
_MOST_LINES = 3

Row = dict[str, Any]


def verdict(rows: list[Row], measured: dict[str, Any], costs: ModelCosts, calibrated: Device) -> list[str]:
    """What to work on. The first line is the step against its floor; each of the others names what it follows from."""
    step_s = measured["step_s"]
    gaps = 1 - measured["device_busy_s"] / step_s
    floor_s = decode_bound(costs, calibrated, int(measured["batch"]), measured["context"] + 1).time_s
    lines = [f"a step takes {step_s * 1e3:.3f} ms, its floor is {floor_s * 1e3:.3f} ms: at {floor_s / step_s:.0%}"]
    large = [row for row in rows if row["share_of_step"] > _MATTERS]
    far = [row for row in large if row["share_of_bound"] < FAR_BOUND]
    between = [row for row in large if FAR_BOUND <= row["share_of_bound"] < NEAR_BOUND]
    near = [row for row in large if row["share_of_bound"] >= NEAR_BOUND]
    if gaps > GAPS_LIMIT:
        lines.append(f"gaps: {gaps:.0%} of the step is outside operators: work on scheduling, launches and host time before any kernel")
    elif gaps > _MATTERS:
        lines.append(f"gaps: {gaps:.0%} of the step is outside operators (up to {GAPS_LIMIT:.0%} other things come first)")
    lines += [f"{_named(row)}, far from it (below {FAR_BOUND:.0%}): {_kernel(row)}" for row in far[:_MOST_LINES]]
    lines += [
        f"{_named(row)}, between {FAR_BOUND:.0%} and {NEAR_BOUND:.0%}: {_kernel(row)}, and {_less(row)} would help as well"
        for row in between[:_MOST_LINES]
    ]
    if near and not far and not between and gaps <= GAPS_LIMIT:
        lines.append(f"at the bound: what takes the time reaches {NEAR_BOUND:.0%} of its bound or more; only {_less(near[0])} will help")
    else:
        lines += [f"{_named(row)}, near it ({NEAR_BOUND:.0%} or more): only {_less(row)} will help there" for row in near[:_MOST_LINES]]
    if any(row["share_of_bound"] > 1.1 for row in large):
        lines.append("more than its bound: caches delivered what the bound takes from memory, or the calibration was disturbed")
    if not large:
        lines.append(f"no operator takes more than {_MATTERS:.0%} of the step: the host, and how many operators there are, come first")
    return lines


def _named(row: Row) -> str:
    share = f"{row['share_of_step']:.0%} of the step at {_percent(row['share_of_bound'])} of its bound ({row['binds']})"
    return f"operator {row['op']} ({row['provider']}): {share}"


def _kernel(row: Row) -> str:
    call_us = row["ms_per_step"] * 1e3 / max(row.get("calls_per_step", 1.0), 1e-9)
    if call_us * row["share_of_bound"] < _TINY_US:
        return f"each call takes {call_us:.0f} us for less than {_TINY_US:.0f} us of work: fewer calls (fusion) before a better kernel"
    return f"a better kernel would save up to {(1 - row['share_of_bound']) * row['ms_per_step']:.3f} ms a step"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "less than 1%"


def _less(row: Row) -> str:
    return "fewer bits (quantise weights or KV) or more tokens a step" if row["binds"] == "bytes" else "fewer operations"
