"""Random draws over the vocabulary without sorting: one program a row, exact integers throughout, the same tokens as the reference.

top_k and top_p each keep a prefix of the ranking, so each needs one border only: a magnitude of the shifted logit, and an id among the
tokens that share it. The border is bracketed: one pass over the row measures (counts, or weighs) what lies below eight candidates, three
that quarter the bracket, so that passes are bounded, and five about the place where the border should be if tokens lay evenly. A pass
is skipped where a row's options do not need it. Rows that are not finite end like any other, with a valid id that means nothing.

A program a row leaves most of the card idle where rows are few: there torch's sorts are faster (H200: up to 32 rows with top_k, one row
else).
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from hexad.operators.args import DrawArgs
from hexad.operators.draw import DrawOptions, draw_reference
from hexad.operators.registry import Kernel
from hexad.operators.triton.launch import INTERPRETED, Launcher, target

WARPS = (16, 32)  # a program's: with many rows, with few
FEW = {"dense": 1, "short": 32, "nucleus": 1}
FAR: tl.constexpr = tl.constexpr(0x41E00000)  # bits of 28.0: exp(-28) * 2^40 < 1, so all magnitudes beyond are one
NOWHERE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
SCALE: tl.constexpr = tl.constexpr(1099511627776.0)  # 2^40


@triton.jit
def _weigh(shifted, least, EXACT: tl.constexpr):
    """Integer weights of shifted logits; 0 below `least`, and for NaN."""
    share = libdevice.exp(shifted) if EXACT else tl.exp(shifted)
    weight = share * SCALE
    return tl.where((shifted <= 0.0) & (weight >= least), weight, 0.0).to(tl.int64)


@triton.jit
def _least_float(weight):
    """The least float32 that is not less than an integer weight."""
    near = weight.to(tl.float32)
    bits = near.to(tl.int32, bitcast=True)
    return tl.where(near.to(tl.int64) < weight, bits + 1, bits).to(tl.float32, bitcast=True)


@triton.jit
def _tokens(row_ptr, at, vocab, best, temperature):
    """Shifted logits and their magnitudes; NOWHERE beyond the vocabulary."""
    inside = at < vocab
    x = tl.load(row_ptr + at, mask=inside, other=-float("inf"))
    shifted = tl.div_rn(x - best, temperature)
    magnitude = tl.minimum(shifted.to(tl.int32, bitcast=True) & 0x7FFFFFFF, FAR)
    return shifted, tl.where(inside, magnitude, NOWHERE)


@triton.jit
def _measure(row_ptr, at, vocab, best, temperature, least, far, far_id, MASS: tl.constexpr, EXACT: tl.constexpr):
    """Magnitude, and weight (or 1) of tokens up to border (far, far_id); tokens beyond measure 0."""
    shifted, magnitude = _tokens(row_ptr, at, vocab, best, temperature)
    kept = (magnitude < far) | ((magnitude == far) & (at <= far_id))
    if MASS:
        amount = tl.where(kept, _weigh(shifted, least, EXACT), 0)
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
        return tl.maximum(_weigh(-(magnitude.to(tl.float32, bitcast=True)), least, EXACT), 1)
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
def _limit(top_p, total):
    """The least whole mass that is not less than top_p * total where both are compared as float64; at least 1."""
    wanted = top_p * total.to(tl.float64)
    low = tl.maximum(wanted.to(tl.int64) - 128, 0)  # float64 holds masses below 2^58 to 32
    for step in tl.static_range(8):
        middle = low + (128 >> step)
        low = tl.where((middle - 1).to(tl.float64) < wanted, middle, low)
    low = tl.where(low.to(tl.float64) < wanted, low + 1, low)
    return tl.maximum(low, 1)


@triton.jit(do_not_specialize=["row_stride", "vocab", "has_minimum"])
def draw_kernel(logits_ptr, best_ptr, temperature_ptr, least_ptr, top_k_ptr, top_p_ptr, uniform_ptr, out_ptr,
                row_stride, vocab, has_minimum,
                LISTS: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr):  # fmt: skip
    """One row. LISTS: rows may have top_k and top_p."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    best, temperature = tl.load(best_ptr + row), tl.load(temperature_ptr + row)
    least = _least_float(tl.load(least_ptr + row) * has_minimum)
    far, far_id = vocab * 0 + NOWHERE - 1, vocab
    zero, all_magnitudes = row * 0, vocab * 0 + FAR + 1
    nearest = vocab * 0
    if LISTS:
        # 0.5, 2, 4, 6, 8, 10, 14: a first bracket for logits of any scale in use
        a, b, c, d = nearest + 0x3F000000, nearest + 0x40000000, nearest + 0x40800000, nearest + 0x40C00000
        e, f, g = nearest + 0x41000000, nearest + 0x41200000, nearest + 0x41600000
        top_k = tl.load(top_k_ptr + row)
        if top_k < vocab:
            limit = tl.maximum(top_k, 1)
            sa, sb, sc, sd, se, sf, sg, total, first, last = _below(
                row_ptr, vocab, best, temperature, least, far, far_id, nearest, all_magnitudes,
                a, b, c, d, e, f, g, all_magnitudes, False, EXACT, BLOCK, UNROLL,
            )  # fmt: skip
            low, high, base, top = _narrow_all(
                nearest, all_magnitudes, zero, total, limit, a, b, c, d, e, f, g, all_magnitudes,
                sa, sb, sc, sd, se, sf, sg, total, first, last,
            )  # fmt: skip
            far, far_id, _kept = _border(
                row_ptr, vocab, best, temperature, least, far, far_id, low, high, base, top, limit, False, EXACT, BLOCK, UNROLL
            )  # fmt: skip
        sa, sb, sc, sd, se, sf, sg, total, first, last = _below(
            row_ptr, vocab, best, temperature, least, far, far_id, nearest, all_magnitudes,
            a, b, c, d, e, f, g, all_magnitudes, True, EXACT, BLOCK, UNROLL,
        )  # fmt: skip
        limit = _limit(tl.load(top_p_ptr + row), total)
        if limit < total:
            low, high, base, top = _narrow_all(
                nearest, all_magnitudes, zero, total, limit, a, b, c, d, e, f, g, all_magnitudes,
                sa, sb, sc, sd, se, sf, sg, total, first, last,
            )  # fmt: skip
            magnitude, border_id, total = _border(
                row_ptr, vocab, best, temperature, least, far, far_id, low, high, base, top, limit, True, EXACT, BLOCK, UNROLL
            )  # fmt: skip
            far_id = tl.where(magnitude == far, tl.minimum(far_id, border_id), border_id)
            far = magnitude
    else:
        lane = tl.arange(0, BLOCK)
        sums = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab, BLOCK * UNROLL):
            for i in tl.static_range(UNROLL):
                at = start + i * BLOCK + lane
                magnitude, amount = _measure(row_ptr, at, vocab, best, temperature, least, far, far_id, True, EXACT)
                sums += amount
        total = tl.sum(sums, 0)
    goal = tl.minimum((tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64), total - 1)
    drawn = _first_over(row_ptr, vocab, best, temperature, least, far, far_id, goal, nearest, True, EXACT, BLOCK, UNROLL)
    tl.store(out_ptr + row, drawn.to(tl.int64))


