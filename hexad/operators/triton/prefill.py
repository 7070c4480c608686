"""Paged attention of rows with several query tokens (prefill, chunked prefill, verification), after FlashAttention-2 (Dao 2023).

Row b's queries are its last positions; keys before them may come from earlier chunks or a cached prefix. One program takes QUERIES
positions of one query head and walks its keys in tiles: tiles that the window's lower edge cuts, tiles that every query sees (no mask),
tiles on the diagonal, and the row's last, partial tile, whose values past the end are read as zero (a page's tail may hold anything).
Full tiles come through the bulk tensor copy engine where the card has it and a page holds whole tiles, else through pointers.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hexad.operators.triton.decode import soft_cap


@triton.jit
def attend_tiles(
    acc,
    norm,
    top,
    q,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    table,
    kv_head,
    position,  # [QUERIES] of the queries
    low,  # first key tile
    high,  # keys past the last tile, or the row's length with EDGE
    oldest,  # first key that any of these queries sees
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    EDGE: tl.constexpr,  # keys at either end may not exist: load them as zero
    TENSOR_COPY: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Softmax-weighted sum over the key tiles from `low` to `high`, added to (acc, norm, top)."""
    key = tl.arange(0, TILE)
    dim = tl.arange(0, DIM_PAD)
    dtype = q.dtype
    scale_log2 = SCALE * 1.4426950408889634
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        at = start + key
        if TENSOR_COPY:
            page = tl.load(table + start // PAGE)
            k = k_desc.load([page, kv_head, start % PAGE, 0]).reshape(TILE, DIM_PAD)
        else:
            if PAGE >= TILE:
                base = tl.load(table + start // PAGE).to(tl.int64) * BLOCK_STRIDE + (start % PAGE + key) * TOKEN_STRIDE
            elif EDGE:
                page = tl.load(table + at // PAGE, mask=(at < high) & (at >= oldest), other=0).to(tl.int64)
                base = page * BLOCK_STRIDE + (at % PAGE) * TOKEN_STRIDE
            else:
                base = tl.load(table + at // PAGE).to(tl.int64) * BLOCK_STRIDE + (at % PAGE) * TOKEN_STRIDE
            address = base[:, None] + kv_head * HEAD_STRIDE + dim[None, :]
            if EDGE:
                mask = ((at < high) & (at >= oldest))[:, None] & (dim < DIM)[None, :]
                k = tl.load(k_ptr + address, mask=mask, other=0.0)
            elif DIM_PAD == DIM:
                k = tl.load(k_ptr + address)
            else:
                k = tl.load(k_ptr + address, mask=(dim < DIM)[None, :], other=0.0)
        scores = tl.dot(q, k.to(dtype).T, input_precision=PRECISION)
        if SOFTCAP > 0:
            scores = soft_cap(scores * SCALE, SOFTCAP) * 1.4426950408889634
        if MASKED:
            if SOFTCAP == 0:
                scores = scores * scale_log2
            seen = position[:, None] >= at[None, :]
            if WINDOW > 0:
                seen = seen & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, -1.0e30)
            new_top = tl.maximum(top, tl.max(scores, 1))
            scores = scores - new_top[:, None]
        elif SOFTCAP > 0:
            new_top = tl.maximum(top, tl.max(scores, 1))
            scores = scores - new_top[:, None]
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)  # SCALE is positive
            scores = scores * scale_log2 - new_top[:, None]
        weight = tl.exp2(scores)
        shrink = tl.exp2(top - new_top)
        norm = norm * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        if TENSOR_COPY:
            v = v_desc.load([page, kv_head, start % PAGE, 0]).reshape(TILE, DIM_PAD)
        elif EDGE:
            v = tl.load(v_ptr + address, mask=mask, other=0.0)
        elif DIM_PAD == DIM:
            v = tl.load(v_ptr + address)
        else:
            v = tl.load(v_ptr + address, mask=(dim < DIM)[None, :], other=0.0)
        acc = tl.dot(weight.to(dtype), v.to(dtype), acc, input_precision=PRECISION)
        top = new_top
    return acc, norm, top


@triton.jit(do_not_specialize=["table_stride", "first_row", "abreast"])
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    out_ptr,
    table_stride,
    first_row,
    abreast,
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
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    TENSOR_COPY: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """QUERIES positions of one query head of one row a program; of `abreast` heads together the longest walks start first."""
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(2) % (HEADS // abreast) * abreast + tl.program_id(0)
    row = first_row + tl.program_id(2) // (HEADS // abreast)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    begin = tl.load(query_start_ptr + row)
    count = tl.load(query_start_ptr + row + 1) - begin
    length = tl.load(seq_lens_ptr + row)
    if (block * QUERIES >= count) | (length <= 0):
        return
    kv_head = head // GROUP
    table = table_ptr + row * table_stride
    index = block * QUERIES + tl.arange(0, QUERIES)
    dim = tl.arange(0, DIM_PAD)
    q_mask = (index < count)[:, None] & (dim < DIM)[None, :]
    token = (begin + index).to(tl.int64)
    q = tl.load(q_ptr + token[:, None] * Q_STRIDE + head * DIM + dim[None, :], mask=q_mask, other=0.0)
    position = length - count + index
    first_position = length - count + block * QUERIES
    past = tl.minimum(first_position + QUERIES, length)  # keys that the last real query sees
    top = tl.full([QUERIES], -1.0e30, tl.float32)
    norm = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    oldest = 0
    low = 0
    plain = first_position // TILE * TILE  # up to here each tile is seen by all
    whole = tl.minimum(tl.cdiv(past, TILE), length // TILE) * TILE  # up to here each tile exists in full
    if WINDOW > 0:
        oldest = tl.maximum(first_position - WINDOW + 1, 0)
        low = oldest // TILE * TILE
        newest_start = tl.maximum(past - WINDOW, 0)  # from here on each key is within the window of all
        cut = tl.minimum(tl.cdiv(newest_start, TILE) * TILE, whole)
        acc, norm, top = attend_tiles(
            acc, norm, top, q, k_ptr, v_ptr, k_desc, v_desc, table, kv_head, position, low, cut, oldest,
            DIM, DIM_PAD, PAGE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, SCALE, SOFTCAP, WINDOW, TILE,
            True, True, False, STAGES, PRECISION,
        )  # fmt: skip
        low = tl.maximum(low, cut)
        plain = tl.maximum(plain, low)
    acc, norm, top = attend_tiles(
        acc, norm, top, q, k_ptr, v_ptr, k_desc, v_desc, table, kv_head, position, low, plain, oldest,
        DIM, DIM_PAD, PAGE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, SCALE, SOFTCAP, 0, TILE,
        False, False, TENSOR_COPY, STAGES, PRECISION,
    )  # fmt: skip
    acc, norm, top = attend_tiles(
        acc, norm, top, q, k_ptr, v_ptr, k_desc, v_desc, table, kv_head, position, plain, whole, oldest,
        DIM, DIM_PAD, PAGE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, SCALE, SOFTCAP, WINDOW, TILE,
        True, False, TENSOR_COPY, STAGES, PRECISION,
    )  # fmt: skip
    acc, norm, top = attend_tiles(
        acc, norm, top, q, k_ptr, v_ptr, k_desc, v_desc, table, kv_head, position, tl.maximum(whole, plain), past, oldest,
        DIM, DIM_PAD, PAGE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, SCALE, SOFTCAP, WINDOW, TILE,
        True, True, False, 1, PRECISION,
    )  # fmt: skip
    out = out_ptr + token[:, None] * (HEADS * DIM) + head * DIM + dim[None, :]
    tl.store(out, (acc / norm[:, None]).to(q_ptr.dtype.element_ty), mask=q_mask)
