"""Dummy weights: the tensors that a spec asks for, filled with random numbers straight on the device. For benchmarks without a checkpoint.

Each tensor is seeded by its own name, so contents depend neither on loading order nor on how the model is split over ranks. Numbers are
uniform in ±1e-3. FP8 and integer words are random bits that are never NaN; their scales are such that the product stays within ±1e-3.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

import torch

from hexad.models.formats.handles import TORCH_DTYPES, check_slice
from hexad.models.spec import ModelSpec

AMPLITUDE = 1e-3
FP8_MAX = 448.0
_TILE = 2**22 - 3  # on a CPU the pattern repeats after this many numbers; odd, so that rows differ


@dataclass(frozen=True, slots=True)
class DummyHandle:
    """A tensor without a file."""

    name: str
    format: str
    full_shape: tuple[int, ...]
    center: float = 0.0  # 1 for norms that multiply
    amplitude: float = AMPLITUDE
    cuts: tuple[tuple[int, int, int], ...] = ()  # slices taken so far: (dim, start, stop)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.full_shape)
        for dim, start, stop in self.cuts:
            shape[dim] = stop - start
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.format]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def load(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor:
        target = torch.device(device or "cpu")
        full = (
            self._words(target)
            if not self.dtype.is_floating_point or self.dtype.itemsize == 1
            else self._uniform(dtype or self.dtype, target)
        )
        for dim, start, stop in self.cuts:
            full = full.narrow(dim, start, stop - start)
        part = full.clone() if self.cuts else full  # a clone, so that the whole can be freed
        return part.to(dtype or self.dtype).contiguous()

    def slice(self, dim: int, start: int, stop: int) -> DummyHandle:
        check_slice(self.name, self.shape, dim, start, stop)
        return replace(self, cuts=(*self.cuts, (dim, start, stop)))

    def raw(self) -> tuple[torch.Tensor, str]:
        return self.load(), self.format

    def _generator(self, device: torch.device) -> torch.Generator:
        seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little") >> 1
        return torch.Generator(device).manual_seed(seed)

    def _uniform(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        count = math.prod(self.full_shape)
        generated = count if device.type != "cpu" else min(count, _TILE)
        tile = torch.empty(generated, dtype=dtype, device=device)
        tile.uniform_(self.center - self.amplitude, self.center + self.amplitude, generator=self._generator(device))
        return _repeat(tile, count).reshape(self.full_shape)

    def _words(self, device: torch.device) -> torch.Tensor:
        count = math.prod(self.full_shape) * self.dtype.itemsize
        generated = count if device.type != "cpu" else min(count, _TILE)
        tile = torch.randint(0, 256, (generated,), dtype=torch.uint8, device=device, generator=self._generator(device))
        # FP8: with bit 2 clear no word is NaN or infinite (e4m3: 0x7F; e5m2: an exponent of all ones).
        words = _repeat(tile & 0xFB if self.dtype.is_floating_point else tile, count)
        return words.view(self.dtype).reshape(self.full_shape)


def _repeat(tile: torch.Tensor, count: int) -> torch.Tensor:
    if tile.numel() == count:
        return tile
    out = torch.empty(count, dtype=tile.dtype, device=tile.device)
    for start in range(0, count, tile.numel()):
        out[start : start + tile.numel()] = tile[: min(tile.numel(), count - start)]
    return out


def dummy_handles(spec: ModelSpec) -> dict[str, DummyHandle]:
    """Every tensor of a plain checkpoint of `spec`, by Hugging Face name."""
    shapes = expected_shapes(spec)
    center = 0.0 if spec.family.startswith("gemma") else 1.0
    dtype = spec.dtype if spec.dtype in TORCH_DTYPES else "bfloat16"
    return {n: DummyHandle(n, dtype, s, center if n.endswith("norm.weight") else 0.0) for n, s in shapes.items()}


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a decoder, unquantised."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, spec.hidden)}
    for index in range(spec.num_layers):
        for name, shape in (_attention(spec) | _feed_forward(spec) | _norms(spec)).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    shapes["model.norm.weight"] = (spec.hidden,)
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden)
    return shapes


def _attention(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    a = spec.attention
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    out: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, spec.hidden),
        "self_attn.k_proj.weight": (kv, spec.hidden),
        "self_attn.v_proj.weight": (kv, spec.hidden),
        "self_attn.o_proj.weight": (spec.hidden, q),
    }
    if a.qkv_bias:
        out |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if a.out_bias:
        out["self_attn.o_proj.bias"] = (spec.hidden,)
    if a.qk_norm:
        out |= {"self_attn.q_norm.weight": (a.head_dim,), "self_attn.k_norm.weight": (a.head_dim,)}
    return out


def _feed_forward(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    if spec.moe is None:
        return _mlp("mlp", spec.hidden, spec.mlp.intermediate, spec.mlp.gated, spec.mlp.bias)
    out: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (spec.moe.experts, spec.hidden)}
    for expert in range(spec.moe.experts):
        out |= _mlp(f"mlp.experts.{expert}", spec.hidden, spec.moe.intermediate, True, False)
    return out


def _mlp(prefix: str, hidden: int, intermediate: int, gated: bool, bias: bool) -> dict[str, tuple[int, ...]]:
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    out: dict[str, tuple[int, ...]] = {f"{prefix}.{n}.weight": (intermediate, hidden) for n in names}
    out[f"{prefix}.down_proj.weight"] = (hidden, intermediate)
    if bias:
        out |= {f"{prefix}.{n}.bias": (intermediate,) for n in names} | {f"{prefix}.down_proj.bias": (hidden,)}
    return out


def _norms(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if spec.family.startswith("gemma"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return {f"{n}.weight": (spec.hidden,) for n in names}
