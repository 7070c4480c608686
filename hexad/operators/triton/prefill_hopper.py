"""Prefill attention for Hopper in Gluon, after FlashAttention-3 (Shah et al. 2024).

One producer warp brings keys and values through the bulk tensor copy engine; two consumer warpgroups of 64 queries each share them. A
consumer issues the scores of tile i + 1 before the weighted sum of tile i, so that its softmax runs beside the matrix units. Tiles of 128
keys are two pieces of 64 rows, each within one page; they are walked from the newest to the oldest, so that masked ones come first.

Pages must be multiples of 64 tokens and contiguous over heads and tokens; no window and no soft-cap (the general kernel has both).
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

PIECE = 64  # keys of one copy
KEYS: gl.constexpr = gl.constexpr(PIECE)
QUERIES = 128  # of one program
STAGES = 2
HALF_QUERIES: gl.constexpr = gl.constexpr(64)  # of one consumer


def page_layout(dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a piece lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([PIECE, dim], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


@gluon.jit
def wait_predecessor():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def produce(
    k_desc, v_desc, k_tiles, v_tiles, k_full, k_free, v_full, v_free, table, tiles, past, kv_head,
    PAGE: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring the tiles, newest first. Pieces past the length lie outside the tensor and come as zeros."""
    BYTES: gl.constexpr = 2 * KEYS * DIM * 2
    column = kv_head * DIM
    for i in range(tiles):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        start = (tiles - 1 - i) * 2 * KEYS
        second = start + KEYS
        row_0 = gl.load(table + start // PAGE) * PAGE + start % PAGE
        row_1 = gl.load(table + gl.minimum(second, past - 1) // PAGE) * PAGE + second % PAGE
        row_1 = gl.where(second < past, row_1, -KEYS)
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), BYTES)
        tma.async_copy_global_to_shared(k_desc, [row_0, column], k_full.index(stage), k_tiles.index(2 * stage))
        tma.async_copy_global_to_shared(k_desc, [row_1, column], k_full.index(stage), k_tiles.index(2 * stage + 1))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), BYTES)
        tma.async_copy_global_to_shared(v_desc, [row_0, column], v_full.index(stage), v_tiles.index(2 * stage))
        tma.async_copy_global_to_shared(v_desc, [row_1, column], v_full.index(stage), v_tiles.index(2 * stage + 1))


@gluon.jit
def hide(scores, position, start, S_LAYOUT: gl.constexpr):
    """Scores of keys after each query's position become -inf."""
    key = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, S_LAYOUT))
    return gl.where(position[:, None] >= key[None, :], scores, -1.0e30)


