"""Decode over a prefix that all rows share (cascade): its keys are read once a tile of queries, not once a row.

The rows' queries of one key head become the rows of one product. Each program covers a part of the shared keys for a tile of queries and
leaves a partial result; `decode_kernel` covers what lies after the prefix meanwhile and adds these to it (`combine_kernel` does where a row
has several items).

What it can cost at best, for 256 rows of a Llama-3.1-8B (32 query and 8 key heads of 128) over 2,048 shared keys: 8.6 GFLOP, 13 us at the
sustained rate of an H200; 8 MB of keys and values and 2 MB of queries, 2 us; a partial result is 4 MB a part, written and read in 2 us.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hexad.operators.triton.decode import attend_pages
from hexad.operators.triton.prefill import attend_tiles


@triton.jit(do_not_specialize=["num_rows", "splits"])
def shared_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
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
    TENSOR_COPY: tl.constexpr,  # a page holds whole tiles: they come through the bulk tensor copy engine
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (key head, tile of pairs, part of `splits` parts): partial results at line (part * num_rows + row) * HEADS + head."""
    kv_head = tl.program_id(0)
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    part = tl.program_id(2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: successors rely on what came before this kernel
    shared = tl.load(shared_ptr)
    tiles = (shared + TILE - 1) // TILE
    low = (tiles * part // splits) * TILE
    high = tl.minimum((tiles * (part + 1) // splits) * TILE, shared)
    row = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    dim = tl.arange(0, DIM_PAD)
    real = row < num_rows
    address = row.to(tl.int64)[:, None] * Q_STRIDE + head[:, None] * DIM + dim[None, :]
    q = tl.load(q_ptr + address, mask=real[:, None] & (dim < DIM)[None, :], other=0.0)
    if TENSOR_COPY:
        top = tl.full([PAIRS], -1.0e30, tl.float32)
        norm = tl.zeros([PAIRS], tl.float32)
        acc = tl.zeros([PAIRS, DIM_PAD], tl.float32)
        acc, norm, top = attend_tiles(
            acc, norm, top, q, k_ptr, v_ptr, k_desc, v_desc, table_ptr, kv_head, row, low, high, 0,
            DIM, DIM_PAD, PAGE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, SCALE, SOFTCAP, 0, TILE,
            False, False, True, STAGES, PRECISION,
        )  # fmt: skip
    else:
        acc, norm, top = attend_pages(
            q, k_ptr, v_ptr, table_ptr, kv_head, low, high,
            PAIRS, DIM, DIM_PAD, PAGE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, SCALE, SOFTCAP, TILE, STAGES, PRECISION,
        )  # fmt: skip
    line = (part * num_rows + row) * HEADS + head
    tl.store(partial_ptr + line.to(tl.int64)[:, None] * DIM_PAD + dim[None, :], acc, mask=real[:, None])
    tl.store(stats_ptr + line * 2, top, mask=real)
    tl.store(stats_ptr + line * 2 + 1, norm, mask=real)
