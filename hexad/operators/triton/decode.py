"""Paged attention of rows with one query token (decode), with keys split over programs.

The split is planned on the device, once a step and KV group, from the lengths alone: grids depend only on the number of rows, so a
captured graph serves any lengths. The plan cuts rows into items of about equal numbers of keys (a row up to 1.25 times the chunk stays
whole), so that a ragged batch keeps every multiprocessor busy. A row of one item writes its output; partial results of the others are
merged by `combine_kernel`.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hexad.operators.triton.device import prefetch

ITEM_FIELDS = 4  # row, first key, key past the last, 1 if the row has no other item


@triton.jit(do_not_specialize=["num_rows", "wanted", "capacity"])
def plan_kernel(
    seq_lens_ptr,
    items_ptr,
    starts_ptr,
    shared_ptr,
    num_rows,
    wanted,
    capacity,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
    ITEMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ITEMS items a program. `wanted` items fill the card, at most twice as many and one a row are made; `starts[b]` is row b's first.

    With SHARED the items begin after the prefix that all rows share.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.arange(0, ROWS)
    length = tl.load(seq_lens_ptr + row, mask=row < num_rows, other=0)
    first = tl.zeros([ROWS], tl.int32)
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    if SHARED:
        first = tl.minimum(first + tl.load(shared_ptr), length)
    first_tile = first // TILE
    tiles = tl.where(length > first, (length + TILE - 1) // TILE - first_tile, 0)
    total_tiles = tl.sum(tiles, 0)
    chunk = tl.maximum((total_tiles + wanted - 1) // wanted, 1)
    filled = tl.sum((tiles > 0).to(tl.int32), 0)
    if (4 * tl.max(tiles, 0) > 5 * chunk) & (4 * tl.max(tiles, 0) * filled > 5 * total_tiles):  # ragged: smaller items balance better
        chunk = tl.maximum((total_tiles + 2 * wanted - 1) // (2 * wanted), 1)
    parts = tl.where(tiles > 0, tl.maximum((4 * tiles + 5 * chunk - 1) // (5 * chunk), 1), 0)
    ends = tl.cumsum(parts, 0)
    starts = ends - parts
    total = tl.sum(parts, 0)
    if tl.program_id(0) == 0:
        tl.store(starts_ptr + row, starts, mask=row < num_rows)
        tl.store(starts_ptr + num_rows, total)
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    owner = tl.sum((ends[None, :] <= item[:, None]).to(tl.int32), 1)  # rows that end before this item
    mine = row[None, :] == owner[:, None]  # [ITEMS, ROWS], one true a line
    part = item - tl.sum(tl.where(mine, starts[None, :], 0), 1)
    count = tl.maximum(tl.sum(tl.where(mine, parts[None, :], 0), 1), 1)
    row_tiles = tl.sum(tl.where(mine, tiles[None, :], 0), 1)
    row_first = tl.sum(tl.where(mine, first[None, :], 0), 1)
    row_length = tl.sum(tl.where(mine, length[None, :], 0), 1)
    base = row_first // TILE
    low = tl.maximum((base + part * row_tiles // count) * TILE, row_first)
    high = tl.minimum((base + (part + 1) * row_tiles // count) * TILE, row_length)
    real = item < total
    kept = item < capacity
    record = items_ptr + item * 4
    tl.store(record, tl.where(real, owner, -1), mask=kept)
    tl.store(record + 1, low, mask=kept)
    tl.store(record + 2, high, mask=kept)
    tl.store(record + 3, (count == 1).to(tl.int32), mask=kept)


@triton.jit
def soft_cap(scores, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(scores / SOFTCAP); exact at both ends."""
    return SOFTCAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634 / SOFTCAP)) + 1.0))


