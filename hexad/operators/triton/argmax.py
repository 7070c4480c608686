"""Greedy choice over the vocabulary in two stages, so that one row of logits is read by many programs. Ties go to the lowest id."""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hexad.operators.args import BestTokenArgs
from hexad.operators.registry import Kernel
from hexad.operators.triton.launch import Launcher, pow2, target

BLOCK = 4096


@triton.jit(do_not_specialize=["row_stride", "vocab"])
def block_max_kernel(logits_ptr, value_ptr, index_ptr, row_stride, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The largest of BLOCK logits of one row, and the lowest id that has it; NaN counts as the largest, so that it is found."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits_ptr + row * row_stride + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    best = tl.max(x, 0)
    line = row * tl.num_programs(1) + part
    tl.store(value_ptr + line, best)
    tl.store(index_ptr + line, tl.min(tl.where(x == best, at, 2147483647), 0))


@triton.jit(do_not_specialize=["parts"])
def row_max_kernel(value_ptr, index_ptr, out_ptr, code_ptr, parts, PARTS: tl.constexpr, PDL: tl.constexpr):
    """The first block with the largest value gives the row's id; the code is 1 where that value is not finite."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(value_ptr + row * parts + part, mask=part < parts, other=-float("inf"))
    index = tl.load(index_ptr + row * parts + part, mask=part < parts, other=2147483647)
    best = tl.max(value, 0)
    tl.store(out_ptr + row, tl.min(tl.where(value == best, index, 2147483647), 0).to(tl.int64))
    tl.store(code_ptr + row, ((best == float("inf")) | (best == -float("inf"))).to(tl.uint8))


def bind_best_token(args: BestTokenArgs) -> Kernel:
    """Rows of logits may be strided."""
    parts, pdl = triton.cdiv(args.vocab_size, BLOCK), target().tensor_copies
    blocks = Launcher(block_max_kernel, {"BLOCK": BLOCK, "PDL": pdl}, num_warps=8, pdl=pdl)
    across = Launcher(row_max_kernel, {"PARTS": pow2(parts), "PDL": pdl}, num_warps=1, pdl=pdl)

    def best_token(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = logits.shape[0]
        value = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
        index = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
        token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
        codes = torch.empty(rows, dtype=torch.uint8, device=logits.device)
        if rows:
            blocks((rows, parts, 1), logits, value, index, logits.stride(0), args.vocab_size)
            across((rows, 1, 1), value, index, token_ids, codes, parts)
        return token_ids, codes

    return best_token
