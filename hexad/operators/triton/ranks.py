"""Ranks, best tokens and sums of weights over the vocabulary, in two stages: a block's own, then those of a row's blocks."""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from hexad.operators.args import DrawArgs
from hexad.operators.registry import Kernel
from hexad.operators.token_ranks import token_ranks_reference
from hexad.operators.triton.draw_blocks import weigh
from hexad.operators.triton.launch import INTERPRETED, Launcher, pow2

BLOCK = 2048
LONGEST = 32  # of the lists of best tokens; longer ones are torch's
NONE: tl.constexpr = tl.constexpr(2**63 - 1)  # after every token's key


@triton.jit
def _key(x, best, token_id):
    """`token_weights.rank_keys`: smallest for the best token, distinct, the id in the low half."""
    magnitude = (x - best).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return (magnitude.to(tl.int64) << 32) | token_id


@triton.jit(do_not_specialize=["row_stride", "vocab", "top"])
def block_ranks_kernel(logits_ptr, best_ptr, token_ptr, key_ptr, before_ptr, weight_ptr, row_stride, vocab, top,
                       EXACT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A block's `top` least keys in order, how many of its tokens come before the row's token, and its weight."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr = logits_ptr + row * row_stride
    best, token = tl.load(best_ptr + row), tl.load(token_ptr + row)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + at, mask=at < vocab, other=-float("inf"))
    keys = tl.where(at < vocab, _key(x, best, at), NONE)
    mine = _key(tl.load(row_ptr + token), best, token)
    line = row * tl.num_programs(1) + part
    tl.store(before_ptr + line, tl.sum((keys < mine).to(tl.int32), 0))
    tl.store(weight_ptr + line, tl.sum(weigh(x - best, 0.0, EXACT), 0))
    for place in range(top):
        least = tl.min(keys, 0)
        tl.store(key_ptr + line * top + place, least)
        keys = tl.where(keys == least, NONE, keys)


@triton.jit(do_not_specialize=["parts", "top"])
def row_ranks_kernel(key_ptr, before_ptr, weight_ptr, rank_ptr, id_ptr, total_ptr, parts, top,
                     PARTS: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """A row's from its blocks'."""
    row = tl.program_id(0).to(tl.int64)
    part, key = tl.arange(0, PARTS), tl.arange(0, KEYS)
    before = tl.load(before_ptr + row * parts + part, mask=part < parts, other=0)
    weight = tl.load(weight_ptr + row * parts + part, mask=part < parts, other=0)
    tl.store(rank_ptr + row, tl.sum(before.to(tl.int64), 0) + 1)
    tl.store(total_ptr + row, tl.sum(weight, 0))
    if top > 0:
        keys = tl.load(key_ptr + row * parts * top + key, mask=key < parts * top, other=NONE)
        for place in range(top):
            least = tl.min(keys, 0)
            tl.store(id_ptr + row * top + place, least & 0x7FFFFFFF)
            keys = tl.where(keys == least, NONE, keys)


def bind_token_ranks(args: DrawArgs) -> Kernel:
    """Rows of logits may be strided."""
    parts, by_torch = triton.cdiv(args.vocab_size, BLOCK), token_ranks_reference(args)
    blocks = Launcher(block_ranks_kernel, {"EXACT": not INTERPRETED, "BLOCK": BLOCK}, num_warps=4)
    keys = pow2(parts * LONGEST)  # one variant for lists of any length
    across = Launcher(row_ranks_kernel, {"PARTS": pow2(parts), "KEYS": keys}, num_warps=min(32, max(4, keys // 512)))

    def token_ranks(
        logits: torch.Tensor, best: torch.Tensor, token_ids: torch.Tensor, top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if top > LONGEST:
            listed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = by_torch(logits, best, token_ids, top)
            return listed
        rows, empty = logits.shape[0], functools.partial(torch.empty, dtype=torch.int64, device=logits.device)
        ranks, top_ids, totals = empty(rows), empty(rows, top), empty(rows)
        if rows:
            key, before, weight = empty(rows, parts, top), empty(rows, parts, dtype=torch.int32), empty(rows, parts)
            blocks((rows, parts, 1), logits, best, token_ids, key, before, weight, logits.stride(0), args.vocab_size, top)
            across((rows, 1, 1), key, before, weight, ranks, top_ids, totals, parts, top)
        return ranks, top_ids, totals

    return token_ranks
