"""Which number formats of weights this version serves, and on which devices: the loader's refusals, and what plans say. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from hexad.common.errors import ConfigError, nearest
from hexad.models.spec import ModelSpec

PLAIN = ("float32", "bfloat16", "float16")
ROUNDED = ("int8", "int4_g32", "int4_g32_zp")  # by `--quantization`: models/quant/rounding.py
CHECKPOINTS = ("plain", "gguf")
MAX_DEVICES = 1  # that share a model


def check_quantization(name: str | None, device_type: str) -> None:
    """Raises ConfigError for a name that is not in ROUNDED, and for devices that have no such products."""
    if name is None:
        return
    if name not in ROUNDED:
        near = nearest(name, ROUNDED, 3)
        known = ", ".join(ROUNDED)
        raise ConfigError(f"--quantization is {name!r}: " + (f"did you mean {near!r}? " if near else "") + f"known: {known}")
    if device_type != "cpu":
        raise ConfigError(
            f"--quantization {name} rounds weights for CPUs, but the device is {device_type}: leave it out, or use --device cpu"
        )


def unserved_model(spec: ModelSpec) -> str | None:
    """Why this version cannot serve a network of this kind, whatever its weights are in; None: it can."""
    if spec.stack != "decoder":
        return f"needs the {spec.stack} stack: decoder-only models are supported"
    if spec.moe is not None:
        return "is a mixture of experts: dense models are supported"
    return None


@dataclass(frozen=True)
class Served:
    """Whether a format is served; how to ask for it, or why not."""

    served: bool
    note: str


def weight_format_served(spec: ModelSpec, name: str, device_kind: str, devices: int = 1) -> Served:
    """What this version makes of `spec` with weights in the format `name` (models/costs.py) on so many of a "cpu", "gpu" or "npu"."""
    kind_of_model = unserved_model(spec)
    if kind_of_model is not None:
        return Served(False, f"the model {kind_of_model}")
    if device_kind not in ("cpu", "gpu"):
        return Served(False, "the device is neither a CPU nor a GPU")
    if devices > MAX_DEVICES:
        return Served(False, "models are not split over devices yet")
    if name in PLAIN:
        return Served(True, f"--dtype {name}")
    if name in ROUNDED:
        return Served(True, f"--quantization {name}") if device_kind == "cpu" else Served(False, "--quantization is for CPUs")
    if name.startswith("q") or "+" in name:  # of GGUF files: blocks, some files with several
        return Served(True, "a GGUF file") if device_kind == "cpu" else Served(False, "GPUs keep GGUF files as 16-bit numbers")
    return Served(False, "checkpoints in it are not read yet")
