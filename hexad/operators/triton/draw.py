"""Random draws over the vocabulary without sorting: one program a row, exact integers throughout, the same tokens as the reference.

top_k and top_p each keep a prefix of the ranking, so each needs one border only: a magnitude of the shifted logit, and an id among the
tokens that share it. The border is bracketed: one pass over the row measures (counts, or weighs) what lies below eight candidates, three
that quarter the bracket, so that passes are bounded, and five about the place where the border should be if tokens lay evenly. A pass
is skipped where a row's options do not need it. Rows that are not finite end like any other, with a valid id that means nothing.

A program a row would leave most of the card idle where rows are few, so there several share one: each measures its part of the
vocabulary, and what all measured is added up on the row's board (integers: the order does not matter), where the programs of a row wait
for each other once a pass. They are launched together or not at all (cooperative launch).
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from hexad.operators.args import DrawArgs
from hexad.operators.draw import DrawOptions
from hexad.operators.registry import Kernel
from hexad.operators.triton.launch import INTERPRETED, Launcher, target

WARPS = (16, 32)  # a program's: where two fit a multiprocessor, where one is to fill it
UNROLL = 4
MOST_PARTS = 64  # programs that share a row
SWEEP = 32 * WARPS[0] * UNROLL  # tokens that one of them reads at a time
TURNS: tl.constexpr = tl.constexpr(48)  # passes of a row, at most: a bracket has 2^30 magnitudes and each pass quarters it, twice
BOARD: tl.constexpr = tl.constexpr(16 * (1 + TURNS.value))  # the count of arrivals; sums by turn; then shares, three times
FAR: tl.constexpr = tl.constexpr(0x41E00000)  # bits of 28.0: exp(-28) * 2^40 < 1, so all magnitudes beyond are one
NOWHERE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
SCALE: tl.constexpr = tl.constexpr(1099511627776.0)  # 2^40


@triton.jit
def weigh(shifted, least, EXACT: tl.constexpr):
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
        amount = tl.where(kept, weigh(shifted, least, EXACT), 0)
    else:
        amount = kept.to(tl.int32)
    return magnitude, amount


@triton.jit
def _meet(board_ptr, turn, parts):
    """All programs of a row come here before one goes on; what each wrote before is there for all afterwards."""
    tl.debug_barrier()
    arrived = tl.atomic_add(board_ptr, 1, sem="acq_rel") + 1
    while arrived < (turn + 1) * parts:
        arrived = tl.atomic_add(board_ptr, 0, sem="acquire")


@triton.jit
def _below(row_ptr, begin, end, vocab, best, temperature, least, far, far_id, low, high, a, b, c, d, e, f, g, h, board_ptr, turn, parts,
           MASS: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """What lies below each of eight magnitudes, and the least and greatest magnitude found in [low, high)."""
    lane = tl.arange(0, BLOCK)
    sa = tl.zeros([BLOCK], tl.int64 if MASS else tl.int32)
    sb, sc, sd, se, sf, sg, sh = sa, sa, sa, sa, sa, sa, sa
    first, last = tl.full([BLOCK], NOWHERE, tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK * UNROLL):
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
    sa, sb, sc, sd = tl.sum(sa, 0).to(tl.int64), tl.sum(sb, 0).to(tl.int64), tl.sum(sc, 0).to(tl.int64), tl.sum(sd, 0).to(tl.int64)
    se, sf, sg, sh = tl.sum(se, 0).to(tl.int64), tl.sum(sf, 0).to(tl.int64), tl.sum(sg, 0).to(tl.int64), tl.sum(sh, 0).to(tl.int64)
    nearest, farthest = tl.min(first, 0), tl.max(last, 0)
    if PARTS > 1:
        slot = board_ptr + 16 * (turn + 1)
        tl.atomic_add(slot, sa, sem="relaxed")
        tl.atomic_add(slot + 1, sb, sem="relaxed")
        tl.atomic_add(slot + 2, sc, sem="relaxed")
        tl.atomic_add(slot + 3, sd, sem="relaxed")
        tl.atomic_add(slot + 4, se, sem="relaxed")
        tl.atomic_add(slot + 5, sf, sem="relaxed")
        tl.atomic_add(slot + 6, sg, sem="relaxed")
        tl.atomic_add(slot + 7, sh, sem="relaxed")
        tl.atomic_max(slot + 8, (NOWHERE - nearest).to(tl.int64), sem="relaxed")
        tl.atomic_max(slot + 9, farthest.to(tl.int64), sem="relaxed")
        _meet(board_ptr, turn, parts)
        sa, sb = tl.load(slot, volatile=True), tl.load(slot + 1, volatile=True)
        sc, sd = tl.load(slot + 2, volatile=True), tl.load(slot + 3, volatile=True)
        se, sf = tl.load(slot + 4, volatile=True), tl.load(slot + 5, volatile=True)
        sg, sh = tl.load(slot + 6, volatile=True), tl.load(slot + 7, volatile=True)
        nearest = NOWHERE - tl.load(slot + 8, volatile=True).to(tl.int32)
        farthest = tl.load(slot + 9, volatile=True).to(tl.int32)
    return sa, sb, sc, sd, se, sf, sg, sh, nearest, farthest, turn + 1


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
def _border(row_ptr, begin, end, vocab, best, temperature, least, far, far_id, low, high, base, top, limit, board_ptr, turn, part, parts,
            MASS: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The last token, best first, before which less than `limit` lies: its magnitude and id, what lies up to it, and the turn.

    Given: less than `limit` lies below `low`, no less below `high`.
    """
    one = _smallest(high - 1, least, MASS, EXACT)
    while _open(low, high, base, top, limit, one):
        a, b, c, d, e, f, g, h = _candidates(low, high, base, top, limit)
        sa, sb, sc, sd, se, sf, sg, sh, first, last, turn = _below(
            row_ptr, begin, end, vocab, best, temperature, least, far, far_id, low, high, a, b, c, d, e, f, g, h, board_ptr, turn, parts,
            MASS, EXACT, BLOCK, UNROLL, PARTS,
        )  # fmt: skip
        low, high, base, top = _narrow_all(
            low, high, base, top, limit, a, b, c, d, e, f, g, h, sa, sb, sc, sd, se, sf, sg, sh, first, last
        )  # fmt: skip
        one = _smallest(high - 1, least, MASS, EXACT)
    magnitude, border_id, whole = high - 1, vocab, top
    if high - low == 1:  # tokens of one magnitude: as many as fit, by id
        fit = (limit - base + one - 1) // one
        if fit * one < top - base:
            shares = board_ptr + BOARD + PARTS * MASS
            border_id, found = _first_over(
                row_ptr, begin, end, vocab, best, temperature, least, far, far_id, fit - 1, magnitude, board_ptr, shares, turn, part, parts,
                False, EXACT, BLOCK, UNROLL, PARTS,
            )  # fmt: skip
            turn += 1
            if PARTS > 1:
                slot = board_ptr + 16 * (turn + 1)
                if found:
                    tl.store(slot, border_id.to(tl.int64))
                _meet(board_ptr, turn, parts)
                border_id = tl.load(slot, volatile=True).to(tl.int32)
                turn += 1
            whole = base + fit * one
    return magnitude, border_id, whole, turn


