"""Number formats of keys and values. Int8: what a head's row of a page holds, and the torch code that writes and reads it.

A head of D features takes D + 4 bytes: its codes, then a float32 scale in the machine's byte order. A value is code * scale, with
scale = largest magnitude / 127, worked out when the head is written, so that what a token's row holds depends on that token alone: copies
of blocks, shared prefixes and preemption see rows of bytes. A head whose largest magnitude is below `SMALLEST_TOP` is written as zero.
One that holds a NaN or an infinity reads back as NaN, so that the row's error is found as with other formats.
"""

from __future__ import annotations

import torch

from hexad.operators.args import AttentionArgs, RopeKVArgs

KV_INT8 = torch.int8
PAGE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": KV_INT8}  # by the names of options
SCALE_BYTES = 4
SMALLEST_TOP = 1e-30  # 127 / largest stays finite


def row_width(head_dim: int, kv_dtype: torch.dtype) -> int:
    """Numbers of `kv_dtype` that a head's keys (or values) take in a page: its features, and with int8 the scale."""
    return head_dim + SCALE_BYTES if kv_dtype == KV_INT8 else head_dim


def page_reasons(args: RopeKVArgs | AttentionArgs) -> list[str]:
    """What the definitions of the operators that write and read pages leave out."""
    if args.kv_dtype == KV_INT8 and args.device_type != "cpu":
        return ["int8 keys and values are for CPUs"]
    return []


def quantize_heads(values: torch.Tensor) -> torch.Tensor:
    """[..., D] -> int8 [..., D + 4]."""
    wide = values.float()
    top = wide.abs().amax(-1, keepdim=True)  # NaN if any is
    clean, spread = top.isfinite(), top >= SMALLEST_TOP
    scale = torch.where(clean, torch.where(spread, top / 127, 0.0), float("nan"))
    codes = torch.where(clean & spread, wide * (127 / top), 0.0).round().to(torch.int8)
    return torch.cat((codes, scale.contiguous().view(torch.int8)), dim=-1)


def dequantize_heads(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int8 [..., D + 4] -> [..., D] in `dtype`, rounded once."""
    scale = rows[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # a slice may lie at any byte
    return (rows[..., :-SCALE_BYTES].float() * scale).to(dtype)
