"""Log-probabilities of a prompt's own tokens, computed chunk by chunk with its prefill.

Chunk [start, end) of a prompt of n tokens has the logits that predict positions start + 1 .. end, and so gives the entries of positions
start + 1 .. min(end, n - 1); the chunk at 0 gives the entry of position 0 (None) as well. Concatenated over the chunks that is one entry a
prompt token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hexad.engine.plan import NewRequest, Row, TokenLogprobs

ROWS_AT_ONCE = 128  # bounds the float32 logits in memory: 128 x 150,000 x 4 bytes = 77 MB


def chunk_logprobs(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, targets: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob [n], rank [n], top ids [n, top], top logprobs [n, top]) of `targets` [n] after hidden states [n, H]."""
    parts = []  # at least one, so that a chunk without targets gives empty columns
    for low in range(0, max(len(targets), 1), ROWS_AT_ONCE):
        logprobs = logits(hidden[low : min(low + ROWS_AT_ONCE, len(targets))]).log_softmax(-1)
        chosen = logprobs.gather(1, targets[low : low + ROWS_AT_ONCE].unsqueeze(1))
        best, ids = logprobs.topk(top, dim=-1) if top else (logprobs[:, :0], logprobs[:, :0].long())
        parts.append((chosen.squeeze(1), (logprobs > chosen).sum(1) + 1, ids, best))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))  # type: ignore[return-value]


def num_targets(row: Row, request: NewRequest) -> int:
    """How many prompt tokens the logits of this row predict."""
    return max(0, min(row.start + row.num_tokens, request.prompt_len - 1) - row.start)


def entries(
    row: Row, targets: list[int], columns: tuple[list[float], list[int], list[list[int]], list[list[float]]]
) -> tuple[TokenLogprobs | None, ...]:
    """The row's entries, from host lists."""
    first: list[TokenLogprobs | None] = [None] if row.start == 0 else []
    chosen, ranks, ids, best = columns
    for place, token_id in enumerate(targets):
        top = tuple(zip(ids[place], best[place], strict=True))
        first.append(TokenLogprobs(token_id, chosen[place], ranks[place], top))
    return tuple(first)
