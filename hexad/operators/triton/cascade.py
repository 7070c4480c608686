"""Decode over a prefix that all rows share (cascade): its keys are read once a tile of queries, not once a row.

The rows' queries of one key head become the rows of one product. Each program covers a part of the shared keys for a tile of queries and
leaves a partial result; `decode_kernel` then covers what lies after the prefix, and `combine_kernel` merges both.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hexad.operators.triton.decode import soft_cap


@triton.jit(do_not_specialize=["num_rows", "splits"])
def shared_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    shared_ptr,
    partial_ptr,
    stats_ptr,
    num_rows,
    splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0: none
    PAIRS: tl.constexpr,  # (row, query head) pairs a program
    TILE: tl.constexpr,  # keys a step
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (key head, tile of pairs, part of `splits` parts): partial results at line (part * num_rows + row) * HEADS + head."""
    kv_head = tl.program_id(0)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    part = tl.program_id(2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    shared = tl.load(shared_ptr)
    tiles = (shared + TILE - 1) // TILE
    low = (tiles * part // splits) * TILE
    high = tl.minimum((tiles * (part + 1) // splits) * TILE, shared)
    row = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    dim = tl.arange(0, DIM_PAD)
    key = tl.arange(0, TILE)
    dtype = q_ptr.dtype.element_ty
    real = row < num_rows
    address = row.to(tl.int64)[:, None] * Q_STRIDE + head[:, None] * DIM + dim[None, :]
    q = tl.load(q_ptr + address, mask=real[:, None] & (dim < DIM)[None, :], other=0.0)
    scale_log2 = SCALE * 1.4426950408889634
    top = tl.full([PAIRS], -1.0e30, tl.float32)
    norm = tl.zeros([PAIRS], tl.float32)
    acc = tl.zeros([PAIRS, DIM_PAD], tl.float32)
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        at = start + key
        seen = at < high
        if PAGE >= TILE:
            base = tl.load(table_ptr + start // PAGE).to(tl.int64) * BLOCK_STRIDE + (start % PAGE + key) * TOKEN_STRIDE
        else:
            base = tl.load(table_ptr + at // PAGE, mask=seen, other=0).to(tl.int64) * BLOCK_STRIDE + (at % PAGE) * TOKEN_STRIDE
        where = base[:, None] + kv_head * HEAD_STRIDE + dim[None, :]
        if DIM_PAD == DIM:
            mask = seen[:, None]
        else:
            mask = seen[:, None] & (dim < DIM)[None, :]
        k = tl.load(k_ptr + where, mask=mask, other=0.0)
        v = tl.load(v_ptr + where, mask=mask, other=0.0)
        scores = tl.dot(q, k.to(dtype).T, input_precision=PRECISION)
        if SOFTCAP > 0:
            scores = soft_cap(scores * SCALE, SOFTCAP) * 1.4426950408889634
        else:
            scores = scores * scale_log2
        scores = tl.where(seen[None, :], scores, -1.0e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        norm = norm * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(dtype), v.to(dtype), acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    line = (part * num_rows + row) * HEADS + head
    tl.store(partial_ptr + line.to(tl.int64)[:, None] * DIM_PAD + dim[None, :], acc, mask=real[:, None])
    tl.store(stats_ptr + line * 2, top, mask=real)
    tl.store(stats_ptr + line * 2 + 1, norm, mask=real)
