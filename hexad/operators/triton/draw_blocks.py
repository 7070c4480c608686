"""The stages of random draws that read the vocabulary by blocks: weighing, planning, listing, picking. See `draw`."""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

FAR: tl.constexpr = tl.constexpr(0x41E00000)  # bits of 28.0: exp(-28) * 2^40 < 1, so all magnitudes beyond are one
NOWHERE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
SCALE: tl.constexpr = tl.constexpr(1099511627776.0)  # 2^40
# bits of 0.0625, 0.25, 1, 3, 6, 9 and 13: tokens so much less likely than the best are weighed apart
TIERS: tl.constexpr = tl.constexpr((0x3D800000, 0x3E800000, 0x3F800000, 0x40400000, 0x40C00000, 0x41100000, 0x41500000))
COUNT_BIT: tl.constexpr = tl.constexpr(52)  # a block's weight is below 2^52: its count of tokens goes above
ONE_TOKEN: tl.constexpr = tl.constexpr(2**52)
ALL_WEIGHT: tl.constexpr = tl.constexpr(2**52 - 1)
# A row's plan: state, length of the list (0: there is none), magnitudes between which its tokens lie, the mass that top_p is a share of
# (0: what the list holds). Of a row that is divided: what must lie between the lower magnitude and the border, what the list weighs. And
# the border of one that is picked from.
PLAN: tl.constexpr = tl.constexpr(9)
STATE: tl.constexpr = tl.constexpr(0)
LENGTH: tl.constexpr = tl.constexpr(1)
LOW: tl.constexpr = tl.constexpr(2)
HIGH: tl.constexpr = tl.constexpr(3)
TOTAL: tl.constexpr = tl.constexpr(4)
LIMIT: tl.constexpr = tl.constexpr(5)
WEIGHT: tl.constexpr = tl.constexpr(6)
BORDER: tl.constexpr = tl.constexpr(7)  # a magnitude; written where the plan is read, so it has a place of its own
BORDER_ID: tl.constexpr = tl.constexpr(8)
# states
LISTED: tl.constexpr = tl.constexpr(0)  # all that may be kept is listed (or too much for a list): the row is drawn from that
DIVIDED: tl.constexpr = tl.constexpr(1)  # an eighth of the tier is listed, to find the border; the row is picked from by blocks
PICKED: tl.constexpr = tl.constexpr(2)  # no border: the row is picked from by blocks
BLOCK = 2048
assert BLOCK < 2**12, "a block's count has 12 bits"


@triton.jit
def weigh(shifted, least, EXACT: tl.constexpr):
    """Integer weights of shifted logits; 0 below `least`, and for NaN."""
    share = libdevice.exp(shifted) if EXACT else tl.exp(shifted)
    weight = share * SCALE
    return tl.where((shifted <= 0.0) & (weight >= least), weight, 0.0).to(tl.int64)


@triton.jit
def least_float(weight):
    """The least float32 that is not less than an integer weight."""
    near = weight.to(tl.float32)
    bits = near.to(tl.int32, bitcast=True)
    return tl.where(near.to(tl.int64) < weight, bits + 1, bits).to(tl.float32, bitcast=True)


@triton.jit
def tokens_at(row_ptr, at, vocab, best, temperature):
    """Shifted logits and their magnitudes; NOWHERE beyond the vocabulary."""
    inside = at < vocab
    x = tl.load(row_ptr + at, mask=inside, other=-float("inf"))
    shifted = tl.div_rn(x - best, temperature)
    magnitude = tl.minimum(shifted.to(tl.int32, bitcast=True) & 0x7FFFFFFF, FAR)
    return shifted, tl.where(inside, magnitude, NOWHERE)