@gluon.jit
def clear_tail(piece, kept, DIM: gl.constexpr):
    """Rows of a piece of values from `kept` on become zero: a page's tail may hold anything."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (DIM // 8), DIM // 8], [4, 1], [1, 0])
    row = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    value = piece.load(LAYOUT)
    piece.store(gl.where((row < kept)[:, None], value, gl.zeros_like(value)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def soften(
    s_0, s_1, top, norm, position, start, scale,
    MASKED: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """One softmax step over 128 scores a query: weights as left operands, the factor for what was summed before, new top and norm."""
    if MASKED:
        # scaled before hiding: a hidden score minus a row's top must be exact where a row sees nothing yet
        s_0 = hide(s_0 * scale, position, start, S_LAYOUT)
        s_1 = hide(s_1 * scale, position, start + KEYS, S_LAYOUT)
        new_top = gl.maximum(top, gl.maximum(gl.max(s_0, 1), gl.max(s_1, 1)))
        p_0 = gl.exp2(s_0 - new_top[:, None])
        p_1 = gl.exp2(s_1 - new_top[:, None])
    else:
        new_top = gl.maximum(top, gl.maximum(gl.max(s_0, 1), gl.max(s_1, 1)) * scale)
        p_0 = gl.exp2(s_0 * scale - new_top[:, None])
        p_1 = gl.exp2(s_1 * scale - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    norm = norm * shrink + gl.sum(p_0 + p_1, 1)
    w_0 = gl.convert_layout(p_0.to(dtype), P_LAYOUT)
    w_1 = gl.convert_layout(p_1.to(dtype), P_LAYOUT)
    return w_0, w_1, shrink, new_top, norm


@gluon.jit
def walk(
    acc, s_0, s_1, w_0, w_1, norm, top, q, k_tiles, v_tiles, k_full, k_free, v_full, v_free, low, high, tiles, position,
    scale, MASKED: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Steps `low` to `high`. A step enters with the scores of tile i and the weights of tile i - 1. It starts the weighted sum of i - 1,
    takes the softmax of i beside it, starts the scores of i + 1 (into registers that the softmax freed, so that it must come first), and
    only then waits for the sum."""
    zero = gl.zeros([HALF_QUERIES, KEYS], gl.float32, S_LAYOUT)
    for i in range(low, high):
        before = (i - 1) % STAGES
        after = (i + 1) % STAGES
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        acc = warpgroup_mma(w_0, v_tiles.index(2 * before), acc, is_async=True)
        acc = warpgroup_mma(w_1, v_tiles.index(2 * before + 1), acc, is_async=True)
        start = (tiles - 1 - i) * 2 * KEYS
        n_0, n_1, shrink, top, norm = soften(s_0, s_1, top, norm, position, start, scale, MASKED, S_LAYOUT, P_LAYOUT, q.dtype)
        mbarrier.wait(k_full.index(after), ((i + 1) // STAGES) & 1)
        t_0 = warpgroup_mma(q, k_tiles.index(2 * after).permute((1, 0)), zero, use_acc=False, is_async=True)
        t_1 = warpgroup_mma(q, k_tiles.index(2 * after + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        acc, w_0, w_1 = warpgroup_mma_wait(2, deps=[acc, n_0, n_1])
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
        s_0, s_1 = warpgroup_mma_wait(0, deps=[t_0, t_1])
        mbarrier.arrive(k_free.index(after), count=1)
    return acc, s_0, s_1, w_0, w_1, norm, top


@gluon.jit
def consume(
    q_ptr, out_ptr, k_tiles, v_tiles, k_full, k_free, v_full, v_free, tiles, plain, past, length, begin, count, index_0, head,
    HALF: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, Q_STRIDE: gl.constexpr, SCALE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attention of 64 queries of one head over `tiles` tiles, of which the oldest `plain` need no mask."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (DIM // 8), DIM // 8], [4, 1], [1, 0])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    scale = SCALE * 1.4426950408889634
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    base = index_0 + HALF * HALF_QUERIES
    row = base + gl.arange(0, HALF_QUERIES, layout=gl.SliceLayout(1, WIDE))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, WIDE))
    kept = (row < count)[:, None] & (dim < DIM)[None, :]
    token = (begin + row).to(gl.int64)
    q = gl.load(q_ptr + token[:, None] * Q_STRIDE + (head * DIM + dim)[None, :], mask=kept, other=0.0)
    q = gl.convert_layout(q, Q_LAYOUT)
    position = length - count + base + gl.arange(0, HALF_QUERIES, layout=S_ROWS)

    zero = gl.zeros([HALF_QUERIES, KEYS], gl.float32, S_LAYOUT)
    mbarrier.wait(k_full.index(0), 0)
    s_0 = warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    s_1 = warpgroup_mma(q, k_tiles.index(1).permute((1, 0)), zero, use_acc=False, is_async=True)
    s_0, s_1 = warpgroup_mma_wait(0, deps=[s_0, s_1])
    mbarrier.arrive(k_free.index(0), count=1)
    start = (tiles - 1) * 2 * KEYS
    mbarrier.wait(v_full.index(0), 0)
    if past - start < KEYS:
        clear_tail(v_tiles.index(0), past - start, DIM)
    elif past - start < 2 * KEYS:
        clear_tail(v_tiles.index(1), past - start - KEYS, DIM)

    acc = gl.zeros([HALF_QUERIES, DIM], gl.float32, O_LAYOUT)
    top = gl.full([HALF_QUERIES], -1.0e30, gl.float32, S_ROWS)
    norm = gl.zeros([HALF_QUERIES], gl.float32, S_ROWS)
    w_0, w_1, shrink, top, norm = soften(s_0, s_1, top, norm, position, start, scale, True, S_LAYOUT, P_LAYOUT, dtype)
    last = tiles - 1
    if last > 0:
        after = 1 % STAGES
        mbarrier.wait(k_full.index(after), (1 // STAGES) & 1)
        s_0 = warpgroup_mma(q, k_tiles.index(2 * after).permute((1, 0)), zero, use_acc=False, is_async=True)
        s_1 = warpgroup_mma(q, k_tiles.index(2 * after + 1).permute((1, 0)), zero, use_acc=False, is_async=True)
        s_0, s_1 = warpgroup_mma_wait(0, deps=[s_0, s_1])
        mbarrier.arrive(k_free.index(after), count=1)
        masked = gl.minimum(gl.maximum(tiles - plain, 1), last)
        acc, s_0, s_1, w_0, w_1, norm, top = walk(
            acc, s_0, s_1, w_0, w_1, norm, top, q, k_tiles, v_tiles, k_full, k_free, v_full, v_free, 1, masked, tiles, position,
            scale, True, S_LAYOUT, O_LAYOUT, P_LAYOUT, STAGES,
        )  # fmt: skip
        acc, s_0, s_1, w_0, w_1, norm, top = walk(
            acc, s_0, s_1, w_0, w_1, norm, top, q, k_tiles, v_tiles, k_full, k_free, v_full, v_free, masked, last, tiles, position,
            scale, False, S_LAYOUT, O_LAYOUT, P_LAYOUT, STAGES,
        )  # fmt: skip
        before = (last - 1) % STAGES
        mbarrier.wait(v_full.index(before), ((last - 1) // STAGES) & 1)
        acc = warpgroup_mma(w_0, v_tiles.index(2 * before), acc, is_async=True)
        acc = warpgroup_mma(w_1, v_tiles.index(2 * before + 1), acc, is_async=True)
        n_0, n_1, shrink, top, norm = soften(s_0, s_1, top, norm, position, 0, scale, True, S_LAYOUT, P_LAYOUT, dtype)
        acc, w_0, w_1 = warpgroup_mma_wait(0, deps=[acc, n_0, n_1])
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, O_ROWS)[:, None]
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    acc = warpgroup_mma(w_0, v_tiles.index(2 * (last % STAGES)), acc, is_async=True)
    acc = warpgroup_mma(w_1, v_tiles.index(2 * (last % STAGES) + 1), acc, is_async=True)
    total = warpgroup_mma_wait(0, deps=[acc])
    total = total / gl.convert_layout(norm, O_ROWS)[:, None]
    out = gl.convert_layout(total.to(dtype), WIDE)
    gl.store(out_ptr + token[:, None] * (HEADS * DIM) + (head * DIM + dim)[None, :], out, mask=kept)


@gluon.jit(do_not_specialize=["table_stride", "first_row", "abreast"])
def prefill_hopper_kernel(
    q_ptr,
    k_desc,
    v_desc,
    table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    out_ptr,
    table_stride,
    first_row,
    abreast,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    Q_STRIDE: gl.constexpr,
    PAGE: gl.constexpr,
    SCALE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """128 queries of one head of one row a program; of `abreast` heads together the longest walks start first."""
    block = gl.num_programs(1) - 1 - gl.program_id(1)
    head = gl.program_id(2) % (HEADS // abreast) * abreast + gl.program_id(0)
    row = first_row + gl.program_id(2) // (HEADS // abreast)
    wait_predecessor()
    begin = gl.load(query_start_ptr + row)
    count = gl.load(query_start_ptr + row + 1) - begin
    length = gl.load(seq_lens_ptr + row)
    index_0 = block * (2 * HALF_QUERIES)
    if (index_0 < count) & (length > 0):
        first_position = length - count + index_0
        past = gl.minimum(first_position + 2 * HALF_QUERIES, length)
        tiles = (past + 2 * KEYS - 1) // (2 * KEYS)
        plain = first_position // (2 * KEYS)  # tiles that every query sees
        dtype: gl.constexpr = q_ptr.dtype.element_ty
        k_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, KEYS, DIM], k_desc.layout)
        v_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, KEYS, DIM], v_desc.layout)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=1)
            mbarrier.init(v_full.index(i), count=1)
            mbarrier.init(k_free.index(i), count=2)
            mbarrier.init(v_free.index(i), count=2)
        table = table_ptr + row * table_stride
        kv_head = head // GROUP
        gl.warp_specialize(
            [
                (consume, (
                    q_ptr, out_ptr, k_tiles, v_tiles, k_full, k_free, v_full, v_free, tiles, plain, past, length, begin, count, index_0,
                    head, 0, HEADS, DIM, Q_STRIDE, SCALE, STAGES,
                )),
                (consume, (
                    q_ptr, out_ptr, k_tiles, v_tiles, k_full, k_free, v_full, v_free, tiles, plain, past, length, begin, count, index_0,
                    head, 1, HEADS, DIM, Q_STRIDE, SCALE, STAGES,
                )),
                (produce, (
                    k_desc, v_desc, k_tiles, v_tiles, k_full, k_free, v_full, v_free, table, tiles, past, kv_head, PAGE, DIM, STAGES,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
