"""Timing on a CUDA card: graph replays over rotated buffers, medians of event timings, and what the card can do at best."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

L2_BYTES = 300 * 2**20  # buffers rotate over at least this much, several times the L2

Made = tuple[list[Callable[[], Any]], Callable[[], float]]


@dataclass
class Job:
    """One thing to check and time. `make(copies)` builds `copies` calls on buffers of their own and a check of the first."""

    section: str
    name: str
    make: Callable[[int], Made]
    bytes_moved: float = 0.0  # by one call, each input read once and each output written once
    flops: float = 0.0
    buffer_bytes: float = 0.0  # of one copy
    tolerance: float = 1e-2
    labels: dict[str, Any] = field(default_factory=dict)

    @property
    def copies(self) -> int:
        return int(max(1, min(48, -(-L2_BYTES // max(1.0, self.buffer_bytes)))))


def median_us(run: Callable[[], Any], repeats: int = 7) -> float:
    """Median of event timings of one call, microseconds."""
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def capture(calls: Sequence[Callable[[], Any]], at_least: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of the calls in turn, repeated until there are `at_least`; and how many it holds."""
    rounds = -(-at_least // len(calls))
    torch.cuda.synchronize()  # buffers may still be being filled on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph, rounds * len(calls)


def graph_us(calls: Sequence[Callable[[], Any]], at_least: int = 20, repeats: int = 7) -> float:
    """Microseconds a call when replayed back to back in one graph."""
    graph, count = capture(calls, at_least)
    graph.replay()
    torch.cuda.synchronize()
    return median_us(graph.replay, repeats) / count


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||; NaN anywhere gives infinity."""
    out, reference = out.float(), reference.float()
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    return float((out - reference).norm() / reference.norm().clamp_min(1e-30))


def calibrate() -> dict[str, Any]:
    """What this card reaches now: read rate, bf16 matrix rate, clocks."""
    big = torch.randn(2**30, device="cuda")  # 4 GiB
    half = torch.empty(2**29, device="cuda")
    read = median_us(lambda: torch.sum(big), 5)
    copy = median_us(lambda: half.copy_(big[: 2**29]), 5)
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    torch.mm(a, b)
    gemm = median_us(lambda: [torch.mm(a, b) for _ in range(20)], 3) / 20
    query = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    smi = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip()
    return {
        "read_gb_s": round(4 * 2**30 / read / 1e3),
        "copy_gb_s": round(2 * 4 * 2**29 / copy / 1e3),
        "bf16_tflop_s": round(2 * 8192**3 / gemm / 1e6),
        query: smi,
    }
