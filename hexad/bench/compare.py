"""Ratios of two results, and why two results may not be compared."""

from __future__ import annotations

from typing import Any

_HIGHER_IS_BETTER = ("tok_s", "throughput", "goodput", "_s_per_gb", "gb_s", "flops_s", "agreement", "share")


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Why `a` and `b` are not runs of the same thing; empty when they may be compared."""
    found = []
    for key in ("kind", "load", "model", "format"):
        if a.get(key) != b.get(key):
            found.append(f"{key}: {a.get(key)} and {b.get(key)}")
    names = [r.get("device", {}).get("name") for r in (a, b)]
    if names[0] != names[1]:
        found.append(f"device: {names[0]} and {names[1]}")
    found += [f"{which} is partial (interrupted)" for which, r in (("the first", a), ("the second", b)) if r.get("partial")]
    return found


def ratios(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    """Each number that both have: first, second, second over first, and whether that is better, worse or neither."""
    rows = []
    left, right = flatten(a["metrics"]), flatten(b["metrics"])
    for name, first in left.items():
        second = right.get(name)
        if second is None or not first:
            continue
        rows.append({"metric": name, "first": first, "second": second, "ratio": second / first, "better": _better(name, first, second)})
    return rows


def flatten(tree: Any, prefix: str = "") -> dict[str, float]:
    """Numbers of nested dicts under dotted names."""
    if isinstance(tree, dict):
        return {name: value for key, sub in tree.items() for name, value in flatten(sub, f"{prefix}.{key}" if prefix else str(key)).items()}
    return {prefix: float(tree)} if isinstance(tree, int | float) and not isinstance(tree, bool) else {}


def _better(name: str, first: float, second: float) -> bool | None:
    if abs(second / first - 1) < 0.01:
        return None
    return (second > first) == any(mark in name for mark in _HIGHER_IS_BETTER)
