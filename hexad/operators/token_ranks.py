"""`token_ranks(logits [N, V] float32, best [N], token_ids [N], top) -> (ranks [N], top_ids [N, top], totals [N])`, all int64.

`best` are the rows' largest logits; a rank of 1 is the most likely token; `top` (at most V) best ids come best first; `totals` are sums of
weights (`token_weights`), from which log-probabilities follow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hexad.operators import token_weights as w
from hexad.operators.args import DrawArgs
from hexad.operators.registry import Kernel, registry


def token_ranks_reference(_args: DrawArgs) -> Kernel:
    def token_ranks(logits: Tensor, best: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        shifted = w.shift(logits, best)
        keys = w.rank_keys(shifted)
        top_ids = w.best_first(keys, top) if top else token_ids.new_empty((len(token_ids), 0), dtype=torch.int64)
        ranks = (keys < keys.gather(1, token_ids[:, None])).sum(dim=-1) + 1
        return ranks, top_ids, w.weigh(shifted).sum(dim=-1)

    return token_ranks


registry.define("token_ranks", token_ranks_reference)
