"""Which processor cores threads run on (`--cpu-pin`). No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from hexad.common.errors import ConfigError

_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_MAX_CORES = 4_096


def parse_cores(text: str) -> tuple[int, ...]:
    """ "0-3,8" -> (0, 1, 2, 3, 8).

    Raises:
        ConfigError: not a list of cores, a core twice, or one that this process may not use (or a system that cannot pin).
    """
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("device.cpu_pin: this system does not let a process choose cores: leave it out")
    cores: list[int] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None or int(found[2] or found[1]) - int(found[1]) not in range(_MAX_CORES):
            raise ConfigError(f"device.cpu_pin = {text!r}: {part.strip()!r} is no core or range of cores; write for example 0-3,8")
        cores += range(int(found[1]), int(found[2] or found[1]) + 1)
    usable = sorted(os.sched_getaffinity(0))
    missing = [core for core in cores if core not in usable]
    if missing:
        raise ConfigError(f"device.cpu_pin = {text!r}: this process cannot use core {missing[0]}; it has {_shown(usable)}")
    twice = [core for core in cores if cores.count(core) > 1]
    if twice:
        raise ConfigError(f"device.cpu_pin = {text!r} names core {twice[0]} twice: a core takes one thread")
    return tuple(cores)


def pinned_cores(text: str | None, threads: int | None) -> tuple[int, ...]:
    """Cores of `threads` threads (None: one for each core), () where none were asked for.

    Raises:
        ConfigError: as `parse_cores`, or more threads than cores.
    """
    if text is None:
        return ()
    cores = parse_cores(text)
    if threads is not None and threads > len(cores):
        raise ConfigError(f"device.threads = {threads}, but device.cpu_pin = {text!r} has {len(cores)} cores: name more or use fewer")
    return cores if threads is None else cores[:threads]


def pin_this_thread(cores: Sequence[int]) -> None:
    """From now on the calling thread (and threads that it starts) runs on these cores alone."""
    os.sched_setaffinity(0, cores)


def _shown(cores: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: list[str] = []
    start = 0
    for i in range(1, len(cores) + 1):
        if i == len(cores) or cores[i] != cores[i - 1] + 1:
            parts.append(str(cores[start]) if i - start == 1 else f"{cores[start]}-{cores[i - 1]}")
            start = i
    return ",".join(parts)
