"""Random draws over the vocabulary without sorting: exact integers throughout, the same tokens as the reference.

Blocks of the vocabulary are weighed first, each by a program of its own (`draw_blocks`). Where all tokens are kept, the block of the draw
follows from that, and only it is read again. top_k and top_p each keep a prefix of the ranking, so each needs one border only: a
magnitude of the shifted logit, and an id among the tokens that share it. The blocks' weights up to seven magnitudes say between which two
it lies. If few tokens may be kept, they are listed in the order of their ids, and one program draws from the list; else (top_p alone) the
blocks are weighed once more to eighths of that, the eighth with the border is listed, and the row is drawn from its blocks again.

In a list the border is bracketed: one pass measures (counts, or weighs) what lies below eight candidates, three that quarter the bracket,
so that passes are bounded, and five about the place where the border should be if tokens lay evenly. What fits no list (a long top_k, very
many equal logits) is read whole, by one program, which takes several times as long. Rows that are not finite end like any other, with a
valid id that means nothing.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from hexad.operators.args import DrawArgs
from hexad.operators.draw import DrawOptions
from hexad.operators.registry import Kernel
from hexad.operators.triton.draw_blocks import (
    BLOCK,
    BORDER,
    BORDER_ID,
    DIVIDED,
    FAR,
    HIGH,
    LENGTH,
    LIMIT,
    LOW,
    NOWHERE,
    PICKED,
    PLAN,
    STATE,
    TIERS,
    TOTAL,
    WEIGHT,
    divide_kernel,
    goal_of,
    least_float,
    limit_of,
    list_kernel,
    pick_kernel,
    plan_kernel,
    tiers_kernel,
    tokens_at,
    up_to,
    weigh,
    weigh_kernel,
)
from hexad.operators.triton.launch import INTERPRETED, Launcher, pow2

WARPS = (4, 16)  # of a row's program: for short lists, for long ones and whole rows
SHORT = 2048  # tokens
MOST_LISTED = 32_768  # tokens of a row's list


@triton.jit
def _measure(row_ptr, at, vocab, best, temperature, least, far, far_id, MASS: tl.constexpr, EXACT: tl.constexpr):
    """Magnitude, and weight (or 1) of tokens up to border (far, far_id); tokens beyond measure 0."""
    shifted, magnitude = tokens_at(row_ptr, at, vocab, best, temperature)
    kept = up_to(at, magnitude, far, far_id)
    if MASS:
        amount = tl.where(kept, weigh(shifted, least, EXACT), 0)
    else:
        amount = kept.to(tl.int64)
    return magnitude, amount


@triton.jit
def _below(row_ptr, vocab, best, temperature, least, far, far_id, low, high, a, b, c, d, e, f, g, h,
           MASS: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """What lies below each of eight magnitudes, and the least and greatest magnitude found in [low, high)."""
    lane = tl.arange(0, BLOCK)
    sa = tl.zeros([BLOCK], tl.int64)
    sb, sc, sd, se, sf, sg, sh = sa, sa, sa, sa, sa, sa, sa
    first, last = tl.full([BLOCK], NOWHERE, tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK * UNROLL):
        for i in tl.static_range(UNROLL):
            at = start + i * BLOCK + lane
            magnitude, amount = _measure(row_ptr, at, vocab, best, temperature, least, far, far_id, MASS, EXACT)
            sa += tl.where(magnitude < a, amount, 0)
            sb += tl.where(magnitude < b, amount, 0)
            sc += tl.where(magnitude < c, amount, 0)
            sd += tl.where(magnitude < d, amount, 0)
            se += tl.where(magnitude < e, amount, 0)
            sf += tl.where(magnitude < f, amount, 0)
            sg += tl.where(magnitude < g, amount, 0)
            sh += tl.where(magnitude < h, amount, 0)
            first = tl.minimum(first, tl.where((magnitude >= low) & (amount > 0), magnitude, NOWHERE))
            last = tl.maximum(last, tl.where((magnitude < high) & (amount > 0), magnitude, 0))
    sa, sb, sc, sd = tl.sum(sa, 0), tl.sum(sb, 0), tl.sum(sc, 0), tl.sum(sd, 0)
    se, sf, sg, sh = tl.sum(se, 0), tl.sum(sf, 0), tl.sum(sg, 0), tl.sum(sh, 0)
    return sa, sb, sc, sd, se, sf, sg, sh, tl.min(first, 0), tl.max(last, 0)


@triton.jit
def _narrow(low, high, base, top, limit, candidate, amount):
    """The bracket after one candidate: at `low` less than `limit` lies below (`base`), at `high` no less (`top`)."""
    passes = amount < limit
    raised = passes & (candidate > low)
    lowered = (amount >= limit) & (candidate < high)
    low, base = tl.where(raised, candidate, low), tl.where(raised, amount, base)
    high, top = tl.where(lowered, candidate, high), tl.where(lowered, amount, top)
    return low, high, base, top


@triton.jit
def _narrow_all(low, high, base, top, limit, a, b, c, d, e, f, g, h, sa, sb, sc, sd, se, sf, sg, sh, first, last):
    """The bracket after all candidates, and without what holds no token."""
    low, high, base, top = _narrow(low, high, base, top, limit, a, sa)
    low, high, base, top = _narrow(low, high, base, top, limit, b, sb)
    low, high, base, top = _narrow(low, high, base, top, limit, c, sc)
    low, high, base, top = _narrow(low, high, base, top, limit, d, sd)
    low, high, base, top = _narrow(low, high, base, top, limit, e, se)
    low, high, base, top = _narrow(low, high, base, top, limit, f, sf)
    low, high, base, top = _narrow(low, high, base, top, limit, g, sg)
    low, high, base, top = _narrow(low, high, base, top, limit, h, sh)
    low = tl.maximum(low, first)
    return low, tl.maximum(tl.minimum(high, last + 1), low + 1), base, top


@triton.jit
def _candidates(low, high, base, top, limit):
    """Three that quarter the bracket, five about the guess."""
    width = high - low
    share = (limit - base).to(tl.float32) / (top - base).to(tl.float32)
    guess = tl.minimum(tl.maximum(low + (share * width.to(tl.float32)).to(tl.int32), low), high)
    near, close = width // 32 + 1, width // 256 + 1
    d, e = tl.maximum(guess - near, low), tl.maximum(guess - close, low)
    g, h = tl.minimum(guess + close, high), tl.minimum(guess + near, high)
    return low + width // 4, low + width // 2, high - width // 4, d, e, guess, g, h


@triton.jit
def _smallest(magnitude, least, MASS: tl.constexpr, EXACT: tl.constexpr):
    """What one token of this magnitude measures, at least 1."""
    if MASS:
        return tl.maximum(weigh(-(magnitude.to(tl.float32, bitcast=True)), least, EXACT), 1)
    else:
        return (magnitude * 0 + 1).to(tl.int64)


@triton.jit
def _open(low, high, base, top, limit, one):
    """The border is not found yet: several magnitudes, more than one token (each measures `one` or more), and one that is cut."""
    return (high - low > 1) & (top - base >= 2 * one) & (top - one >= limit)


@triton.jit
def _border(row_ptr, vocab, best, temperature, least, far, far_id, low, high, base, top, limit,
            MASS: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """The last token, best first, before which less than `limit` lies: its magnitude and id, and what lies up to it.

    Given: less than `limit` lies below `low`, no less below `high`.
    """
    one = _smallest(high - 1, least, MASS, EXACT)
    while _open(low, high, base, top, limit, one):
        a, b, c, d, e, f, g, h = _candidates(low, high, base, top, limit)
        sa, sb, sc, sd, se, sf, sg, sh, first, last = _below(
            row_ptr, vocab, best, temperature, least, far, far_id, low, high, a, b, c, d, e, f, g, h, MASS, EXACT, BLOCK, UNROLL
        )  # fmt: skip
        low, high, base, top = _narrow_all(
            low, high, base, top, limit, a, b, c, d, e, f, g, h, sa, sb, sc, sd, se, sf, sg, sh, first, last
        )  # fmt: skip
        one = _smallest(high - 1, least, MASS, EXACT)
    magnitude, border_id, whole = high - 1, vocab, top
    if high - low == 1:  # tokens of one magnitude: as many as fit, by id
        fit = (limit - base + one - 1) // one
        if fit * one < top - base:
            border_id = _first_over(
                row_ptr, vocab, best, temperature, least, far, far_id, fit - 1, magnitude, False, EXACT, BLOCK, UNROLL
            )  # fmt: skip
            whole = base + fit * one
    return magnitude, border_id, whole


@triton.jit
def _first_over(row_ptr, vocab, best, temperature, least, far, far_id, goal, only,
                MASS: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """The first id, in order, at which the running sum exceeds `goal`. By mass, or else by count of tokens of magnitude `only`."""
    lane = tl.arange(0, BLOCK)
    start, running, more = vocab * 0, goal * 0, goal * 0
    searching = start < vocab
    while searching:
        sums = tl.zeros([BLOCK], tl.int64)
        for i in tl.static_range(UNROLL):
            at = start + i * BLOCK + lane
            magnitude, amount = _measure(row_ptr, at, vocab, best, temperature, least, far, far_id, MASS, EXACT)
            sums += amount if MASS else tl.where(magnitude == only, amount, 0)
        more = tl.sum(sums, 0)
        searching = (running + more <= goal) & (start + BLOCK * UNROLL < vocab)
        running += tl.where(searching, more, 0)
        start += tl.where(searching, BLOCK * UNROLL, 0)
    found = vocab - 1
    for i in range(UNROLL):
        at = start + i * BLOCK + lane
        magnitude, amount = _measure(row_ptr, at, vocab, best, temperature, least, far, far_id, MASS, EXACT)
        if not MASS:
            amount = tl.where(magnitude == only, amount, 0)
        over = running + tl.cumsum(amount, 0) > goal
        found = tl.minimum(found, tl.min(tl.where(over, at, NOWHERE), 0))
        running += tl.sum(amount, 0)
    return found


@triton.jit
def _cut(row_ptr, tokens, best, temperature, least, far, far_id, wanted, total,
         MASS: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """The border moved to where no more lies up to it than is wanted, and what lies up to it.

    Wanted are so many tokens, or where MASS such a share of `total` (0: of what lies up to the border that is given).
    """
    # a first bracket for logits of any scale in use, that of `draw_blocks`
    nearest, beyond = tokens * 0, tokens * 0 + FAR + 1
    a, b, c, d = nearest + TIERS[0], nearest + TIERS[1], nearest + TIERS[2], nearest + TIERS[3]
    e, f, g = nearest + TIERS[4], nearest + TIERS[5], nearest + TIERS[6]
    sa, sb, sc, sd, se, sf, sg, kept, first, last = _below(
        row_ptr, tokens, best, temperature, least, far, far_id, nearest, beyond, a, b, c, d, e, f, g, beyond, MASS, EXACT, BLOCK, UNROLL
    )  # fmt: skip
    if MASS:
        limit = limit_of(wanted, tl.where(total > 0, total, kept))
    else:
        limit = tl.maximum(wanted, 1)
    if limit < kept:
        low, high, base, top = _narrow_all(
            nearest, beyond, kept * 0, kept, limit, a, b, c, d, e, f, g, beyond, sa, sb, sc, sd, se, sf, sg, kept, first, last
        )  # fmt: skip
        magnitude, border_id, kept = _border(
            row_ptr, tokens, best, temperature, least, far, far_id, low, high, base, top, limit, MASS, EXACT, BLOCK, UNROLL
        )  # fmt: skip
        far_id = tl.where(magnitude == far, tl.minimum(far_id, border_id), border_id)
        far = magnitude
    return far, far_id, kept


@triton.jit
def _place(row_ptr, tokens, vocab, best, temperature, least, top_k, top_p, total, uniform,
           EXACT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """The place of the drawn token among `tokens` logits. top_p is a share of `total`, or if 0 of what is there after top_k."""
    far, far_id = tokens * 0 + NOWHERE - 1, tokens
    if top_k < vocab:
        far, far_id, _kept = _cut(row_ptr, tokens, best, temperature, least, far, far_id, top_k, total, False, EXACT, BLOCK, UNROLL)
    far, far_id, kept = _cut(row_ptr, tokens, best, temperature, least, far, far_id, top_p, total, True, EXACT, BLOCK, UNROLL)
    goal = goal_of(uniform, kept)
    return _first_over(row_ptr, tokens, best, temperature, least, far, far_id, goal, far, True, EXACT, BLOCK, UNROLL)


@triton.jit(do_not_specialize=["row_stride", "vocab", "has_minimum", "capacity", "over", "most"])
def draw_kernel(logits_ptr, best_ptr, temperature_ptr, least_ptr, top_k_ptr, top_p_ptr, uniform_ptr, out_ptr, plan_ptr, listed_ptr, id_ptr,
                row_stride, vocab, has_minimum, capacity, over, most,
                EXACT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """One row, if over `over` and at most `most` tokens are to be read: its draw, or the border of one that is divided.

    `plan_ptr` [rows, PLAN]: see `draw_blocks`; `listed_ptr` and `id_ptr` [rows, capacity].
    """
    row = tl.program_id(0).to(tl.int64)
    plan = plan_ptr + PLAN * row
    state, length = tl.load(plan + STATE), tl.load(plan + LENGTH).to(tl.int32)
    row_ptr, tokens = logits_ptr + row * row_stride, vocab
    if length > 0:
        row_ptr, tokens = listed_ptr + row * capacity, length
    if (state != PICKED) & (tokens > over) & (tokens <= most):
        least = least_float(tl.load(least_ptr + row) * has_minimum)
        best, temperature = tl.load(best_ptr + row), tl.load(temperature_ptr + row)
        if state == DIVIDED:
            limit, weight = tl.load(plan + LIMIT), tl.load(plan + WEIGHT)
            low, high = tl.load(plan + LOW).to(tl.int32), tl.load(plan + HIGH).to(tl.int32)
            magnitude, place, _kept = _border(
                row_ptr, tokens, best, temperature, least, vocab * 0 + NOWHERE - 1, tokens, low, high, weight * 0, weight, limit,
                True, EXACT, BLOCK, UNROLL,
            )  # fmt: skip
            tl.store(plan + BORDER, magnitude.to(tl.int64))
            tl.store(plan + BORDER_ID, tl.load(id_ptr + row * capacity + place, mask=place < length, other=NOWHERE).to(tl.int64))
        else:
            top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
            total, uniform = tl.load(plan + TOTAL), tl.load(uniform_ptr + row)
            drawn = _place(row_ptr, tokens, vocab, best, temperature, least, top_k, top_p, total, uniform, EXACT, BLOCK, UNROLL)
            if length > 0:
                drawn = tl.load(id_ptr + row * capacity + drawn)
            tl.store(out_ptr + row, drawn.to(tl.int64))


def launchers(vocab: int) -> dict[str, Launcher]:
    """The kernels for a vocabulary."""
    from_blocks = {"EXACT": not INTERPRETED, "BLOCK": BLOCK}
    parts = {"PARTS": pow2(triton.cdiv(vocab, BLOCK))}

    def draws(warps: int) -> Launcher:
        constants = {"EXACT": not INTERPRETED, "BLOCK": 32 * warps, "UNROLL": 4}
        return Launcher(draw_kernel, constants, num_warps=warps, max_registers=64)

    def planned(kernel: Any, warps: int, **more: int) -> dict[bool, Launcher]:
        return {known: Launcher(kernel, {"PLANNED": known} | from_blocks | more, num_warps=warps) for known in (False, True)}

    weighs, picks, tiers = planned(weigh_kernel, 4), planned(pick_kernel, 8, **parts), planned(tiers_kernel, 4)
    return {
        "weigh": weighs[False],
        "pick": picks[False],
        "tiers": tiers[False],
        "plan": Launcher(plan_kernel, parts, num_warps=1),
        "tiers of planned": tiers[True],
        "divide": Launcher(divide_kernel, parts, num_warps=1),
        "list": Launcher(list_kernel, {"BLOCK": BLOCK}, num_warps=4),
        "short": draws(WARPS[0]),
        "long": draws(WARPS[1]),
        "weigh planned": weighs[True],
        "pick planned": picks[True],
    }


def bind_draw(args: DrawArgs) -> Kernel:
    """Rows of logits may be strided."""
    vocab = args.vocab_size
    parts, capacity, kernels = triton.cdiv(vocab, BLOCK), min(vocab, MOST_LISTED), launchers(vocab)

    def draw(logits: torch.Tensor, best: torch.Tensor, options: DrawOptions, uniforms: torch.Tensor) -> torch.Tensor:
        rows, stride = logits.shape[0], logits.stride(0)
        least = options.top_k if options.min_weight is None else options.min_weight
        has_minimum = int(options.min_weight is not None)
        i32, empty = torch.int32, functools.partial(torch.empty, dtype=torch.int64, device=logits.device)
        some_unlimited = options.list_length >= vocab  # rows without top_k: the others are all drawn from lists
        out, over_rows, over_blocks = empty(rows), (rows, 1, 1), (rows, parts, 1)
        if not rows:
            return out
        row, numbers = (logits, best, options.temperature, least), (stride, vocab, has_minimum)
        sums = empty(rows, parts)
        if options.kind == "dense":
            kernels["weigh"](over_blocks, *row, sums, sums, *numbers)
            kernels["pick"](over_rows, *row, sums, uniforms, sums, out, *numbers, parts)
            return out
        tiers, plan = empty(rows, 8, parts), empty(rows, PLAN.value)
        edges, offsets = empty(rows, 8, dtype=i32), empty(rows, parts, dtype=i32)
        listed, ids = empty(rows, capacity, dtype=torch.float32), empty(rows, capacity, dtype=i32)
        limits = (options.top_k, options.top_p)
        kernels["tiers"](over_blocks, *row, plan, edges, tiers, *numbers)
        kernels["plan"](over_rows, tiers, *limits, plan, edges, offsets, vocab, parts, capacity)
        if some_unlimited and capacity < vocab:
            kernels["tiers of planned"](over_blocks, *row, plan, edges, tiers, *numbers)
            kernels["divide"](over_rows, tiers, plan, edges, offsets, vocab, parts, capacity)
        kernels["list"](over_blocks, *row[:3], plan, offsets, listed, ids, stride, vocab, capacity)
        last = (*row, *limits, uniforms, out, plan, listed, ids, *numbers, capacity)
        kernels["short"](over_rows, *last, 0, SHORT)
        if vocab > SHORT:
            kernels["long"](over_rows, *last, SHORT, vocab)
        if some_unlimited:
            kernels["weigh planned"](over_blocks, *row, plan, sums, *numbers)
            kernels["pick planned"](over_rows, *row, plan, uniforms, sums, out, *numbers, parts)
        return out

    return draw
