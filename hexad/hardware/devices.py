"""Devices as torch sees them: which one a name means, what it is called, how much memory it has."""

from __future__ import annotations

import os

import psutil
import torch

from hexad.common.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """The device that `name` (auto | cpu | cuda | cuda:N) means on this machine.

    Raises:
        ConfigError: there is no such device here.
    """
    kind, _, index = name.partition(":")
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ConfigError(f"device is {name!r}: it must be auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        found = f"{count} CUDA devices (cuda:0 to cuda:{count - 1})" if count else "no CUDA device"
        raise ConfigError(f"device is {name!r}, but this machine has {found}: use {'cuda:0' if count else 'cpu'}")
    return torch.device("cuda", int(index or 0))


def describe(device: torch.device) -> str:
    """`cpu (16 threads)` or `cuda:0 (NVIDIA H200)`."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes; on a CPU what could be allocated without swapping, and the cgroup's limit where that is lower."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    memory = psutil.virtual_memory()
    limit = _cgroup_limit()
    if limit is None or limit >= memory.total:
        return int(memory.available), int(memory.total)
    mine = psutil.Process().memory_info()
    kept = mine.rss - getattr(mine, "shared", 0)  # pages of mapped files can be given back
    return max(0, min(int(memory.available), limit - kept)), limit


def _cgroup_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if os.path.exists(path):
            with open(path) as file:
                text = file.read().strip()
            return int(text) if text.isdigit() else None
    return None
