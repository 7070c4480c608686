"""Log-probabilities of drawn and of prompt tokens: after penalties and masks, before temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hexad.engine.plan import TokenLogprobs
from hexad.operators import token_weights as w
from hexad.operators.args import DrawArgs
from hexad.operators.registry import Kernel
from hexad.operators.token_ranks import token_ranks_reference

_TORCH = token_ranks_reference(DrawArgs(0, "any"))


class LogprobTensors(NamedTuple):
    """Log-probabilities of N tokens, with their K best alternatives."""

    token_ids: Tensor  # [N] int64
    logprobs: Tensor  # [N] float32
    ranks: Tensor  # [N] int64, 1 = most likely
    top_ids: Tensor  # [N, K] int64, best first
    top_logprobs: Tensor  # [N, K] float32


def gather_logprobs(logits: Tensor, best: Tensor, token_ids: Tensor, top: int, token_ranks: Kernel = _TORCH) -> LogprobTensors:
    """Log-probabilities of `token_ids` [N] under `logits` [N, V] (kept as they are), whose row maxima are `best` [N]."""
    ranks, top_ids, totals = token_ranks(logits, best, token_ids, min(top, logits.shape[-1]))
    picked = w.shift(logits.gather(1, torch.cat((token_ids[:, None], top_ids), dim=1)), best).to(torch.float64)
    picked = (picked - w.log_of(totals)[:, None]).to(torch.float32)
    return LogprobTensors(token_ids, picked[:, 0], ranks, top_ids, picked[:, 1:])


def to_token_logprobs(tensors: LogprobTensors, tops: Sequence[int]) -> list[TokenLogprobs]:
    """Host objects from host tensors; row i lists its `tops[i]` best. Tokens that cannot occur are left out of the lists."""
    rows = zip(
        tensors.token_ids.tolist(),
        tensors.logprobs.tolist(),
        tensors.ranks.tolist(),
        tensors.top_ids.tolist(),
        tensors.top_logprobs.tolist(),
        tops,
        strict=True,
    )
    return [
        TokenLogprobs(token_id, logprob, rank, tuple((i, p) for i, p in zip(ids[:top], values[:top], strict=True) if p > -math.inf))
        for token_id, logprob, rank, ids, values, top in rows
    ]


def gather_in_blocks(
    logits: Tensor, rows: Tensor, best: Tensor, token_ids: Tensor, top: int, block_rows: int, token_ranks: Kernel
) -> LogprobTensors:
    """`gather_logprobs` of the rows `rows` [N] of a batch, `block_rows` at a time so that memory is bounded."""
    blocks = torch.split(rows, block_rows)
    parts = [gather_logprobs(logits[block], best[block], token_ids[block], top, token_ranks) for block in blocks]
    return parts[0] if len(parts) == 1 else _concatenate(parts)


def _concatenate(parts: Sequence[LogprobTensors]) -> LogprobTensors:
    return LogprobTensors(*(torch.cat(column) for column in zip(*parts, strict=True)))


def prompt_logprob_tensors(
    logits: Tensor, next_ids: Tensor, vocab_size: int, top: int, block_rows: int = 32, token_ranks: Kernel = _TORCH
) -> LogprobTensors:
    """Log-probabilities of prompt ids: row i of `logits` [T, padded] predicts `next_ids[i]`. Memory is bounded by `block_rows` rows."""
    parts = []
    for start in range(0, next_ids.shape[0], block_rows):
        live = logits[start : start + block_rows, :vocab_size].to(torch.float32)
        ids = next_ids[start : start + block_rows].to(torch.int64).clamp(0, vocab_size - 1)
        parts.append(gather_logprobs(live, live.amax(dim=-1), ids, top, token_ranks))
    return _concatenate(parts)


def prompt_logprobs(
    logits: Tensor, next_ids: Tensor, vocab_size: int, top: int, *, first: bool = False
) -> tuple[TokenLogprobs | None, ...]:
    """`prompt_logprob_tensors` as host objects (waits for the device).

    A chunk that computed positions start .. end gives the entries of positions start + 1 .. end + 1, as far as those are prompt: pass the
    logits of start .. and the ids of start + 1 ..; `first` (start is 0) puts the None of position 0 before them.
    """
    head: tuple[TokenLogprobs | None, ...] = (None,) if first else ()
    if next_ids.shape[0] == 0:
        return head
    tensors = prompt_logprob_tensors(logits, next_ids, vocab_size, top)
    host = LogprobTensors(*(column.cpu() for column in tensors))
    return head + tuple(to_token_logprobs(host, [top] * next_ids.shape[0]))