@triton.jit
def _first_over(row_ptr, begin, end, vocab, best, temperature, least, far, far_id, goal, only, board_ptr, shares_ptr, turn, part, parts,
                MASS: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """The first id, in order, at which the running sum exceeds `goal`, by mass, or else by count of tokens of magnitude `only`; and whether
    it is this program's to say so: it lies in its part. Takes one turn."""
    lane = tl.arange(0, BLOCK)
    found, ours = vocab - 1, begin < end
    if PARTS > 1:
        sums = tl.zeros([BLOCK], tl.int64 if MASS else tl.int32)
        for start in range(begin, end, BLOCK * UNROLL):
            for i in tl.static_range(UNROLL):
                at = start + i * BLOCK + lane
                magnitude, amount = _measure(row_ptr, at, vocab, best, temperature, least, far, far_id, MASS, EXACT)
                sums += amount if MASS else tl.where(magnitude == only, amount, 0)
        mine = tl.sum(sums, 0).to(tl.int64)
        tl.store(shares_ptr + part, mine)
        _meet(board_ptr, turn, parts)
        each = tl.arange(0, PARTS)
        before = tl.sum(tl.load(shares_ptr + each, mask=each < part, other=0, volatile=True), 0)
        ours = ((part == 0) | (before <= goal)) & ((part == parts - 1) | (goal < before + mine))
        goal -= before
    if ours:
        start, running, more = begin, goal * 0, goal * 0
        searching = start < end
        while searching:
            sums = tl.zeros([BLOCK], tl.int64 if MASS else tl.int32)
            for i in tl.static_range(UNROLL):
                at = start + i * BLOCK + lane
                magnitude, amount = _measure(row_ptr, at, vocab, best, temperature, least, far, far_id, MASS, EXACT)
                sums += amount if MASS else tl.where(magnitude == only, amount, 0)
            more = tl.sum(sums, 0).to(tl.int64)
            searching = (running + more <= goal) & (start + BLOCK * UNROLL < end)
            running += tl.where(searching, more, 0)
            start += tl.where(searching, BLOCK * UNROLL, 0)
        for i in range(UNROLL):
            at = start + i * BLOCK + lane
            magnitude, amount = _measure(row_ptr, at, vocab, best, temperature, least, far, far_id, MASS, EXACT)
            if not MASS:
                amount = tl.where(magnitude == only, amount, 0)
            over = running + tl.cumsum(amount, 0) > goal
            found = tl.minimum(found, tl.min(tl.where(over, at, NOWHERE), 0))
            running += tl.sum(amount, 0)
    return found, ours


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


@triton.jit(do_not_specialize=["row_stride", "vocab", "has_minimum", "share", "board_stride"])
def draw_kernel(logits_ptr, best_ptr, temperature_ptr, least_ptr, top_k_ptr, top_p_ptr, uniform_ptr, out_ptr, board_ptr,
                row_stride, vocab, has_minimum, share, board_stride, LISTS: tl.constexpr, EXACT: tl.constexpr,
                BLOCK: tl.constexpr, UNROLL: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """One row, or with PARTS > 1 this program's `share` of its tokens. LISTS: rows may have top_k and top_p.

    `board_ptr` [rows, board_stride] int64 are zeros; unused where PARTS is 1."""
    row, part, parts = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    board_ptr += row * board_stride
    begin, end = vocab * 0, vocab
    if PARTS > 1:
        begin, end = part * share, tl.minimum((part + 1) * share, vocab)
    row_ptr = logits_ptr + row * row_stride
    best, temperature = tl.load(best_ptr + row), tl.load(temperature_ptr + row)
    least = _least_float(tl.load(least_ptr + row) * has_minimum)
    far, far_id = vocab * 0 + NOWHERE - 1, vocab
    zero, all_magnitudes = row * 0, vocab * 0 + FAR + 1
    nearest, turn = vocab * 0, vocab * 0
    if LISTS:
        # 0.5, 2, 4, 6, 8, 10, 14: a first bracket for logits of any scale in use
        a, b, c, d = nearest + 0x3F000000, nearest + 0x40000000, nearest + 0x40800000, nearest + 0x40C00000
        e, f, g = nearest + 0x41000000, nearest + 0x41200000, nearest + 0x41600000
        top_k = tl.load(top_k_ptr + row)
        if top_k < vocab:
            limit = tl.maximum(top_k, 1)
            sa, sb, sc, sd, se, sf, sg, total, first, last, turn = _below(
                row_ptr, begin, end, vocab, best, temperature, least, far, far_id, nearest, all_magnitudes,
                a, b, c, d, e, f, g, all_magnitudes, board_ptr, turn, parts, False, EXACT, BLOCK, UNROLL, PARTS,
            )  # fmt: skip
            low, high, base, top = _narrow_all(
                nearest, all_magnitudes, zero, total, limit, a, b, c, d, e, f, g, all_magnitudes,
                sa, sb, sc, sd, se, sf, sg, total, first, last,
            )  # fmt: skip
            far, far_id, _kept, turn = _border(
                row_ptr, begin, end, vocab, best, temperature, least, far, far_id, low, high, base, top, limit,
                board_ptr, turn, part, parts, False, EXACT, BLOCK, UNROLL, PARTS,
            )  # fmt: skip
        sa, sb, sc, sd, se, sf, sg, total, first, last, turn = _below(
            row_ptr, begin, end, vocab, best, temperature, least, far, far_id, nearest, all_magnitudes,
            a, b, c, d, e, f, g, all_magnitudes, board_ptr, turn, parts, True, EXACT, BLOCK, UNROLL, PARTS,
        )  # fmt: skip
        limit = _limit(tl.load(top_p_ptr + row), total)
        if limit < total:
            low, high, base, top = _narrow_all(
                nearest, all_magnitudes, zero, total, limit, a, b, c, d, e, f, g, all_magnitudes,
                sa, sb, sc, sd, se, sf, sg, total, first, last,
            )  # fmt: skip
            magnitude, border_id, total, turn = _border(
                row_ptr, begin, end, vocab, best, temperature, least, far, far_id, low, high, base, top, limit,
                board_ptr, turn, part, parts, True, EXACT, BLOCK, UNROLL, PARTS,
            )  # fmt: skip
            far_id = tl.where(magnitude == far, tl.minimum(far_id, border_id), border_id)
            far = magnitude
    else:
        lane = tl.arange(0, BLOCK)
        sums = tl.zeros([BLOCK], tl.int64)
        for start in range(begin, end, BLOCK * UNROLL):
            for i in tl.static_range(UNROLL):
                at = start + i * BLOCK + lane
                magnitude, amount = _measure(row_ptr, at, vocab, best, temperature, least, far, far_id, True, EXACT)
                sums += amount
        total = tl.sum(sums, 0)
        if PARTS > 1:
            slot = board_ptr + 16 * (turn + 1)
            tl.atomic_add(slot, total, sem="relaxed")
            _meet(board_ptr, turn, parts)
            total = tl.load(slot, volatile=True)
            turn += 1
    goal = tl.minimum((tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.int64), total - 1)
    drawn, ours = _first_over(
        row_ptr, begin, end, vocab, best, temperature, least, far, far_id, goal, nearest, board_ptr, board_ptr + BOARD + 2 * PARTS,
        turn, part, parts, True, EXACT, BLOCK, UNROLL, PARTS,
    )  # fmt: skip
    if ours:
        tl.store(out_ptr + row, drawn.to(tl.int64))


def launcher(*, lists: bool, warps: int, shared: bool = False) -> Launcher:
    """The kernel for one kind of group; 32 warps fit a multiprocessor."""
    unroll, parts = (UNROLL, MOST_PARTS) if shared else (UNROLL if lists else 2 * UNROLL, 1)
    constants = {"LISTS": lists, "EXACT": not INTERPRETED, "BLOCK": 32 * warps, "UNROLL": unroll, "PARTS": parts}
    return Launcher(draw_kernel, constants, num_warps=warps, max_registers=64, cooperative=shared)


def sharing(rows: int, vocab: int, processors: int) -> tuple[int, int]:
    """(programs for each row, tokens of each): two programs fit a multiprocessor, and all must be there at once.

    H200, 128,256 tokens with top_p: 1 row takes 55 us in place of 376, 8 rows 92 (484), 64 rows 326 (529); 128 rows lose by it.
    """
    sweeps = triton.cdiv(vocab, SWEEP)
    parts = min(MOST_PARTS, 2 * processors // rows, sweeps)
    if parts < 3:
        return 1, vocab
    share = triton.cdiv(sweeps, parts) * SWEEP
    return triton.cdiv(vocab, share), share


def bind_draw(args: DrawArgs) -> Kernel:
    """Rows of logits may be strided. Few rows are shared among programs; more than multiprocessors share each between two."""
    processors, vocab = target().multiprocessors, args.vocab_size
    alone = {(lists, warps): launcher(lists=lists, warps=warps) for lists in (False, True) for warps in WARPS}
    shared = {lists: launcher(lists=lists, warps=WARPS[0], shared=True) for lists in (False, True)}

    def draw(logits: torch.Tensor, best: torch.Tensor, options: DrawOptions, uniforms: torch.Tensor) -> torch.Tensor:
        rows, lists = logits.shape[0], options.kind != "dense"
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if not rows:
            return out
        least = options.top_k if options.min_weight is None else options.min_weight
        tensors = (logits, best, options.temperature, least, options.top_k, options.top_p, uniforms, out)
        parts, share = (1, vocab) if INTERPRETED else sharing(rows, vocab, processors)
        numbers = (logits.stride(0), vocab, int(options.min_weight is not None), share)
        if parts == 1:
            alone[lists, WARPS[rows <= processors]]((1, rows, 1), *tensors, out, *numbers, 0)
        else:
            board = torch.zeros((rows, BOARD.value + 3 * MOST_PARTS), dtype=torch.int64, device=logits.device)
            shared[lists]((parts, rows, 1), *tensors, board, *numbers, board.stride(0))
        return out

    return draw
