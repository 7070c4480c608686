"""What a forward pass takes: made by the engine's runner, read by stacks and layers. The only contract between the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from hexad.operators.batch import AttentionBatch


@dataclass(slots=True)
class LastTokens:
    """The last tokens of S rows, where nobody reads the hidden states of others. S may be 0."""

    index: torch.Tensor  # [S] int64: their places among the step's tokens
    attention: AttentionBatch  # S rows of one query each (slots are not read)

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, ...] -> [S, ...], rows as far apart as they were: kernels are compiled for that distance."""
        picked = x.index_select(0, self.index)
        if x.stride(0) <= picked.stride(0):
            return picked
        room = x.new_empty((len(picked), x.stride(0)))
        return room.as_strided(picked.shape, (x.stride(0), *picked.stride()[1:])).copy_(picked)


@dataclass(slots=True)
class ForwardInputs:
    """One step's tokens."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    attention: tuple[AttentionBatch, ...]  # per KV group, in the order of ModelSpec.kv_layer_groups
    last: tuple[LastTokens, ...] | None = None  # per KV group: these alone are needed, [S, H] comes back
    starting: Callable[[], None] | None = None  # may be called once, just before a computation that needs no interpreter
