"""Clocks, power and memory of this process and of a GPU while something runs: a thread that samples. No torch."""

from __future__ import annotations

import statistics
import threading
from types import TracebackType
from typing import Any

import psutil

from hexad.hardware.nvml import Nvml


class Telemetry:
    """Samples while its `with` block runs; `summary()` afterwards (or meanwhile). Keeps at most `capacity` samples of each figure."""

    def __init__(self, gpu_index: int | None = None, interval_s: float = 0.2, pid: int | None = None, capacity: int = 100_000) -> None:
        self._gpu_index = gpu_index
        self._interval_s = interval_s
        self._process = psutil.Process(pid)
        self._capacity = capacity
        self._clock_mhz: list[float] = []
        self._power_w: list[float] = []
        self._gpu_used_bytes = 0
        self._peak_rss_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Telemetry:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def summary(self) -> dict[str, Any]:
        """Peak memory in bytes (this moment included), median clock and power; figures that cannot be read are absent."""
        self._sample_memory()
        found: dict[str, Any] = {"peak_rss_bytes": self._peak_rss_bytes}
        if self._gpu_used_bytes:
            found["peak_gpu_bytes"] = self._gpu_used_bytes
        if self._clock_mhz:
            found["sm_clock_mhz"] = {"median": statistics.median(self._clock_mhz), "min": min(self._clock_mhz), "max": max(self._clock_mhz)}
        if self._power_w:
            found["power_w"] = {"median": statistics.median(self._power_w), "max": max(self._power_w)}
        return found

    def _run(self) -> None:
        with Nvml() as nvml:
            while True:
                self._sample(nvml)
                if self._stop.wait(self._interval_s):
                    self._sample(nvml)
                    return

    def _sample_memory(self) -> None:
        self._peak_rss_bytes = max(self._peak_rss_bytes, _tree_rss(self._process))

    def _sample(self, nvml: Nvml) -> None:
        self._sample_memory()
        if self._gpu_index is None or not nvml.available or len(self._power_w) >= self._capacity:
            return
        clock, power = nvml.sm_clock_mhz(self._gpu_index), nvml.power_w(self._gpu_index)
        if clock is not None:
            self._clock_mhz.append(clock)
        if power is not None:
            self._power_w.append(power)
        total, free = nvml.memory(self._gpu_index)
        self._gpu_used_bytes = max(self._gpu_used_bytes, total - free)


def _tree_rss(process: psutil.Process) -> int:
    """Resident bytes of a process and its children (shared pages counted in each)."""
    try:
        children = process.children(recursive=True)
    except psutil.Error:
        children = []
    total = 0
    for one in (process, *children):
        try:
            total += one.memory_info().rss
        except psutil.Error:
            continue
    return total
