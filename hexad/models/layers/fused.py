"""A decoder layer over composite operators: sums and the gated activation go into the products before them.

The hidden state h is updated in place. `fuse` answers None where a number format or a provider lacks a composite: the plain layer serves
then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hexad.models.inputs import LastTokens
from hexad.models.layers.attention import Attention
from hexad.models.layers.mlp import MLP
from hexad.operators.batch import AttentionBatch, KVPages

Map = Callable[[torch.Tensor], torch.Tensor]
Add = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """rms_norm, linear, rope_kv_write, paged_attention, linear_add; rms_norm, gated_linear, linear_add."""

    norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    input_norm: torch.Tensor
    attention: Attention
    attention_out: Add
    post_attention_norm: torch.Tensor
    gate_up: Map
    down: Add

    def __call__(
        self, h: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, kv: KVPages, last: LastTokens | None = None
    ) -> torch.Tensor:
        """h [T, H] -> h, updated in place; or [S, H] of `last`."""
        attention, norm = self.attention, self.norm
        qkv = attention.qkv.apply(norm(h, self.input_norm))
        mixed = attention.attend(qkv, positions, batch, kv, last)
        if last is not None:
            h = last.pick(h)
            if not len(h):
                return h
        h = self.attention_out(mixed, h)
        return self.down(self.gate_up(norm(h, self.post_attention_norm)), h)


def fuse(
    norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    attention: Attention,
    mlp: MLP,
    input_norm: torch.Tensor,
    post_attention_norm: torch.Tensor,
) -> FusedLayer | None:
    """The fused form of a pre-norm layer, or None."""
    if not mlp.gated:
        return None
    attention_out, gate_up, down = attention.out.adding(), mlp.gate_up.gated(mlp.activation), mlp.down.adding()
    if attention_out is None or gate_up is None or down is None:
        return None
    return FusedLayer(norm, input_norm, attention, attention_out, post_attention_norm, gate_up, down)