@triton.jit
def attend_pages(
    q,  # [ROWS, DIM_PAD]
    k_ptr,
    v_ptr,
    table,
    kv_head,
    low,
    high,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0: none
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Softmax-weighted sum of the values of keys `low` to `high`, which every query sees: (sum, norm, maximum), not yet divided."""
    key = tl.arange(0, TILE)
    dim = tl.arange(0, DIM_PAD)
    dtype = q.dtype
    scale_log2 = SCALE * 1.4426950408889634
    top = tl.full([ROWS], -1.0e30, tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for start in tl.range(low // TILE * TILE, high, TILE, num_stages=STAGES):
        at = start + key
        seen = (at >= low) & (at < high)
        if PAGE >= TILE:
            base = tl.load(table + start // PAGE).to(tl.int64) * BLOCK_STRIDE + (start % PAGE + key) * TOKEN_STRIDE
        else:
            page = tl.load(table + at // PAGE, mask=seen, other=0).to(tl.int64)
            base = page * BLOCK_STRIDE + (at % PAGE) * TOKEN_STRIDE
        address = base[:, None] + kv_head * HEAD_STRIDE + dim[None, :]
        if DIM_PAD == DIM:
            mask = seen[:, None]
        else:
            mask = seen[:, None] & (dim < DIM)[None, :]
        k = tl.load(k_ptr + address, mask=mask, other=0.0)
        v = tl.load(v_ptr + address, mask=mask, other=0.0)
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
    return acc, norm, top


@triton.jit(do_not_specialize=["table_stride", "num_rows", "splits"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    items_ptr,
    partial_ptr,
    stats_ptr,
    shared_partial_ptr,
    shared_stats_ptr,
    out_ptr,
    table_stride,
    num_rows,
    splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0: none
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    LINES: tl.constexpr,  # L2 lines of 128 bytes a key
    SHARED: tl.constexpr,  # the rows share a prefix, whose partial results `shared_kernel` leaves
    PDL: tl.constexpr,
):
    """One item and one key head a program; the queries of the group are the rows of the products.

    With PDL the items and older keys may be read before the predecessor (which writes this step's queries and keys) is done: the first
    tile of keys is on its way into the L2 by then. The launch that follows the plan itself must be `serial`. With SHARED the predecessor
    is `shared_kernel`, which starts its successors once its own predecessors are done: the keys after the prefix are then read beside it,
    and a row's only item adds the prefix and writes the output.
    """
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    row = tl.load(items_ptr + item * 4)
    low = tl.load(items_ptr + item * 4 + 1)
    high = tl.load(items_ptr + item * 4 + 2)
    whole = tl.load(items_ptr + item * 4 + 3)
    if PDL and not SHARED:
        if row >= 0:
            early = tl.minimum(low // TILE * TILE + tl.arange(0, TILE), high - 1)
            page = tl.load(table_ptr + row * table_stride + early // PAGE).to(tl.int64)
            base = tl.maximum(page, 0) * BLOCK_STRIDE + (early % PAGE) * TOKEN_STRIDE + kv_head * HEAD_STRIDE
            line = tl.arange(0, LINES) * (DIM_PAD // LINES)
            prefetch(k_ptr + base[:, None] + line[None, :])
            prefetch(v_ptr + base[:, None] + line[None, :])
        gdc_wait()
    if row < 0:
        if PDL and SHARED:
            gdc_wait()
        return
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, DIM_PAD)
    dtype = q_ptr.dtype.element_ty
    head = kv_head * GROUP + member
    q_mask = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    q_address = q_ptr + row.to(tl.int64) * Q_STRIDE + head[:, None] * DIM + dim[None, :]
    if SHARED:  # read before the wait: past the L1, which may hold what the layer before left there
        q = tl.load(q_address, mask=q_mask, other=0.0, cache_modifier=".cg")
    else:
        q = tl.load(q_address, mask=q_mask, other=0.0)
    acc, norm, top = attend_pages(
        q, k_ptr, v_ptr, table_ptr + row * table_stride, kv_head, low, high,
        GROUP_PAD, DIM, DIM_PAD, PAGE, BLOCK_STRIDE, TOKEN_STRIDE, HEAD_STRIDE, SCALE, SOFTCAP, TILE, STAGES, PRECISION,
    )  # fmt: skip
    if SHARED:
        if PDL:
            gdc_wait()
        if whole > 0:
            for part in range(splits):
                shared_line = (part * num_rows + row) * HEADS + head
                shared_top = tl.load(shared_stats_ptr + shared_line * 2, mask=member < GROUP, other=-1.0e30)
                shared_norm = tl.load(shared_stats_ptr + shared_line * 2 + 1, mask=member < GROUP, other=0.0)
                address = shared_line.to(tl.int64)[:, None] * DIM_PAD + dim[None, :]
                value = tl.load(shared_partial_ptr + address, mask=(member < GROUP)[:, None], other=0.0)
                new_top = tl.maximum(top, shared_top)
                ours, theirs = tl.exp2(top - new_top), tl.exp2(shared_top - new_top)
                norm = norm * ours + shared_norm * theirs
                acc = acc * ours[:, None] + value * theirs[:, None]
                top = new_top
    if whole > 0:
        out = out_ptr + row.to(tl.int64) * (HEADS * DIM) + head[:, None] * DIM + dim[None, :]
        tl.store(out, (acc / norm[:, None]).to(dtype), mask=q_mask)
    else:
        line = item * HEADS + head
        tl.store(partial_ptr + line[:, None] * DIM_PAD + dim[None, :], acc, mask=(member < GROUP)[:, None])
        tl.store(stats_ptr + line * 2, top, mask=member < GROUP)
        tl.store(stats_ptr + line * 2 + 1, norm, mask=member < GROUP)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def combine_kernel(
    partial_ptr,
    stats_ptr,
    starts_ptr,
    shared_partial_ptr,
    shared_stats_ptr,
    out_ptr,
    num_rows,
    splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TOGETHER: tl.constexpr,  # query heads a program
    PARTS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,  # at most so many parts of a shared prefix; 0: there is none
    PDL: tl.constexpr,
):
    """Merge the items of one row and TOGETHER query heads, PARTS at a time, and the parts of a shared prefix.

    Where rows are many, most have one item and nothing is to be done: then few programs should find that out.
    """
    row = tl.program_id(0)
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.load(starts_ptr + row)
    last = tl.load(starts_ptr + row + 1)
    if last - first <= 1:
        return
    dim = tl.arange(0, DIM_PAD)
    part = tl.arange(0, PARTS)
    mine = head < HEADS
    top = tl.full([TOGETHER], -1.0e30, tl.float32)
    norm = tl.zeros([TOGETHER], tl.float32)
    acc = tl.zeros([TOGETHER, DIM_PAD], tl.float32)
    if MAX_SPLITS > 0:
        split = tl.arange(0, MAX_SPLITS)
        there = (split < splits)[:, None] & mine[None, :]
        shared_line = (split[:, None] * num_rows + row) * HEADS + head[None, :]
        shared_tops = tl.load(shared_stats_ptr + shared_line * 2, mask=there, other=-1.0e30)
        shared_norms = tl.load(shared_stats_ptr + shared_line * 2 + 1, mask=there, other=0.0)
        address = shared_line.to(tl.int64)[:, :, None] * DIM_PAD + dim[None, None, :]
        shared_values = tl.load(shared_partial_ptr + address, mask=there[:, :, None], other=0.0)
        top = tl.max(shared_tops, 0)
        shared_weights = tl.exp2(shared_tops - top[None, :])
        norm = tl.sum(shared_weights * shared_norms, 0)
        acc = tl.sum(shared_values * shared_weights[:, :, None], 0)
    for start in range(first, last, PARTS):
        item = start + part
        real = (item < last)[:, None] & mine[None, :]
        line = item[:, None] * HEADS + head[None, :]
        tops = tl.load(stats_ptr + line * 2, mask=real, other=-1.0e30)
        norms = tl.load(stats_ptr + line * 2 + 1, mask=real, other=0.0)
        values = tl.load(partial_ptr + line[:, :, None] * DIM_PAD + dim[None, None, :], mask=real[:, :, None], other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        weights = tl.exp2(tops - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        norm = norm * shrink + tl.sum(weights * norms, 0)
        acc = acc * shrink[:, None] + tl.sum(values * weights[:, :, None], 0)
        top = new_top
    out = out_ptr + (row.to(tl.int64) * HEADS + head)[:, None] * DIM + dim[None, :]
    tl.store(out, (acc / norm[:, None]).to(out_ptr.dtype.element_ty), mask=mine[:, None] & (dim < DIM)[None, :])
