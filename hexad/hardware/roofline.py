"""How fast a device could do a piece of work at best. No torch, no knowledge of models.

The floor of one step (Williams et al. 2009, with keys and values apart):

    time = max(weight bytes / read rate, FLOPs of linear layers / sustained rate)
         + max(KV bytes / read rate, FLOPs of attention / sustained rate) + link bytes / link rate

Reads and arithmetic overlap inside one operator; linear layers and attention follow one another. No launch gaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field

from hexad.hardware.registry import Device


@dataclass(frozen=True)
class Work:
    """What one step of one rank must do."""

    weight_bytes: float = 0.0  # read once a step
    kv_bytes: float = 0.0  # keys and values read
    flops: Mapping[str, float] = field(default_factory=dict)  # linear layers: compute kind -> floating-point (or integer) operations
    attention_flops: Mapping[str, float] = field(default_factory=dict)  # attention, likewise
    link_bytes: float = 0.0  # sent to peers, one direction

    @property
    def read_bytes(self) -> float:
        """All bytes that memory must deliver."""
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True)
class Bound:
    """The floor of a piece of work and what it is made of (seconds)."""

    time_s: float
    weights_s: float  # reading weights
    compute_s: float  # arithmetic of linear layers
    kv_s: float  # reading keys and values
    attention_s: float  # arithmetic of attention
    link_s: float

    @property
    def binds(self) -> str:
        """What takes the largest part: "weights" or "kv" (memory bandwidth), "compute" or "attention" (arithmetic), or "link"."""
        linear = ("compute", self.compute_s) if self.compute_s >= self.weights_s else ("weights", self.weights_s)
        attention = ("attention", self.attention_s) if self.attention_s >= self.kv_s else ("kv", self.kv_s)
        return max(linear, attention, ("link", self.link_s), key=lambda part: part[1])[0]


def bound(work: Work, device: Device) -> Bound:
    """The floor of `work` on one `device`."""
    read_bytes_s = device.read_bytes_s.value
    weights_s = work.weight_bytes / read_bytes_s
    compute_s = _arithmetic_s(work.flops, device)
    kv_s = work.kv_bytes / read_bytes_s
    attention_s = _arithmetic_s(work.attention_flops, device)
    link_s = work.link_bytes / device.link_bytes_s.value if work.link_bytes and device.link_bytes_s else 0.0
    return Bound(max(weights_s, compute_s) + max(kv_s, attention_s) + link_s, weights_s, compute_s, kv_s, attention_s, link_s)


def _arithmetic_s(flops: Mapping[str, float], device: Device) -> float:
    return sum(count / device.rate(kind) for kind, count in flops.items() if count)


def bound_of_steps(steps: Iterable[tuple[Work, int]], device: Device) -> Bound:
    """The floor of a run: each (work of one step, how many such steps)."""
    total = [0.0] * 6
    for work, count in steps:
        for index, part in enumerate(astuple(bound(work, device))):
            total[index] += part * count
    return Bound(*total)


def impossible(bytes_read: float, seconds: float, read_bytes_s: float, tolerance: float = 0.02) -> str | None:
    """Why a measured time cannot be true, or None: it would need more bandwidth than was measured on the same device."""
    if seconds <= 0:
        return f"a time of {seconds} s is not a measurement"
    reached = bytes_read / seconds
    if reached <= read_bytes_s * (1 + tolerance):
        return None
    return (
        f"impossible: {bytes_read / 1e9:.2f} GB in {seconds * 1e3:.3f} ms is {reached / 1e9:,.0f} GB/s, "
        f"memory delivers {read_bytes_s / 1e9:,.0f} GB/s: the time, the bytes or the calibration is wrong"
    )
