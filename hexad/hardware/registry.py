"""Devices and what each can do at most, with a source for every figure. No torch.

A `Figure` is a published peak or a measured rate. `rate()` and `read_bytes_s` prefer the measured one: a floor computed from it is one
that a program can come near. Arithmetic rates are dense (no structured sparsity), in operations per second (one multiply-add is two).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hexad.common.errors import ConfigError, nearest

GB = 1e9
TB = 1e12
TERA = 1e12

COMPUTE_KINDS = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
_FALLBACK = {"fp8": "bf16", "int8": "bf16", "fp16": "bf16", "bf16": "fp32", "tf32": "fp32"}  # computed in the next wider kind


@dataclass(frozen=True)
class Figure:
    """One number, where it comes from, and whether somebody measured it (else it is the maker's peak)."""

    value: float
    source: str
    measured: bool = False


@dataclass(frozen=True)
class Device:
    """One accelerator, or the processors of one machine."""

    name: str
    kind: str  # "gpu" | "npu" | "cpu"
    memory_bytes: Figure
    read_bytes_s: Figure  # streaming reads of memory, gigabytes at a time
    rates: Mapping[str, Figure]  # compute kind -> dense operations/s; kinds absent here are computed in a wider one
    link_bytes_s: Figure | None = None  # to a peer in one direction; None: no direct link
    aliases: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def rate(self, compute: str) -> float:
        """Dense operations/s for `compute`, in the next wider kind where the device lacks it."""
        return self.rates[self.computed_as(compute)].value

    def computed_as(self, compute: str) -> str:
        """The kind in which this device really multiplies `compute`."""
        while compute not in self.rates:
            assert compute in _FALLBACK, f"{self.name} has no rate for {compute}"
            compute = _FALLBACK[compute]
        return compute


_HOPPER = "NVIDIA H100 Tensor Core GPU datasheet (dense = half of the figure with sparsity)"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet (dense)"
_L40S = "NVIDIA L40S datasheet (dense)"
_L4 = "NVIDIA L4 datasheet (dense = half of the figure with sparsity)"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, table 2 (dense, FP32 accumulate)"
_ASCEND = "published vendor and cloud tables; Huawei gives no public datasheet and bins differ (280 to 400 TFLOP/s)"
_H200_MEASURED = "measured on one H200 at GB-sized reads and under sustained load (the clock falls from 1,980 to about 1,500 MHz)"


def _peaks(source: str, **tera: float) -> dict[str, Figure]:
    return {kind: Figure(value * TERA, source) for kind, value in tera.items()}


_ALL = (
    Device(
        "H100",
        "gpu",
        Figure(80 * GB, _HOPPER),
        Figure(3.35 * TB, _HOPPER),
        _peaks(_HOPPER, fp32=66.9, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9, int8=1978.9),
        Figure(450 * GB, f"{_HOPPER}: NVLink 900 GB/s both ways"),
        ("h100-sxm", "nvidia h100 80gb hbm3"),
    ),
    Device(
        "H200",
        "gpu",
        Figure(141 * GB, _H200),
        Figure(4.48 * TB, _H200_MEASURED, measured=True),
        {
            **_peaks(_H200, fp32=66.9, tf32=494.7, fp16=989.4, int8=1978.9),
            "bf16": Figure(684 * TERA, _H200_MEASURED, measured=True),
            "fp16": Figure(684 * TERA, f"{_H200_MEASURED}; taken from bf16", measured=True),
            "fp8": Figure(1334 * TERA, f"{_H200_MEASURED}; row-wise scales", measured=True),
        },
        Figure(450 * GB, f"{_H200}: NVLink 900 GB/s both ways"),
        ("h200-sxm", "nvidia h200"),
        ("datasheet: 4.8 TB/s, 989 TFLOP/s bf16, 1,979 fp8; bursts measured: 776 bf16, 1,475 fp8",),
    ),
    Device(
        "A100",
        "gpu",
        Figure(80 * GB, _A100),
        Figure(2.039 * TB, _A100),
        _peaks(_A100, fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624),
        Figure(300 * GB, f"{_A100}: NVLink 600 GB/s both ways"),
        ("a100-80gb", "nvidia a100-sxm4-80gb"),
    ),
    Device(
        "A100-40GB",
        "gpu",
        Figure(40 * GB, _A100),
        Figure(1.555 * TB, _A100),
        _peaks(_A100, fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624),
        Figure(300 * GB, f"{_A100}: NVLink 600 GB/s both ways"),
        ("nvidia a100-sxm4-40gb",),
    ),
    Device(
        "L40S",
        "gpu",
        Figure(48 * GB, _L40S),
        Figure(864 * GB, _L40S),
        _peaks(_L40S, fp32=91.6, tf32=183, bf16=362.05, fp16=362.05, fp8=733, int8=733),
        Figure(32 * GB, f"{_L40S}: PCIe 4.0 x16, 64 GB/s both ways"),
        ("nvidia l40s",),
    ),
    Device(
        "L4",
        "gpu",
        Figure(24 * GB, _L4),
        Figure(300 * GB, _L4),
        _peaks(_L4, fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242.5, int8=242.5),
        Figure(32 * GB, f"{_L4}: PCIe 4.0 x16, 64 GB/s both ways"),
        ("nvidia l4",),
    ),
    Device(
        "RTX-4090",
        "gpu",
        Figure(24 * GB, _ADA),
        Figure(1008 * GB, _ADA),
        _peaks(_ADA, fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3, int8=660.6),
        Figure(32 * GB, f"{_ADA}: PCIe 4.0 x16, no NVLink"),
        ("4090", "rtx4090", "nvidia geforce rtx 4090"),
    ),
    Device(
        "Ascend-910B",
        "npu",
        Figure(64 * GB, _ASCEND),
        Figure(1.6 * TB, _ASCEND),
        _peaks(_ASCEND, fp32=75, bf16=313, fp16=313, int8=640),
        Figure(196 * GB, f"{_ASCEND}: HCCS 392 GB/s both ways"),
        ("910b", "ascend910b"),
        ("figures of the middle bin (910B3); planning only, check against your card",),
    ),
)  # fmt: skip

DEVICES: dict[str, Device] = {device.name: device for device in _ALL}


def _key(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")


def find_device(name: str) -> Device:
    """The registered device called `name` (case and separators do not matter).

    Raises:
        ConfigError: no such device; names the nearest one and lists all.
    """
    by_key = {_key(alias): device for device in _ALL for alias in (device.name, *device.aliases)}
    key = _key(name)
    if key in by_key:
        return by_key[key]
    near = nearest(key, by_key, 3)
    hint = f"did you mean {by_key[near].name!r}? " if near else ""
    raise ConfigError(f"there is no device {name!r} in the registry: {hint}known: {', '.join(DEVICES)}, or 'here' to measure this machine")


def match_device(product_name: str) -> Device | None:
    """The registered device that a driver's product name (such as "NVIDIA H200") stands for, or None."""
    key = _key(product_name)
    best: tuple[int, Device] | None = None
    for device in _ALL:
        for alias in (device.name, *device.aliases):
            if _key(alias) in key and (best is None or len(alias) > best[0]):
                best = (len(alias), device)
    return best[1] if best else None
