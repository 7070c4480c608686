"""How a step's tokens and their keys and values lie in memory: the arguments that attention and KV operators share.

Batches are ragged and flat: T tokens of B rows, row b's tokens at `query_start[b] : query_start[b + 1]`. Rows need not be sorted. On graph
replays T and B are padded: a padding token has slot -1 (its KV is not written) and a padding row has seq_len 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class AttentionBatch:
    """Where one KV group's keys and values are, for this step."""

    query_start: torch.Tensor  # [B + 1] int32
    seq_lens: torch.Tensor  # [B] int32: keys after this step's tokens are written
    block_table: torch.Tensor  # [B, max_blocks] int32 (entries past the length, or out of the window, may be -1)
    slots: torch.Tensor  # [T] int64: block * block_size + offset for each new token's KV; -1 = do not write
    max_query_len: int
    max_seq_len: int  # an upper bound is enough
    block_size: int
    num_decodes: int  # how many rows, counted from the first, have exactly one query token (0 if unsorted)
    max_prompt_len: int = 0  # `max_seq_len` of the rows that are not decodes; 0: not known apart
    shared_len: torch.Tensor | None = None  # [1] int32: keys, whole blocks, that all decode rows share; None: not worth a thought
    scratch: dict[str, Any] = field(default_factory=dict)  # what a provider derives once a step and reuses over the layers

    @property
    def prompt_keys(self) -> int:
        """No row that is not a decode has more keys."""
        return self.max_prompt_len or self.max_seq_len


@dataclass(slots=True)
class KVPages:
    """Paged keys and values of one layer: views into the engine's storage."""

    k: torch.Tensor  # [num_blocks, block_size, kv_heads, head_dim]; int8: [..., head_dim + 4], codes and a scale (kv_int8.py)
    v: torch.Tensor  # likewise
