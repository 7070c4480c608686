"""Log-probabilities of a prompt's own tokens, computed chunk by chunk with its prefill.

Chunk [start, end) of a prompt of n tokens has the logits that predict positions start + 1 .. end, and so gives the entries of positions
start + 1 .. min(end, n - 1); the chunk at 0 gives the entry of position 0 (None) as well. Concatenated over the chunks that is one entry a
prompt token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hexad.engine.plan import NewRequest, Row, TokenLogprobs
from hexad.engine.sampling.logprobs import LogprobTensors, prompt_logprob_tensors, to_token_logprobs
from hexad.engine.sampling.sampler import Sampler

ROWS_AT_ONCE = 128  # bounds the float32 logits in memory: 128 x 150,000 x 4 bytes = 77 MB


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities of one row's prompt tokens, on the device or in pinned memory."""

    row: int  # execution row
    first: bool  # the row starts at position 0, whose entry is None
    top: int
    parts: list[LogprobTensors]

    def entries(self) -> tuple[TokenLogprobs | None, ...]:
        """Host objects; waits for tensors on a device."""
        scored = [entry for part in self.parts for entry in to_token_logprobs(part, [self.top] * len(part.token_ids))]
        return (None, *scored) if self.first else tuple(scored)


def num_targets(row: Row, request: NewRequest) -> int:
    """How many prompt tokens the logits of this row predict."""
    return max(0, min(row.start + row.num_tokens, request.prompt_len - 1) - row.start)


def score(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, targets: torch.Tensor, sampler: Sampler, top: int
) -> list[LogprobTensors]:
    """Log-probabilities of `targets` [n] after the hidden states [>= n, H], a bounded number of rows at a time."""
    count = targets.shape[0]
    blocks = [(low, min(low + ROWS_AT_ONCE, count)) for low in range(0, count, ROWS_AT_ONCE)]
    return [
        prompt_logprob_tensors(logits(hidden[low:high]), targets[low:high], sampler.vocab_size, top, token_ranks=sampler.token_ranks)
        for low, high in blocks
    ]
