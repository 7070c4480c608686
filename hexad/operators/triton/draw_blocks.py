"""The first stages of random draws: blocks of the vocabulary are weighed, rows planned, and the tokens that a row may keep listed."""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

FAR: tl.constexpr = tl.constexpr(0x41E00000)  # bits of 28.0: exp(-28) * 2^40 < 1, so all magnitudes beyond are one
NOWHERE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
SCALE: tl.constexpr = tl.constexpr(1099511627776.0)  # 2^40
# bits of 0.5, 2, 4, 6, 8, 10 and 14: tokens so much less likely than the best are weighed apart
TIERS: tl.constexpr = tl.constexpr((0x3F000000, 0x40000000, 0x40800000, 0x40C00000, 0x41000000, 0x41200000, 0x41600000))
COUNT_BIT: tl.constexpr = tl.constexpr(52)  # a block's weight is below 2^52: its count of tokens goes above
ONE_TOKEN: tl.constexpr = tl.constexpr(2**52)
ALL_WEIGHT: tl.constexpr = tl.constexpr(2**52 - 1)
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


@triton.jit(do_not_specialize=["row_stride", "vocab", "has_minimum"])
def weigh_kernel(logits_ptr, best_ptr, temperature_ptr, least_ptr, sum_ptr, row_stride, vocab, has_minimum,
                 TIERED: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A block's weight, to sums [rows, parts]; or TIERED its weight and count up to each tier and in all, packed: [rows, 8, parts]."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    best, temperature = tl.load(best_ptr + row), tl.load(temperature_ptr + row)
    least = least_float(tl.load(least_ptr + row) * has_minimum)
    at = part * BLOCK + tl.arange(0, BLOCK)
    shifted, magnitude = tokens_at(logits_ptr + row * row_stride, at, vocab, best, temperature)
    amount = weigh(shifted, least, EXACT)
    if TIERED:
        amount = tl.where(at < vocab, amount + ONE_TOKEN, 0)
        line = sum_ptr + row * 8 * parts + part
        for tier in tl.static_range(7):
            tl.store(line + tier * parts, tl.sum(tl.where(magnitude < TIERS[tier], amount, 0), 0))
        tl.store(line + 7 * parts, tl.sum(amount, 0))
    else:
        tl.store(sum_ptr + row * parts + part, tl.sum(amount, 0))


@triton.jit(do_not_specialize=["row_stride", "vocab", "has_minimum", "parts"])
def pick_kernel(logits_ptr, best_ptr, temperature_ptr, least_ptr, uniform_ptr, sum_ptr, out_ptr, row_stride, vocab, has_minimum, parts,
                EXACT: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The draw where all tokens are kept: the block in which the running weight exceeds the goal, and the token in it."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    sums = tl.load(sum_ptr + row * parts + part, mask=part < parts, other=0)
    goal = goal_of(tl.load(uniform_ptr + row), tl.sum(sums, 0))
    before = tl.cumsum(sums, 0) - sums
    block = tl.max(tl.where((part < parts) & (sums > 0) & (before <= goal), part, 0), 0)  # the last with weight that begins in time
    goal -= tl.sum(tl.where(part == block, before, 0), 0)
    best, temperature = tl.load(best_ptr + row), tl.load(temperature_ptr + row)
    least = least_float(tl.load(least_ptr + row) * has_minimum)
    at = block * BLOCK + tl.arange(0, BLOCK)
    shifted, _magnitude = tokens_at(logits_ptr + row * row_stride, at, vocab, best, temperature)
    over = tl.cumsum(tl.where(at < vocab, weigh(shifted, least, EXACT), 0), 0) > goal
    tl.store(out_ptr + row, tl.minimum(tl.min(tl.where(over, at, NOWHERE), 0), vocab - 1).to(tl.int64))


@triton.jit(do_not_specialize=["vocab", "parts", "capacity"])
def plan_kernel(sum_ptr, top_k_ptr, top_p_ptr, plan_ptr, offset_ptr, vocab, parts, capacity, PARTS: tl.constexpr):
    """The tier within which a row's kept tokens lie, the nearest one of those.

    Plan [rows, 3] int64: the tier's magnitude; how many tokens it has, 0 if the row is not listed (more than `capacity`, or all); what the
    tokens that are not listed weigh, 0 if top_k leaves them out. Offsets [rows, parts] int32: where a block's tokens begin in the list.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    line, inside = sum_ptr + row * 8 * parts + part, part < parts
    chosen = tl.load(line + 7 * parts, mask=inside, other=0)
    total = tl.sum(_weight(chosen), 0)
    limit, magnitude, weight = limit_of(top_p, total), row * 0 + FAR + 1, total
    for step in tl.static_range(7):
        sums = tl.load(line + (6 - step) * parts, mask=inside, other=0)
        measured, counted = tl.sum(_weight(sums), 0), tl.sum(_count(sums), 0)
        enough = tl.where(top_k < vocab, counted >= top_k, (measured >= limit) & (limit < total)) & (counted > 0)
        chosen = tl.where(enough, sums, chosen)
        magnitude, weight = tl.where(enough, TIERS[6 - step], magnitude), tl.where(enough, measured, weight)
    counts = _count(chosen)
    length = tl.sum(counts, 0)
    tl.store(plan_ptr + 3 * row, magnitude)
    listed = (length <= capacity) & (magnitude <= FAR)
    tl.store(plan_ptr + 3 * row + 1, tl.where(listed, length, 0))
    tl.store(plan_ptr + 3 * row + 2, tl.where(listed & (top_k >= vocab), total - weight, 0))
    tl.store(offset_ptr + row * parts + part, (tl.cumsum(counts, 0) - counts).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["row_stride", "vocab", "capacity"])
def list_kernel(logits_ptr, best_ptr, temperature_ptr, plan_ptr, offset_ptr, listed_ptr, id_ptr, row_stride, vocab, capacity,
                BLOCK: tl.constexpr):  # fmt: skip
    """A block's tokens of the row's tier, in order, to the row's list: their logits and ids."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(plan_ptr + 3 * row + 1) > 0:
        at = part * BLOCK + tl.arange(0, BLOCK)
        row_ptr = logits_ptr + row * row_stride
        _shifted, magnitude = tokens_at(row_ptr, at, vocab, tl.load(best_ptr + row), tl.load(temperature_ptr + row))
        kept = magnitude < tl.load(plan_ptr + 3 * row).to(tl.int32)
        place = tl.load(offset_ptr + row * tl.num_programs(1) + part) + tl.cumsum(kept.to(tl.int32), 0) - 1
        line = row * capacity + place
        tl.store(listed_ptr + line, tl.load(row_ptr + at, mask=at < vocab, other=0.0), mask=kept)
        tl.store(id_ptr + line, at, mask=kept)
