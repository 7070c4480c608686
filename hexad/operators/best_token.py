"""`best_token(logits [R, >= vocab_size]) -> ([R] int64, [R] uint8)`: the lowest id of the largest logit, and 1 where that is not finite.

A row with NaN counts as not finite; which id it gets is up to the provider.
"""

from __future__ import annotations

import torch

from hexad.operators.args import BestTokenArgs
from hexad.operators.registry import Kernel, registry


def best_token_reference(args: BestTokenArgs) -> Kernel:
    def best_token(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best, token_ids = logits[:, : args.vocab_size].to(torch.float32).max(dim=-1)
        return token_ids, torch.logical_not(best.isfinite()).to(torch.uint8)

    return best_token


registry.define("best_token", best_token_reference)
