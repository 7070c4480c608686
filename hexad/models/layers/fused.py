"""A decoder layer over composite operators: norms go into the products after them, sums into the products before them.

The hidden state h is updated in place; five to seven launches a layer instead of nine. `fuse` answers None where a number format or a
provider lacks a composite: the plain layer serves then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hexad.models.layers.attention import Attention
from hexad.models.layers.mlp import MLP
from hexad.operators.batch import AttentionBatch, KVPages

Map = Callable[[torch.Tensor], torch.Tensor]
Add = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """norm_linear, rope_kv_write, paged_attention, linear_add, norm_gated_linear, linear_add."""

    qkv: Map
    attention: Attention
    attention_out: Add
    gate_up: Map
    down: Add

    def __call__(self, h: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, kv: KVPages) -> torch.Tensor:
        """h [T, H] -> h, updated in place."""
        h = self.attention_out(self.attention.attend(self.qkv(h), positions, batch, kv), h)
        return self.down(self.gate_up(h), h)


def fuse(attention: Attention, mlp: MLP, input_norm: torch.Tensor, post_attention_norm: torch.Tensor, eps: float) -> FusedLayer | None:
    """The fused form of a pre-norm layer, or None."""
    if not mlp.gated:
        return None
    qkv = attention.qkv.after_norm(input_norm, eps)
    attention_out = attention.out.adding()
    gate_up = mlp.gate_up.after_norm(post_attention_norm, eps, mlp.activation)
    down = mlp.down.adding()
    if qkv is None or attention_out is None or gate_up is None or down is None:
        return None
    return FusedLayer(qkv, attention, attention_out, gate_up, down)