def launcher(*, lists: bool, warps: int) -> Launcher:
    """The kernel for one kind of group; 32 warps fit a multiprocessor."""
    constants = {"LISTS": lists, "EXACT": not INTERPRETED, "BLOCK": 32 * warps, "UNROLL": 4 if lists else 8}
    return Launcher(draw_kernel, constants, num_warps=warps, max_registers=64)


def bind_draw(args: DrawArgs, few: Mapping[str, int] = FEW) -> Kernel:
    """Rows of logits may be strided. More rows than multiprocessors share each between two programs. `few`: rows of each kind of group up
    to which torch serves."""
    processors, by_torch = target().multiprocessors, draw_reference(args)
    launchers = {(lists, warps): launcher(lists=lists, warps=warps) for lists in (False, True) for warps in WARPS}

    def draw(logits: torch.Tensor, best: torch.Tensor, options: DrawOptions, uniforms: torch.Tensor) -> torch.Tensor:
        rows = logits.shape[0]
        if rows <= few[options.kind]:
            drawn: torch.Tensor = by_torch(logits, best, options, uniforms)
            return drawn
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
        least = options.top_k if options.min_weight is None else options.min_weight
        tensors = (logits, best, options.temperature, least, options.top_k, options.top_p, uniforms, out)
        kernel = launchers[options.kind != "dense", WARPS[rows <= processors]]
        kernel((rows, 1, 1), *tensors, logits.stride(0), args.vocab_size, int(options.min_weight is not None))
        return out

    return draw
