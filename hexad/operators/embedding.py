"""`embedding(token_ids [T] int64, table [vocab, hidden]) -> [T, hidden]`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hexad.operators.args import EmbeddingArgs
from hexad.operators.registry import Kernel, registry


def embedding_reference(_args: EmbeddingArgs) -> Kernel:
    def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, table)

    return embedding


registry.define("embedding", embedding_reference)
