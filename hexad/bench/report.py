"""PNGs from result files: throughput and latency against concurrency or batch, bars before/after, operators against their bounds.

Needs matplotlib (extra `bench`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hexad.common.errors import ConfigError

_SMALL = 0.005  # of a step: operators below are not drawn
_Y_LABELS = {
    "output_tok_s": "output tokens/s", "prefill_tok_s": "prompt tokens/s", "ms_per_step": "ms a decode step",
    "ttft_ms": "time to first token, ms",
    "itl_ms": "inter-token latency, ms", "tpot_ms": "time per output token, ms", "e2el_ms": "end to end, ms", "goodput": "good requests/s",
}  # fmt: skip
_X_LABELS = {"W3": "prompt tokens", "W7": "batch", "W9": "streams at once"}


def draw(results: dict[str, dict[str, Any]], out: Path) -> list[Path]:
    """One PNG for each load and metric that sweeps something, one of bars for each load's single figures; returns their paths.

    Raises:
        ConfigError: matplotlib is missing, or there is nothing to draw.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("matplotlib is not installed: pip install 'hexad[bench]'") from None
    matplotlib.use("Agg")
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for load in sorted({r["load"]["name"] for r in results.values()}):
        group = {name: r for name, r in results.items() if r["load"]["name"] == load}
        for metric in _Y_LABELS:
            curves = {name: curve for name, r in group.items() if (curve := _curve(r["metrics"].get(metric)))}
            if curves:
                floors = {name: _curve((group[name].get("floors") or {}).get(metric)) for name in curves}
                paths.append(_lines(out / f"{load}-{metric}.png", load, metric, curves, floors))
        bars = {m: {name: r["metrics"][m] for name, r in group.items() if isinstance(r["metrics"].get(m), float)} for m in _Y_LABELS}
        bars = {metric: values for metric, values in bars.items() if values}
        if bars:
            paths.append(_bars(out / f"{load}-summary.png", load, bars, group))
    paths += [path for name, result in results.items() for path in _shares(name, result, out)]
    if not paths:
        raise ConfigError("nothing to draw: these results have no metrics (were they interrupted at once?)")
    return paths


def operator_shares(result: dict[str, Any]) -> dict[str, list[tuple[str, float]]]:
    """(operator, share of its bound) pairs of a profile (by batch) or of timed kernels (by operator; the provider that is chosen)."""
    metrics = result["metrics"]
    found: dict[str, list[tuple[str, float]]] = {}
    if result["kind"] == "profile":
        for batch, measured in metrics.items():
            rows = [row for row in measured["operators"] if row["share_of_step"] >= _SMALL]
            found[f"batch {batch}"] = [(f"{r['op']} ({r['share_of_step']:.0%} of the step)", r["share_of_bound"]) for r in rows]
    elif result["kind"] == "kernels":
        for row in metrics.get("rows", []):
            if row["chosen"]:
                found.setdefault(row["op"], []).append((f"{row['op']} {row['label']}", row["share"]))
    return {name: pairs for name, pairs in found.items() if pairs}


def _shares(name: str, result: dict[str, Any], out: Path) -> list[Path]:
    """One PNG of how near each operator comes to its bound."""
    groups = operator_shares(result)
    if not groups:
        return []
    import matplotlib.pyplot as plt

    count = sum(map(len, groups.values()))
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.24 * count))
    place = 0
    labels: list[str] = []
    for index, (group, pairs) in enumerate(groups.items()):
        drawn = axes.barh(range(place, place + len(pairs)), [min(share, 1.2) for _, share in pairs], color=f"C{index % 10}", label=group)
        axes.bar_label(drawn, [f"{share:.0%}" for _, share in pairs], fontsize=7, padding=2)
        labels += [label for label, _ in pairs]
        place += len(pairs)
    axes.set_yticks(range(count), labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, linestyle="--", color="black", linewidth=1)
    axes.set_xlim(0, 1.3)
    axes.set_xlabel("share of the bound (dashed: bytes or arithmetic at the measured ceilings)", fontsize=8)
    axes.set_title(f"{result['model']} {result['format']} on {result['device'].get('name', '')}", fontsize=9)
    axes.legend(fontsize=7)
    return [_save(figure, out / f"{name}-share-of-bound.png")]


def _curve(metric: Any) -> list[tuple[float, float, float | None]]:
    """(x, typical value, p99 or None) by x, or nothing when the metric does not sweep numbers."""
    if not isinstance(metric, dict) or not metric or not all(str(key).isdigit() for key in metric):
        return []
    points: list[tuple[float, float, float | None]] = []
    for key, value in metric.items():
        if isinstance(value, dict) and "p50" in value:
            points.append((float(key), float(value["p50"]), float(value["p99"])))
        elif isinstance(value, int | float):
            points.append((float(key), float(value), None))
    return sorted(points)


def _lines(path: Path, load: str, metric: str, curves: dict[str, Any], floors: dict[str, Any]) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2))
    for name, curve in curves.items():
        xs = [x for x, _, _ in curve]
        (line,) = axes.plot(xs, [y for _, y, _ in curve], marker="o", label=name)
        if all(p99 is not None for _, _, p99 in curve):
            axes.plot(xs, [p99 for _, _, p99 in curve], linestyle=":", color=line.get_color(), label=f"{name}, p99")
        if floors.get(name):
            best = [(x, y) for x, y, _ in floors[name]]
            axes.plot(*zip(*best, strict=True), linestyle="--", color=line.get_color(), label=f"{name}, floor")
    if len({x for curve in curves.values() for x, _, _ in curve}) > 2:
        axes.set_xscale("log", base=2)
    axes.set_xlabel(_X_LABELS.get(load, "streams at once"))
    axes.set_ylabel(_Y_LABELS[metric])
    axes.set_ylim(bottom=0)
    axes.set_title(f"{load}: {_Y_LABELS[metric]}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return _save(figure, path)


def _bars(path: Path, load: str, bars: dict[str, dict[str, float]], group: dict[str, dict[str, Any]]) -> Path:
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(1, len(bars), figsize=(3.4 * len(bars), 3.8), squeeze=False)
    for axes, (metric, values) in zip(all_axes[0], bars.items(), strict=True):
        drawn = axes.bar(range(len(values)), list(values.values()), color=[f"C{i}" for i in range(len(values))])
        axes.bar_label(drawn, fmt="%.4g", fontsize=8)
        axes.set_xticks(range(len(values)), [*values], rotation=20, ha="right", fontsize=8)
        floors = [(group[name].get("floors") or {}).get(metric) for name in values]
        for index, floor in enumerate(floors):
            if isinstance(floor, int | float):
                axes.hlines(floor, index - 0.4, index + 0.4, colors="black", linestyles="--", linewidth=1)
        axes.set_title(_Y_LABELS[metric], fontsize=9)
    figure.suptitle(f"{load} (dashed: floor)", fontsize=10)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
