"""What torch's profiler saw, as plain spans: on the device, and the host's calls that belong to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

RANGE = "hexad::"  # what the ranges begin with that this package names


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel or copy on the device, or one call or range of the host."""

    start_ns: int
    end_ns: int
    launch: int  # number of the host call that launched it
    name: str


def device_spans(profiler: Any) -> list[Span]:
    """What a finished `torch.profiler.profile` saw on the device; ranges that people named are none of it."""
    return [span for span in _spans(profiler, on_device=True) if span.end_ns > span.start_ns and not span.name.startswith(RANGE)]


def host_spans(profiler: Any) -> list[Span]:
    """Calls and ranges of the host."""
    return list(_spans(profiler, on_device=False))


def _spans(profiler: Any, *, on_device: bool) -> Iterator[Span]:
    for event in profiler.profiler.kineto_results.events():
        if str(event.device_type()).endswith("CUDA") == on_device:
            yield Span(event.start_ns(), event.start_ns() + event.duration_ns(), event.correlation_id(), event.name())
