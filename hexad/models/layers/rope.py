"""Tables of rotary position embedding: [max_len, R] float32, R / 2 cosines then R / 2 sines of each position.

Scaling rules follow the papers and `transformers`: none, linear (kaiokendev 2023), dynamic NTK, llama3 (Llama 3.1), YaRN (Peng et al.
2023), LongRoPE (Ding et al. 2024). Rules that depend on the length of the sequence are fixed for the engine's context, so that a
position's key does not depend on when it was computed: `dynamic` uses the base for `max_len`, `longrope` its long factors when `max_len`
exceeds the original context.
"""

from __future__ import annotations

import math

import torch

from hexad.common.errors import ModelError
from hexad.models.spec import RopeSpec


def rope_table(rope: RopeSpec, max_len: int, trained_len: int, device: torch.device) -> torch.Tensor:
    """The table of `rope` for positions 0 .. max_len - 1.

    Args:
        max_len: longest sequence that the engine serves.
        trained_len: the checkpoint's own context (`ModelSpec.max_len`).

    Raises:
        ModelError: a scaling rule that does not exist here.
    """
    inverse, factor = inverse_frequencies(rope, max_len, trained_len)
    angles = torch.arange(max_len, dtype=torch.float32).unsqueeze(1) * inverse  # [max_len, R / 2]
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * factor).to(device)


def inverse_frequencies(rope: RopeSpec, max_len: int, trained_len: int) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [R / 2], attention factor)."""
    if rope.scaling == "none":
        return _plain(rope.theta, rope.dim), 1.0
    if rope.scaling == "linear":
        return _plain(rope.theta, rope.dim) / rope.factor, 1.0
    if rope.scaling == "dynamic":
        return _dynamic(rope, max_len, trained_len), 1.0
    if rope.scaling == "llama3":
        return _llama3(rope), 1.0
    if rope.scaling == "yarn":
        return _yarn(rope, trained_len)
    if rope.scaling == "longrope":
        return _longrope(rope, max_len, trained_len)
    raise ModelError(f"RoPE scaling is {rope.scaling!r}: known are none, linear, dynamic, llama3, yarn and longrope")


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _dynamic(rope: RopeSpec, max_len: int, trained_len: int) -> torch.Tensor:
    original = rope.original_max_len or trained_len
    longest = max(max_len, original)
    growth = (rope.factor * longest / original) - (rope.factor - 1)
    return _plain(rope.theta * growth ** (rope.dim / (rope.dim - 2)), rope.dim)


def _llama3(rope: RopeSpec) -> torch.Tensor:
    inverse = _plain(rope.theta, rope.dim)
    wavelength = 2 * math.pi / inverse
    low, high = rope.original_max_len / rope.low_freq_factor, rope.original_max_len / rope.high_freq_factor
    smooth = (rope.original_max_len / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * inverse / rope.factor + smooth * inverse
    scaled = torch.where(wavelength > low, inverse / rope.factor, inverse)
    between = (wavelength >= high) & (wavelength <= low)
    return torch.where(between, blended, scaled)


def _yarn(rope: RopeSpec, trained_len: int) -> tuple[torch.Tensor, float]:
    original = rope.original_max_len or trained_len
    low = _correction_dim(rope, original, rope.extra.get("beta_fast") or 32)
    high = _correction_dim(rope, original, rope.extra.get("beta_slow") or 1)
    if rope.extra.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # the ramp below divides by the difference
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inverse = _plain(rope.theta, rope.dim)
    return inverse / rope.factor * ramp + inverse * (1 - ramp), _yarn_attention_factor(rope)


def _correction_dim(rope: RopeSpec, original: int, rotations: float) -> float:
    """The feature pair that turns `rotations` times over the original context."""
    return rope.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeSpec) -> float:
    given = rope.extra.get("attention_factor")
    if given is not None:
        return float(given)

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    one, every = rope.extra.get("mscale"), rope.extra.get("mscale_all_dim")
    return mscale(one) / mscale(every) if one and every else mscale(1.0)


def _longrope(rope: RopeSpec, max_len: int, trained_len: int) -> tuple[torch.Tensor, float]:
    original = rope.original_max_len or trained_len
    factors = rope.extra["long_factor" if max_len > original else "short_factor"]
    inverse = _plain(rope.theta, rope.dim) / torch.tensor(factors, dtype=torch.float32)
    given = rope.extra.get("attention_factor")
    if given is not None:
        return inverse, float(given)
    growth = rope.factor if rope.factor > 1 else trained_len / original
    return inverse, 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(original))
