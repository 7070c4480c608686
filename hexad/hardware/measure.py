"""Measured ceilings of this machine: streaming reads, copies and matrix products per type. Imports torch when called.

Reads are timed over buffers far larger than any cache; products long enough for clocks to settle. On a machine that others use as well,
every rate is a lower bound: quote ratios from one sitting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hexad.hardware.machine import read_machine
from hexad.hardware.registry import TERA, Device, Figure, match_device

_CPU_BUFFER_BYTES = 2**30  # server parts have last-level caches of hundreds of MB
_GPU_BUFFER_BYTES = 2 * 2**30


def measure_device(device: str = "auto", seconds: float = 0.6) -> Device:
    """This machine's GPU (or its processors) as a registry entry with measured figures."""
    import torch

    on_gpu = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    measured = calibrate("cuda" if on_gpu else "cpu", seconds)
    machine = read_machine()
    source = f"measured on this machine in {seconds:.1f} s a figure"
    rates = {kind: Figure(rate, source, measured=True) for kind, rate in measured["gemm_flops_s"].items()}
    read = Figure(measured["read_bytes_s"], source, measured=True)
    if not on_gpu:
        total = Figure(machine.processor.memory_bytes, "the operating system and the container's limit", measured=True)
        return Device(machine.processor.name, "cpu", total, read, rates, notes=(f"{machine.processor.cores} cores",))
    name = torch.cuda.get_device_name()
    known = match_device(name)
    memory = Figure(torch.cuda.get_device_properties(0).total_memory, "the driver", measured=True)
    peaks = dict(known.rates) if known else {}
    return Device(name, "gpu", memory, read, {**peaks, **rates}, known.link_bytes_s if known else None)


def calibrate(device: str, seconds: float = 0.6) -> dict[str, Any]:
    """The ceilings that every result file carries: read and copy bytes/s, and products per type in operations/s."""
    import torch

    on_gpu = device.startswith("cuda")
    if on_gpu:
        reads = {"gpu": gpu_read_bytes_s(torch.device(device), seconds)}
        kinds = ["bf16", "fp8"] if torch.cuda.get_device_capability()[0] >= 9 else ["bf16"]
    else:
        cores = read_machine().processor.cores
        reads = {str(n): cpu_read_bytes_s(n, seconds) for n in sorted({1, cores})}
        kinds = ["fp32", "bf16", "int8"]
    gemm = {kind: gemm_flops_s(torch.device(device), kind, seconds) for kind in kinds}
    if on_gpu:
        torch.cuda.empty_cache()  # an engine that is built next needs the room
    return {
        "device": torch.cuda.get_device_name() if on_gpu else read_machine().processor.name,
        "read_bytes_s": max(reads.values()),
        "read_bytes_s_by_threads": {} if on_gpu else reads,
        "gemm_flops_s": {kind: rate for kind, rate in gemm.items() if rate},
        "seconds_per_figure": seconds,
    }


def cpu_read_bytes_s(threads: int, seconds: float = 0.6) -> float:
    """Streaming reads of `threads` threads together, each over its own slice of a buffer larger than the caches."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        size = min(_CPU_BUFFER_BYTES, read_machine().processor.memory_available_bytes // 8) // 4096 * 4096
        buffer = torch.ones(size // 4, dtype=torch.float32)
        return size / _fastest_s(buffer.sum, seconds)
    finally:
        torch.set_num_threads(before)


def gpu_read_bytes_s(device: Any, seconds: float = 0.6) -> float:
    """Streaming reads of a GPU over 2 GiB (or a quarter of what is free)."""
    import torch

    size = min(_GPU_BUFFER_BYTES, torch.cuda.mem_get_info(device)[0] // 4) // 4096 * 4096
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device).view(4096, -1)
    reads = (lambda: buffer.sum(dim=1), lambda: buffer.view(-1).sum(), lambda: buffer.amax(dim=1))  # the best reader counts
    return size / min(_fastest_gpu_s(read, seconds / len(reads)) for read in reads)


def gemm_flops_s(device: Any, kind: str, seconds: float = 0.6) -> float | None:
    """Operations/s of square matrix products of one kind, sustained over `seconds`; None where torch has no such product here."""
    import torch

    size = 8192 if device.type == "cuda" else 2048 if kind in ("bf16", "int8") else 1024
    try:
        product = _product(torch, device, kind, size)
        product()
    except (RuntimeError, NotImplementedError):
        return None
    return 2.0 * size**3 / _mean_s(product, seconds, device.type == "cuda")


def _product(torch: Any, device: Any, kind: str, size: int) -> Callable[[], Any]:
    if kind == "int8":
        a8 = torch.randint(-128, 127, (size, size), dtype=torch.int8, device=device)
        return lambda: torch._int_mm(a8, a8.t())
    a = torch.randn(size, size, device=device)
    if kind == "fp8":
        low = a.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(low, low.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    typed = a.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kind])
    return lambda: typed @ typed


def _fastest_s(call: Callable[[], Any], seconds: float) -> float:
    """The shortest of repeated calls: interference only ever adds."""
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best


def _fastest_gpu_s(call: Callable[[], Any], seconds: float) -> float:
    import torch

    event: Any = torch.cuda.Event
    start, stop = event(enable_timing=True), event(enable_timing=True)
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start.record()
        for _ in range(8):
            call()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 8e3)
    return best


def _mean_s(call: Callable[[], Any], seconds: float, on_gpu: bool) -> float:
    """Seconds a call, averaged over `seconds` (a clock that falls under load falls in here too)."""
    import torch

    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(8 if on_gpu else 1):
            call()
            count += 1
        if on_gpu:
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def describe_rates(measured: dict[str, Any]) -> list[str]:
    """One line a figure, for people."""
    lines = [f"read {measured['read_bytes_s'] / 1e9:,.1f} GB/s"]
    lines += [
        f"read with {n} thread{'s' if n != '1' else ''} {rate / 1e9:,.1f} GB/s" for n, rate in measured["read_bytes_s_by_threads"].items()
    ]
    return lines + [f"{kind} products {rate / TERA:,.3f} TFLOP/s" for kind, rate in measured["gemm_flops_s"].items()]