@triton.jit
def limit_of(top_p, total):
    """The least whole mass that is not less than top_p * total where both are compared as float64; at least 1."""
    wanted = top_p * total.to(tl.float64)
    low = tl.maximum(wanted.to(tl.int64) - 128, 0)  # float64 holds masses below 2^58 to 32
    for step in tl.static_range(8):
        middle = low + (128 >> step)
        low = tl.where((middle - 1).to(tl.float64) < wanted, middle, low)
    low = tl.where(low.to(tl.float64) < wanted, low + 1, low)
    return tl.maximum(low, 1)


@triton.jit
def goal_of(uniform, total):
    """What the running weight must exceed at the drawn token."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _weight(packed):
    return packed & ALL_WEIGHT


@triton.jit
def _count(packed):
    return (packed >> COUNT_BIT) & 0xFFF


@triton.jit
def up_to(at, magnitude, far, far_id):
    """Tokens up to border (far, far_id)."""
    return (magnitude < far) | ((magnitude == far) & (at <= far_id))


@triton.jit
def _block(logits_ptr, best_ptr, temperature_ptr, least_ptr, row, block, row_stride, vocab, has_minimum,
           EXACT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Ids, magnitudes and weights of a block of a row."""
    least = least_float(tl.load(least_ptr + row) * has_minimum)
    at = block * BLOCK + tl.arange(0, BLOCK)
    best, temperature = tl.load(best_ptr + row), tl.load(temperature_ptr + row)
    shifted, magnitude = tokens_at(logits_ptr + row * row_stride, at, vocab, best, temperature)
    return at, magnitude, tl.where(at < vocab, weigh(shifted, least, EXACT), 0)


@triton.jit
def _up_to_border(plan_ptr, row, at, magnitude, weight):
    """Weights of tokens up to the row's border, 0 beyond."""
    far, far_id = tl.load(plan_ptr + PLAN * row + BORDER).to(tl.int32), tl.load(plan_ptr + PLAN * row + BORDER_ID).to(tl.int32)
    return tl.where(up_to(at, magnitude, far, far_id), weight, 0)


