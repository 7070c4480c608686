"""`hexad bench profile --trace`: how long the GPU idles while an engine decodes as users run it, graphs and all.

The profiler sees every kernel and copy on the device. Between the first and the last of a window, time that none of them covers is idle:
within one launch (a replayed graph is one launch: gaps between its kernels) or between launches (the host was late).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hexad.bench.profile import decode_window, stream_window
from hexad.bench.spans import Span, device_spans

LIMIT = 0.03  # of the time: more idle than this between launches is flagged
TRIMMED = 0.1  # of the window at either end: the profiler starts and stops there


def idle(spans: Iterable[Span]) -> dict[str, Any]:
    """Where a stretch of device time went: seconds in all, busy, and idle between and within launches."""
    ordered = sorted(spans, key=lambda span: (span.start_ns, span.end_ns))
    if len(ordered) < 2:
        empty = dict.fromkeys(("span_s", "busy_s", "between_launches_s", "within_launches_s", "longest_gap_us"), 0.0)
        return empty | {"launches": len(ordered)}
    covered = ordered[0].end_ns  # the device is busy up to here
    last = ordered[0]  # what ends there
    between = within = longest = 0
    for span in ordered[1:]:
        gap = max(0, span.start_ns - covered)
        longest = max(longest, gap)
        if span.launch == last.launch:
            within += gap
        else:
            between += gap
        if span.end_ns > covered:
            covered, last = span.end_ns, span
    total = covered - ordered[0].start_ns
    return {
        "span_s": total / 1e9,
        "busy_s": (total - between - within) / 1e9,
        "between_launches_s": between / 1e9,
        "within_launches_s": within / 1e9,
        "longest_gap_us": longest / 1e3,
        "launches": len({span.launch for span in ordered}),
    }


def middle(spans: list[Span], trimmed: float = TRIMMED) -> list[Span]:
    """Without the spans that begin in the first or last `trimmed` of the time."""
    if not spans:
        return []
    low, high = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    cut = (high - low) * trimmed
    return [span for span in spans if low + cut <= span.start_ns <= high - cut]


def costliest(spans: Iterable[Span], count: int = 12) -> list[dict[str, Any]]:
    """Kernels by their time in all."""
    times: dict[str, list[float]] = {}
    for span in spans:
        entry = times.setdefault(span.name[:80], [0.0, 0.0])
        entry[0] += (span.end_ns - span.start_ns) / 1e6
        entry[1] += 1
    ranked = sorted(times.items(), key=lambda pair: -pair[1][0])[:count]
    return [{"kernel": name, "ms": ms, "calls": int(calls)} for name, (ms, calls) in ranked]


def trace_decode(face: Any, batch: int, prompt: int, steps: int, file: Path | None, *, mixed: bool = False) -> dict[str, Any]:
    """Idle shares of decode steps of a full batch, or with `mixed` of steps that prompts join. `face` runs with graphs.

    `file`: keep the trace, for trace viewers.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    run = stream_window if mixed else decode_window
    run(face, batch, prompt, steps, lambda: None, torch.cuda.synchronize)  # captures what the others replay
    plain = run(face, batch, prompt, steps, lambda: None, torch.cuda.synchronize)
    with profile(activities=[ProfilerActivity.CUDA]):  # the first one takes seconds to start
        torch.cuda.synchronize()
    profiler: Any = profile(activities=[ProfilerActivity.CUDA])

    def end() -> None:
        torch.cuda.synchronize()
        profiler.__exit__(None, None, None)

    traced = run(face, batch, prompt, steps, lambda: profiler.__enter__(), end)
    spans = middle(device_spans(profiler))
    found = idle(spans)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            profiler.export_chrome_trace(str(file))
    span_s = max(found["span_s"], 1e-9)
    return {
        **found,
        "idle_share": (found["between_launches_s"] + found["within_launches_s"]) / span_s,
        "idle_between_launches_share": found["between_launches_s"] / span_s,
        "step_ms": plain["wall_s"] / plain["steps"] * 1e3,
        "step_ms_traced": traced["wall_s"] / traced["steps"] * 1e3,
        "steps": traced["steps"],
        "batch": batch,
        "context": traced["context"],
        "kernels": costliest(spans),
    }


def flags(measured: dict[str, Any]) -> list[str]:
    """What is wrong with a trace, in words."""
    batch, share = measured["batch"], measured["idle_between_launches_share"]
    plain, traced = measured["step_ms"], measured["step_ms_traced"]
    words = []
    if not measured["launches"]:
        words.append(f"batch {batch}: the profiler saw nothing on the device, so the shares mean nothing")
    if share > LIMIT:
        words.append(f"batch {batch}: the GPU idles {share:.1%} of the time between launches, over {LIMIT:.0%}")
    if traced > 1.15 * plain:
        words.append(f"batch {batch}: tracing slowed steps from {plain:.2f} to {traced:.2f} ms")
    return words
