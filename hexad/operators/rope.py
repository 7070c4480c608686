"""Rotary position embedding (Su et al. 2021) of q and k, fused with the per-head q/k norm before it and the KV write after it.

`rope_kv_write(qkv [T, (Hq + 2 Hkv) * D], positions [T] int64, cos_sin [max_len, R] float32, slots [T] int64, kv, q_weight, k_weight) -> q`

- The last axis of `qkv` holds all query heads, then the key heads, then the value heads.
- `cos_sin[p]` holds R / 2 cosines, then R / 2 sines, of position p; any attention factor (yarn) is multiplied into both. With
  rotary_dim 0 nothing turns and `cos_sin` is not read.
- With `qk_norm`, `q_weight` and `k_weight` [D] normalise each head in float32, rounded as `rms_norm` does; else they are None.
- Rotation is computed in float32 and rounded once.
- K (turned) and V of token t go to `kv.k` and `kv.v` at flat slot `slots[t]` (block * block_size + offset); slot -1 is skipped.
  Int8 pages take each head as codes and its scale (kv_int8.py).
- Returns q [T, Hq, D] in `dtype`; it may be a view of `qkv`, which may be overwritten.

On a CPU the reference keeps what it derived from the last `positions`, `slots` and `cos_sin` objects, because all layers of a kind pass
the same ones in a step: a new step must come in new tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hexad.operators.args import NormArgs, RopeKVArgs
from hexad.operators.batch import KVPages
from hexad.operators.kv_int8 import KV_INT8, page_reasons, quantize_heads
from hexad.operators.norm import rms_norm_reference
from hexad.operators.registry import Kernel, registry


@dataclass(slots=True)
class Turns:
    """What one step's positions and slots mean, worked out once for all layers."""

    positions: torch.Tensor
    slots: torch.Tensor
    cos: torch.Tensor | None  # [T, 1, R] float32: each pair's cosine at both of its features; None: nothing turns
    sin: torch.Tensor | None  # [T, 1, R] float32: likewise, negative at the first feature of a pair
    kept: torch.Tensor | None  # tokens that are written; None: all


def make_turns(args: RopeKVArgs, positions: torch.Tensor, cos_sin: torch.Tensor, slots: torch.Tensor) -> Turns:
    cos = sin = None
    if args.rotary_dim:
        half_cos, half_sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R / 2]
        join = _interleave if args.interleaved else _concatenate
        cos, sin = join(half_cos, half_cos), join(-half_sin, half_sin)
    kept = None
    if slots.device.type == "cpu" and slots.numel() and int(slots.min()) < 0:
        kept = (slots >= 0).nonzero().squeeze(1)
    return Turns(positions, slots, cos, sin, kept)


def _concatenate(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.cat((first, second), dim=-1)


def _interleave(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.stack((first, second), dim=-1).flatten(-2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Turn the first R features of x [T, H, D] by cos and sin [T, 1, R]: x cos + partner(x) sin, in float32, rounded once."""
    rotary_dim = cos.shape[-1]
    wide = x[..., :rotary_dim].float()
    if interleaved:
        partner = wide.view(*wide.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        partner = wide.roll(rotary_dim // 2, -1)
    turned = (wide * cos).addcmul_(partner, sin).to(x.dtype)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), dim=-1)


def write_pages(pages: torch.Tensor, turns: Turns, values: torch.Tensor) -> None:
    """Write values [T, Hkv, D] into pages [blocks, block_size, Hkv, D] at flat slots; -1 is skipped."""
    flat, slots = pages.view(-1, *pages.shape[2:]), turns.slots
    values = quantize_heads(values) if flat.dtype == KV_INT8 else values.to(flat.dtype)
    if turns.kept is not None:
        slots, values = slots[turns.kept], values[turns.kept]
    elif slots.device.type != "cpu":
        slots, values = _repeat_for_padding(flat, slots, values)
    flat.index_copy_(0, slots, values)


def _repeat_for_padding(flat: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Padding tokens repeat the write of another token, or rewrite what slot 0 has if all are padding: no round trip to the host."""
    other = slots.argmax(0, keepdim=True)
    target = slots[other].clamp_min(0)
    value = torch.where((slots[other] >= 0).view(-1, 1, 1), values[other], flat[target])
    written = slots >= 0
    return torch.where(written, slots, target), torch.where(written.view(-1, 1, 1), values, value)


def rope_kv_write_reference(args: RopeKVArgs) -> Kernel:
    heads, kv_heads, dim = args.heads, args.kv_heads, args.head_dim
    norm = rms_norm_reference(NormArgs(dim, args.eps, args.dtype, args.device_type))
    last: list[tuple[torch.Tensor, Turns]] = []  # the table and what came of it

    def turns_of(positions: torch.Tensor, cos_sin: torch.Tensor, slots: torch.Tensor) -> Turns:
        if args.device_type != "cpu":
            return make_turns(args, positions, cos_sin, slots)
        if last and last[0][0] is cos_sin and last[0][1].positions is positions and last[0][1].slots is slots:
            return last[0][1]
        turns = make_turns(args, positions, cos_sin, slots)
        last[:] = [(cos_sin, turns)]
        return turns

    def rope_kv_write(
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        slots: torch.Tensor,
        kv: KVPages,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        turns = turns_of(positions, cos_sin, slots)
        split = qkv.view(-1, heads + 2 * kv_heads, dim)  # [T, Hq + 2 Hkv, D]
        qk, v = split[:, : heads + kv_heads], split[:, heads + kv_heads :]
        if q_weight is not None and k_weight is not None:
            qk = torch.cat((norm(qk[:, :heads], q_weight), norm(qk[:, heads:], k_weight)), dim=1)
        if turns.cos is not None and turns.sin is not None:
            qk = rotate(qk, turns.cos, turns.sin, interleaved=args.interleaved)
        write_pages(kv.k, turns, qk[:, heads:])
        write_pages(kv.v, turns, v)
        return qk[:, :heads]

    return rope_kv_write


registry.define("rope_kv_write", rope_kv_write_reference, page_reasons)
