"""Distributions as integers: every probability is a weight of up to 2^40, relative to the most likely token's.

Sums of integers are exact in any order, so a row's draw and log-probabilities are the same alone and in any batch, on any number of
threads, and on every device as far as `exp` agrees. A vocabulary of 2^18 tokens sums to less than 2^58.

Ties: tokens are ranked by logit, best first, and equal logits by id, lowest first. The arg max, top_k, top_p and the lists of
log-probabilities all follow this one order.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SCALE = 2**40
_MAGNITUDE = 0x7FFFFFFF
_ID_BITS = 32


def shift(logits: Tensor, best: Tensor, temperature: Tensor | None = None) -> Tensor:
    """(logits - best) / temperature as a new [R, V] tensor, 0 at the best: nothing can overflow."""
    shifted = logits - best[:, None]
    return shifted if temperature is None else shifted.div_(temperature[:, None])


def weigh(shifted: Tensor) -> Tensor:
    """Integer weights of shifted logits: [R, V] int64, SCALE at the best token. `shifted` is overwritten."""
    return shifted.exp_().mul_(float(SCALE)).to(torch.int64)


def rank_keys(shifted: Tensor) -> Tensor:
    """Distinct keys, smallest for the best token, with the id in the low half: [R, V] int64.

    Shifted logits are not positive, so their order is that of their magnitude bits (which also puts -0.0 and 0.0 together).
    """
    keys = shifted.view(torch.int32).bitwise_and(_MAGNITUDE).to(torch.int64)
    ids = torch.arange(shifted.shape[-1], device=shifted.device)
    keys.bitwise_left_shift_(_ID_BITS).bitwise_or_(ids)
    return keys


def key_ids(keys: Tensor) -> Tensor:
    """The token ids inside rank keys."""
    return keys.bitwise_and(2**_ID_BITS - 1)


def best_first(keys: Tensor, count: int) -> Tensor:
    """The ids of the `count` best tokens, in order: [R, count] int64."""
    count = min(count, keys.shape[-1])
    if keys.device.type == "cpu":
        return key_ids(torch.from_numpy(_smallest(keys.numpy(), count)))
    if count == keys.shape[-1]:
        return key_ids(keys.sort(dim=-1).values)
    return key_ids(keys.topk(count, dim=-1, largest=False, sorted=True).values)


def _smallest(keys: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The `count` smallest of each row, ascending. numpy sorts integers with vector instructions: up to eight times torch's speed."""
    if count < keys.shape[-1]:
        keys = np.partition(keys, count, axis=-1)[:, :count]
    return np.sort(keys, axis=-1)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF draw: the first column whose running sum exceeds `uniform * total`. [R, V], [R] -> [R] int64.

    A column of weight 0 is never drawn. Rows without any weight (their logits were not finite) give a valid but meaningless column.
    """
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1]
    target = torch.minimum((uniforms * total.to(torch.float64)).to(torch.int64), total - 1)
    column = torch.searchsorted(sums, target[:, None], right=True)[:, 0]
    return column.clamp_(0, weights.shape[-1] - 1)


def log_of(total: Tensor) -> Tensor:
    """log of the sum of exp(shifted), from the sum of its weights: [R] float64."""
    return (total.to(torch.float64) / SCALE).log()
