"""Composite operators around one linear layer. Each reference is the composition of its parts; a provider may do it in one kernel.

- `gated_linear(x [T, in], prepared) -> [T, out / 2]`: gated_act(linear(x)); the first half of the rows of the weight are the gate's.
- `linear_add(x [T, in], residual [T, out], prepared) -> residual`: residual + linear(x), written into `residual`, which is returned.

`prepared` is what `linear` takes. A provider may keep intermediate values in float32 where the reference rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hexad.operators.activation import gated_act_reference
from hexad.operators.args import ActArgs, LinearArgs
from hexad.operators.linear import linear_reference
from hexad.operators.registry import Kernel, registry

Prepared = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class FusedLinearArgs:
    """One linear layer and what stands around it. `activation` is read by `gated_linear`."""

    in_features: int
    out_features: int  # rows of the weight
    bias: bool
    dtype: torch.dtype
    device_type: str
    activation: str = ""  # silu | gelu | gelu_tanh | relu

    @property
    def linear(self) -> LinearArgs:
        return LinearArgs(self.in_features, self.out_features, self.bias, self.dtype, self.device_type)

    @property
    def act(self) -> ActArgs:
        return ActArgs(self.out_features // 2, self.activation, self.dtype, self.device_type)


def gated_linear_reference(args: FusedLinearArgs) -> Kernel:
    linear, act = linear_reference(args.linear), gated_act_reference(args.act)

    def gated_linear(x: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        out: torch.Tensor = act(linear(x, prepared))
        return out

    return gated_linear


def linear_add_reference(args: FusedLinearArgs) -> Kernel:
    linear = linear_reference(args.linear)

    def linear_add(x: torch.Tensor, residual: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        return residual.add_(linear(x, prepared))

    return linear_add


registry.define("gated_linear", gated_linear_reference)
registry.define("linear_add", linear_add_reference)
