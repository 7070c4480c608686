"""`best_token(logits [R, >= vocab_size]) -> ([R] int64, [R] uint8)`: the lowest id of the largest logit, and 1 where that is not finite.

A row with NaN counts as not finite; which id it gets is up to the provider.
"""

from __future__ import annotations

import numpy as np
import torch

from hexad.operators.args import BestTokenArgs
from hexad.operators.registry import Kernel, Provider, registry


def best_token_reference(args: BestTokenArgs) -> Kernel:
    def best_token(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best, token_ids = logits[:, : args.vocab_size].to(torch.float32).max(dim=-1)
        return token_ids, torch.logical_not(best.isfinite()).to(torch.uint8)

    return best_token


def bind_numpy(args: BestTokenArgs) -> Kernel:
    """On this thread alone: torch's `max` and its four small successors took 190 microseconds of a step of one row, and with several
    rows it waits for threads that other processes have taken off their cores."""

    def best_token(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        live = logits.numpy()[:, : args.vocab_size]  # [R, V]
        token_ids = live.argmax(axis=1)  # the first one of equals, a NaN before all else
        codes = np.logical_not(np.isfinite(live[np.arange(len(live)), token_ids])).astype(np.uint8)
        return torch.from_numpy(token_ids), torch.from_numpy(codes)

    return best_token


def numpy_reasons(args: BestTokenArgs) -> list[str]:
    if args.device_type != "cpu" or args.dtype != torch.float32:
        return [f"numpy takes float32 on a CPU, not {args.dtype} on {args.device_type}"]
    return []


registry.define("best_token", best_token_reference)
registry.register(Provider("best_token", "numpy", bind_numpy, numpy_reasons, priority=10))
