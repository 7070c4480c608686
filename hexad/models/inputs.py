"""What a forward pass takes: made by the engine's runner, read by stacks and layers. The only contract between the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from hexad.operators.batch import AttentionBatch


@dataclass(slots=True)
class ForwardInputs:
    """One step's tokens."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    attention: tuple[AttentionBatch, ...]  # per KV group, in the order of ModelSpec.kv_layer_groups
    starting: Callable[[], None] | None = None  # may be called once, just before a computation that needs no interpreter
