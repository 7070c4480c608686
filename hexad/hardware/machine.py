"""What this machine is: processors, instruction sets, memory, accelerators and their drivers. Reads files and NVML; no torch."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from hexad.hardware.nvml import Nvml

# instruction sets that kernels choose between, as the kernel names them
ISA_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
)
ISA_FLAGS_ARM = ("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme")


@dataclass(frozen=True)
class Processor:
    """The processors this process may use."""

    name: str
    architecture: str
    cores: int  # usable: the affinity mask, cut by the container's quota
    cores_physical: int | None
    quota_cores: float | None  # the container's CPU quota; None: unlimited
    instruction_sets: tuple[str, ...]
    numa_nodes: int
    memory_bytes: int  # cut by the container's limit
    memory_available_bytes: int


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU as its driver sees it."""

    index: int
    name: str
    memory_bytes: int
    memory_free_bytes: int
    sm_clock_mhz: int | None
    sm_clock_max_mhz: int | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: int | None


@dataclass(frozen=True)
class Machine:
    """Everything `hexad doctor` reports without measuring."""

    processor: Processor
    gpus: tuple[Gpu, ...]
    driver_version: str | None  # NVIDIA driver
    driver_cuda: str | None  # newest CUDA it supports, "13.0"
    operating_system: str
    python: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_machine() -> Machine:
    """Look at this machine. Never raises: what cannot be read is None or empty."""
    gpus, driver, cuda = read_gpus()
    return Machine(read_processor(), gpus, driver, cuda, f"{platform.system()} {platform.release()}", platform.python_version())


def read_gpus() -> tuple[tuple[Gpu, ...], str | None, str | None]:
    """(GPUs, driver version, newest CUDA of the driver); empty without a driver."""
    with Nvml() as nvml:
        if not nvml.available:
            return (), None, None
        gpus = []
        for index in range(nvml.device_count()):
            total, free = nvml.memory(index)
            gpus.append(
                Gpu(
                    index=index,
                    name=nvml.name(index),
                    memory_bytes=total,
                    memory_free_bytes=free,
                    sm_clock_mhz=nvml.sm_clock_mhz(index),
                    sm_clock_max_mhz=nvml.sm_clock_max_mhz(index),
                    power_w=nvml.power_w(index),
                    power_limit_w=nvml.power_limit_w(index),
                    temperature_c=nvml.temperature_c(index),
                )
            )
        return tuple(gpus), nvml.driver_version(), nvml.driver_cuda()


def read_processor() -> Processor:
    """The processors and memory of this process."""
    info = _cpuinfo()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = _cgroup_quota()
    memory = psutil.virtual_memory()
    limit, used = _cgroup_memory()
    total = min(memory.total, limit) if limit else memory.total
    available = min(memory.available, max(limit - used, 0)) if limit else memory.available
    return Processor(
        name=info.get("model name") or platform.processor() or platform.machine(),
        architecture=platform.machine(),
        cores=max(1, min(usable, int(quota))) if quota and quota >= 1 else usable if not quota else 1,
        cores_physical=psutil.cpu_count(logical=False),
        quota_cores=quota,
        instruction_sets=_instruction_sets(info),
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        memory_bytes=int(total),
        memory_available_bytes=int(available),
    )


def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _instruction_sets(info: dict[str, str]) -> tuple[str, ...]:
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return tuple(flag for flag in (*ISA_FLAGS, *ISA_FLAGS_ARM) if flag in flags)


def _read_number(path: str) -> int | None:
    try:
        text = Path(path).read_text().split()[0]
    except (OSError, IndexError):
        return None
    return int(text) if text.isdigit() else None


def _cgroup_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        quota_us, period_us = _read_number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), _read_number("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
        return quota_us / period_us if quota_us and period_us else None


def _cgroup_memory() -> tuple[int | None, int]:
    """(limit, used) in bytes; limit None: unlimited."""
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit = _read_number(limit_file)
        if limit is not None and limit < 2**60:
            return limit, _read_number(used_file) or 0
    return None, 0
