"""q/k norm, RoPE and the KV write in one pass: q is turned in place, k and v go to their pages."""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hexad.operators.args import RopeKVArgs
from hexad.operators.batch import KVPages
from hexad.operators.registry import Kernel
from hexad.operators.triton.launch import Launcher, pow2, target


@triton.jit
def head_weight(q_weight_ptr, k_weight_ptr, feature, inside, is_q):
    """Norm weights [heads, features]: the query's for query heads, the key's for the others."""
    q_weight = tl.load(q_weight_ptr + feature, mask=inside, other=0.0)
    k_weight = tl.load(k_weight_ptr + feature, mask=inside, other=0.0)
    return tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])


@triton.jit
def rope_kv_kernel(
    qkv_ptr,
    position_ptr,
    table_ptr,
    slot_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # rotary_dim / 2
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,  # features that do not turn, padded; 0: none
    INTERLEAVED: tl.constexpr,
    QK_NORM: tl.constexpr,
    EPS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token and HEAD_BLOCK heads of (q, k, v) a program."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    known = head < HEADS + 2 * KV_HEADS
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    index = tl.arange(0, HALF_PAD)
    turning = index < HALF
    if INTERLEAVED:
        low, high = 2 * index, 2 * index + 1
    else:
        low, high = index, index + HALF
    dtype = qkv_ptr.dtype.element_ty
    pair_mask = known[:, None] & turning[None, :]
    if PDL:
        gdc_launch_dependents()  # first: products that follow start to read their weights
        gdc_wait()
    source = qkv_ptr + token * ROW_STRIDE + head[:, None] * DIM
    first = tl.load(source + low[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    second = tl.load(source + high[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    position = tl.load(position_ptr + token)
    slot = tl.load(slot_ptr + token)
    if HALF > 0:
        cosine = tl.load(table_ptr + position * 2 * HALF + index, mask=turning, other=1.0)
        sine = tl.load(table_ptr + position * 2 * HALF + HALF + index, mask=turning, other=0.0)
    if REST_PAD > 0:
        rest = 2 * HALF + tl.arange(0, REST_PAD)
        rest_mask = known[:, None] & (rest < DIM)[None, :]
        tail = tl.load(source + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if QK_NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST_PAD > 0:
            square += tl.sum(tail * tail, 1)
        scale = tl.rsqrt(square / DIM + EPS)[:, None]
        normed = (~is_v)[:, None]
        gain = head_weight(q_weight_ptr, k_weight_ptr, low, turning, is_q)
        first = tl.where(normed, ((first * scale).to(dtype) * gain).to(tl.float32), first)
        gain = head_weight(q_weight_ptr, k_weight_ptr, high, turning, is_q)
        second = tl.where(normed, ((second * scale).to(dtype) * gain).to(tl.float32), second)
        if REST_PAD > 0:
            gain = head_weight(q_weight_ptr, k_weight_ptr, rest, rest < DIM, is_q)
            tail = tl.where(normed, ((tail * scale).to(dtype) * gain).to(tl.float32), tail)
    if HALF > 0:
        still = is_v[:, None]
        new_first = tl.where(still, first, first * cosine[None, :] - second * sine[None, :])
        second = tl.where(still, second, second * cosine[None, :] + first * sine[None, :])
        first = new_first
    first, second = first.to(dtype), second.to(dtype)
    q_mask = pair_mask & is_q[:, None]
    tl.store(source + low[None, :], first, mask=q_mask)
    tl.store(source + high[None, :], second, mask=q_mask)
    block, offset = slot // PAGE, slot % PAGE
    page = block * BLOCK_STRIDE + offset * TOKEN_STRIDE
    kept = known & (slot >= 0)
    k_rows = kept & (head >= HEADS) & ~is_v
    v_rows = kept & is_v
    k_target = k_ptr + page + (head - HEADS)[:, None] * HEAD_STRIDE
    v_target = v_ptr + page + (head - HEADS - KV_HEADS)[:, None] * HEAD_STRIDE
    kv_dtype = k_ptr.dtype.element_ty
    k_mask, v_mask = k_rows[:, None] & turning[None, :], v_rows[:, None] & turning[None, :]
    tl.store(k_target + low[None, :], first.to(kv_dtype), mask=k_mask)
    tl.store(k_target + high[None, :], second.to(kv_dtype), mask=k_mask)
    tl.store(v_target + low[None, :], first.to(kv_dtype), mask=v_mask)
    tl.store(v_target + high[None, :], second.to(kv_dtype), mask=v_mask)
    if REST_PAD > 0:
        tail = tail.to(dtype)
        tl.store(source + rest[None, :], tail, mask=rest_mask & is_q[:, None])
        tl.store(k_target + rest[None, :], tail.to(kv_dtype), mask=rest_mask & k_rows[:, None])
        tl.store(v_target + rest[None, :], tail.to(kv_dtype), mask=rest_mask & v_rows[:, None])


def rope_constants(args: RopeKVArgs, row_stride: int, page: int, strides: tuple[int, ...], *, pdl: bool) -> dict[str, Any]:
    """Constants of `rope_kv_kernel` for one layout of `qkv` rows and pages."""
    half = args.rotary_dim // 2
    rest = args.head_dim - 2 * half
    return {
        "HEADS": args.heads, "KV_HEADS": args.kv_heads, "DIM": args.head_dim, "HALF": half, "HALF_PAD": pow2(max(half, 1)),
        "REST_PAD": pow2(rest) if rest else 0, "INTERLEAVED": args.interleaved, "QK_NORM": args.qk_norm, "EPS": args.eps,
        "ROW_STRIDE": row_stride, "PAGE": page, "BLOCK_STRIDE": strides[0], "TOKEN_STRIDE": strides[1], "HEAD_STRIDE": strides[2],
        "HEAD_BLOCK": 8, "PDL": pdl,
    }  # fmt: skip


def bind_rope_kv_write(args: RopeKVArgs) -> Kernel:
    heads, kv_heads, dim = args.heads, args.kv_heads, args.head_dim
    head_blocks = triton.cdiv(heads + 2 * kv_heads, 8)
    pdl = target().tensor_copies
    launchers: dict[tuple[int, ...], Launcher] = {}

    def rope_kv_write(
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        slots: torch.Tensor,
        kv: KVPages,
        q_weight: torch.Tensor | None = None,
        k_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens, row_stride = qkv.shape[0], qkv.stride(0)
        strides = kv.k.stride()
        key = (row_stride, kv.k.shape[1], *strides)
        launch = launchers.get(key)
        if launch is None:
            assert kv.v.stride() == strides, "keys and values must have the same strides"
            constants = rope_constants(args, row_stride, kv.k.shape[1], strides, pdl=pdl)
            launch = launchers[key] = Launcher(rope_kv_kernel, constants, num_warps=4, pdl=pdl)
        weights = (q_weight, k_weight) if args.qk_norm else (qkv, qkv)
        if tokens:
            launch((tokens, head_blocks, 1), qkv, positions, cos_sin, slots, kv.k, kv.v, *weights)
        return qkv.view(tokens, heads + 2 * kv_heads, dim)[:, :heads]

    return rope_kv_write
