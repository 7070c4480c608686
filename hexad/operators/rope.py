"""Rotary position embedding (Su et al. 2021) of q and k, fused with the per-head q/k norm before it and the KV write after it.

`rope_kv_write(qkv [T, (Hq + 2 Hkv) * D], positions [T] int64, cos_sin [max_len, R] float32, slots [T] int64, kv, q_weight, k_weight) -> q`

- The last axis of `qkv` holds all query heads, then the key heads, then the value heads.
- `cos_sin[p]` holds R / 2 cosines, then R / 2 sines, of position p; any attention factor (yarn) is multiplied into both. With
  rotary_dim 0 nothing turns and `cos_sin` is not read.
- With `qk_norm`, `q_weight` and `k_weight` [D] normalise each head in float32, rounded as `rms_norm` does; else they are None.
- Rotation is computed in float32 and rounded once.
- K (turned) and V of token t go to `kv.k` and `kv.v` at flat slot `slots[t]` (block * block_size + offset); slot -1 is skipped.
- Returns q [T, Hq, D] in `dtype`; it may be a view of `qkv`, which may be overwritten.
"""

from __future__ import annotations

import torch

from hexad.operators.args import NormArgs, RopeKVArgs
from hexad.operators.batch import KVPages
from hexad.operators.norm import rms_norm_reference
from hexad.operators.registry import Kernel, registry


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Turn the first 2 * cos.shape[-1] features of x [T, H, D] by cos and sin [T, 1, R / 2] (float32), rounding once to x's dtype."""
    half = cos.shape[-1]
    turned = torch.empty_like(x)
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        out_first, out_second = turned[..., 0 : 2 * half : 2], turned[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
        out_first, out_second = turned[..., :half], turned[..., half : 2 * half]
    torch.sub(first * cos, second * sin, out=out_first) if x.dtype == torch.float32 else out_first.copy_(first * cos - second * sin)
    torch.add(second * cos, first * sin, out=out_second) if x.dtype == torch.float32 else out_second.copy_(second * cos + first * sin)
    if 2 * half < x.shape[-1]:
        turned[..., 2 * half :] = x[..., 2 * half :]
    return turned


def write_pages(pages: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write values [T, Hkv, D] into pages [blocks, block_size, Hkv, D] at flat slots; -1 is skipped."""
    flat = pages.view(-1, *pages.shape[2:])
    if slots.device.type == "cpu" and slots.numel() and int(slots.min()) < 0:
        kept = slots >= 0
        slots, values = slots[kept], values[kept]
    elif slots.device.type != "cpu":  # no host round trip: padding tokens rewrite what their page has
        kept = (slots >= 0).view(-1, 1, 1)
        slots = slots.clamp_min(0)
        values = torch.where(kept, values.to(flat.dtype), flat[slots])
    flat.index_copy_(0, slots, values.to(flat.dtype))


def rope_kv_write_reference(args: RopeKVArgs) -> Kernel:
    heads, kv_heads, dim = args.heads, args.kv_heads, args.head_dim
    half, interleaved = args.rotary_dim // 2, args.interleaved
    norm = rms_norm_reference(NormArgs(dim, args.eps, args.dtype, args.device_type))

    def rope_kv_write(
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        slots: torch.Tensor,
        kv: KVPages,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        split = qkv.view(-1, heads + 2 * kv_heads, dim)  # [T, Hq + 2 Hkv, D]
        qk, v = split[:, : heads + kv_heads], split[:, heads + kv_heads :]
        if q_weight is not None and k_weight is not None:
            qk = torch.cat((norm(qk[:, :heads], q_weight), norm(qk[:, heads:], k_weight)), dim=1)
        if half:
            table = cos_sin[positions].unsqueeze(1)  # [T, 1, R]
            qk = rotate(qk, table[..., :half], table[..., half:], interleaved=interleaved)
        write_pages(kv.k, slots, qk[:, heads:])
        write_pages(kv.v, slots, v)
        return qk[:, :heads]

    return rope_kv_write


registry.define("rope_kv_write", rope_kv_write_reference)
