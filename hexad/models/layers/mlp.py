"""Feed-forward block of a decoder layer, with or without a gate."""

from __future__ import annotations

import torch

from hexad.models.layers.context import BuildContext
from hexad.operators.args import ActArgs


class MLP:
    """act(gate) * up, or act(up), then down."""

    def __init__(self, context: BuildContext, index: int) -> None:
        spec, family, hidden = context.spec.mlp, context.family, context.spec.hidden
        width = spec.intermediate
        self.gated, self.activation = spec.gated, spec.activation
        names = tuple(context.layer_name(index, name) for name in family.gate_up)
        self.gate_up = context.linear(names, 2 * width if spec.gated else width, hidden, bias=spec.bias)
        self.down = context.linear((context.layer_name(index, family.down),), hidden, width, bias=spec.bias)
        op = "act" if not spec.gated else "silu_mul" if spec.activation == "silu" else "gated_act"
        self.act = context.bind(op, ActArgs(width, spec.activation, context.dtype, context.device.type)).call

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        return self.down.apply(self.act(self.gate_up.apply(x)))