@triton.jit(do_not_specialize=["row_stride", "vocab", "has_minimum"])
def weigh_kernel(logits_ptr, best_ptr, temperature_ptr, least_ptr, plan_ptr, sum_ptr, row_stride, vocab, has_minimum,
                 PLANNED: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A block's weight, to sums [rows, parts]. PLANNED: of the tokens up to the row's border, if the row is to be picked from."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    state = tl.load(plan_ptr + PLAN * row + STATE) if PLANNED else row * 0 + PICKED
    if state != LISTED:
        at, magnitude, weight = _block(
            logits_ptr, best_ptr, temperature_ptr, least_ptr, row, part, row_stride, vocab, has_minimum, EXACT, BLOCK
        )  # fmt: skip
        if PLANNED:
            weight = _up_to_border(plan_ptr, row, at, magnitude, weight)
        tl.store(sum_ptr + row * tl.num_programs(1) + part, tl.sum(weight, 0))


@triton.jit(do_not_specialize=["row_stride", "vocab", "has_minimum", "parts"])
def pick_kernel(logits_ptr, best_ptr, temperature_ptr, least_ptr, plan_ptr, uniform_ptr, sum_ptr, out_ptr, row_stride, vocab, has_minimum,
                parts, PLANNED: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The draw from weighed blocks: the block in which the running weight exceeds the goal, and the token in it."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    state = tl.load(plan_ptr + PLAN * row + STATE) if PLANNED else row * 0 + PICKED
    if state != LISTED:
        sums = tl.load(sum_ptr + row * parts + part, mask=part < parts, other=0)
        goal = goal_of(tl.load(uniform_ptr + row), tl.sum(sums, 0))
        before = tl.cumsum(sums, 0) - sums
        block = tl.max(tl.where((part < parts) & (sums > 0) & (before <= goal), part, 0), 0)  # the last with weight that begins in time
        goal -= tl.sum(tl.where(part == block, before, 0), 0)
        at, magnitude, weight = _block(
            logits_ptr, best_ptr, temperature_ptr, least_ptr, row, block, row_stride, vocab, has_minimum, EXACT, BLOCK
        )  # fmt: skip
        if PLANNED:
            weight = _up_to_border(plan_ptr, row, at, magnitude, weight)
        over = tl.cumsum(weight, 0) > goal
        tl.store(out_ptr + row, tl.minimum(tl.min(tl.where(over, at, NOWHERE), 0), vocab - 1).to(tl.int64))


@triton.jit(do_not_specialize=["row_stride", "vocab", "has_minimum"])
def tiers_kernel(logits_ptr, best_ptr, temperature_ptr, least_ptr, plan_ptr, edge_ptr, sum_ptr, row_stride, vocab, has_minimum,
                 PLANNED: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A block's weight and count up to each tier and in all, packed: sums [rows, 8, parts]. PLANNED: of the tokens in the row's tier, up to
    each of its edges, where it is to be divided."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    state = tl.load(plan_ptr + PLAN * row + STATE) if PLANNED else row * 0 + DIVIDED
    if state == DIVIDED:
        at, magnitude, weight = _block(
            logits_ptr, best_ptr, temperature_ptr, least_ptr, row, part, row_stride, vocab, has_minimum, EXACT, BLOCK
        )  # fmt: skip
        counted = at < vocab
        if PLANNED:
            counted &= (magnitude >= tl.load(plan_ptr + PLAN * row + LOW)) & (magnitude < tl.load(plan_ptr + PLAN * row + HIGH))
        amount = tl.where(counted, weight + ONE_TOKEN, 0)
        line = sum_ptr + row * 8 * parts + part
        for tier in tl.static_range(7):
            edge = tl.load(edge_ptr + row * 8 + tier) if PLANNED else TIERS[tier]
            tl.store(line + tier * parts, tl.sum(tl.where(magnitude < edge, amount, 0), 0))
        tl.store(line + 7 * parts, tl.sum(amount, 0))


@triton.jit
def _edge(low, high, step):
    """The magnitude `step` eighths of the way from one to another, evenly in what they stand for."""
    begin, end = low.to(tl.int32).to(tl.float32, bitcast=True), high.to(tl.int32).to(tl.float32, bitcast=True)
    return (begin + (end - begin) * (step / 8)).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["vocab", "parts", "capacity"])
def plan_kernel(sum_ptr, top_k_ptr, top_p_ptr, plan_ptr, edge_ptr, offset_ptr, vocab, parts, capacity, PARTS: tl.constexpr):
    """The nearest tier within which a row's kept tokens lie. Plan [rows, PLAN] int64, see there.

    Edges [rows, 8] int32 divide the tier in eight. Offsets [rows, parts] int32: where a block's tokens begin in the row's list.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    line, inside = sum_ptr + row * 8 * parts + part, part < parts
    chosen = tl.load(line + 7 * parts, mask=inside, other=0)
    total = tl.sum(_weight(chosen), 0)
    limit, low, high, base, searching = limit_of(top_p, total), row * 0, row * 0 + FAR + 1, row * 0, row == row
    for tier in tl.static_range(7):
        sums = tl.load(line + tier * parts, mask=inside, other=0)
        weight, count = tl.sum(_weight(sums), 0), tl.sum(_count(sums), 0)
        enough = tl.where(top_k < vocab, count >= top_k, weight >= limit) & (count > 0)
        chosen = tl.where(searching & enough, sums, chosen)
        high = tl.where(searching & enough, TIERS[tier], high)
        searching = searching & (enough == 0)
        low, base = tl.where(searching, TIERS[tier], low), tl.where(searching, weight, base)
    counts = _count(chosen)
    length = tl.sum(counts, 0)
    fits, border = length <= capacity, limit < total
    state = tl.where(fits | (top_k < vocab), LISTED, DIVIDED)
    state = tl.where((top_k >= vocab) & (border == 0), PICKED, state)
    divided = state == DIVIDED
    line = plan_ptr + PLAN * row
    tl.store(line + STATE, state)
    tl.store(line + LENGTH, tl.where(fits & (state == LISTED), length, 0))
    tl.store(line + LOW, tl.where(divided, low, 0))
    tl.store(line + HIGH, high)
    tl.store(line + TOTAL, tl.where(top_k < vocab, 0, total))
    tl.store(line + LIMIT, limit - base)
    tl.store(line + BORDER, row * 0 + NOWHERE - 1)  # all are kept
    tl.store(line + BORDER_ID, vocab)
    for step in tl.static_range(7):
        tl.store(edge_ptr + row * 8 + step, _edge(low, high, step + 1))
    tl.store(offset_ptr + row * parts + part, (tl.cumsum(counts, 0) - counts).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["vocab", "parts", "capacity"])
def divide_kernel(sum_ptr, plan_ptr, edge_ptr, offset_ptr, vocab, parts, capacity, PARTS: tl.constexpr):
    """The eighth of a row's tier in which its border lies, for the rows that are to be divided."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    plan = plan_ptr + PLAN * row
    if tl.load(plan + STATE) == DIVIDED:
        line, inside = sum_ptr + row * 8 * parts + part, part < parts
        limit, low, high = tl.load(plan + LIMIT), tl.load(plan + LOW), tl.load(plan + HIGH)
        chosen, below = tl.load(line + 7 * parts, mask=inside, other=0), tl.zeros([PARTS], tl.int64)
        searching = row == row
        for tier in tl.static_range(7):
            sums = tl.load(line + tier * parts, mask=inside, other=0)
            enough = tl.sum(_weight(sums), 0) >= limit
            edge = tl.load(edge_ptr + row * 8 + tier).to(tl.int64)
            chosen, high = tl.where(searching & enough, sums, chosen), tl.where(searching & enough, edge, high)
            searching = searching & (enough == 0)
            below, low = tl.where(searching, sums, below), tl.where(searching, edge, low)
        counts = _count(chosen) - _count(below)
        length = tl.sum(counts, 0)
        fits = length <= capacity
        before = tl.sum(_weight(below), 0)
        tl.store(plan + STATE, tl.where(fits, DIVIDED, LISTED))
        tl.store(plan + LENGTH, tl.where(fits, length, 0))
        tl.store(plan + LOW, low)
        tl.store(plan + HIGH, high)
        tl.store(plan + LIMIT, limit - before)
        tl.store(plan + WEIGHT, tl.sum(_weight(chosen), 0) - before)
        tl.store(offset_ptr + row * parts + part, (tl.cumsum(counts, 0) - counts).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["row_stride", "vocab", "capacity"])
def list_kernel(logits_ptr, best_ptr, temperature_ptr, plan_ptr, offset_ptr, listed_ptr, id_ptr, row_stride, vocab, capacity,
                BLOCK: tl.constexpr):  # fmt: skip
    """A block's tokens between the row's magnitudes, in order, to the row's list: their logits and ids."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(plan_ptr + PLAN * row + LENGTH) > 0:
        at = part * BLOCK + tl.arange(0, BLOCK)
        row_ptr = logits_ptr + row * row_stride
        _shifted, magnitude = tokens_at(row_ptr, at, vocab, tl.load(best_ptr + row), tl.load(temperature_ptr + row))
        kept = (magnitude >= tl.load(plan_ptr + PLAN * row + LOW)) & (magnitude < tl.load(plan_ptr + PLAN * row + HIGH))
        place = tl.load(offset_ptr + row * tl.num_programs(1) + part) + tl.cumsum(kept.to(tl.int32), 0) - 1
        line = row * capacity + place
        tl.store(listed_ptr + line, tl.load(row_ptr + at, mask=at < vocab, other=0.0), mask=kept)
        tl.store(id_ptr + line, at, mask=kept)
