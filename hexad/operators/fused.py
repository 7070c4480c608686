"""Composite operators around one linear layer. Each reference is the composition of its parts; a provider may do it in one kernel.

- `norm_linear(h [T, H], norm_weight [H], prepared) -> [T, out]`: linear(rms_norm(h)).
- `gated_linear(x [T, H], prepared) -> [T, out / 2]`: gated_act(linear(x)).
- `norm_gated_linear(h [T, H], norm_weight [H], prepared) -> [T, out / 2]`: gated_act(linear(rms_norm(h))); the first half of the rows of
  the weight are the gate's.
- `linear_add(x [T, in], residual [T, out], prepared) -> residual`: residual + linear(x), written into `residual`, which is returned.

`prepared` is what `linear` takes. A provider may keep intermediate values in float32 where the reference rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hexad.operators.activation import gated_act_reference
from hexad.operators.args import ActArgs, LinearArgs, NormArgs
from hexad.operators.linear import linear_reference
from hexad.operators.norm import rms_norm_reference
from hexad.operators.registry import Kernel, registry

Prepared = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class FusedLinearArgs:
    """One linear layer and what stands around it. `eps` and `activation` are read by the ops that use them."""

    in_features: int
    out_features: int  # rows of the weight
    bias: bool
    dtype: torch.dtype
    device_type: str
    eps: float = 0.0
    activation: str = ""  # silu | gelu | gelu_tanh | relu

    @property
    def linear(self) -> LinearArgs:
        return LinearArgs(self.in_features, self.out_features, self.bias, self.dtype, self.device_type)

    @property
    def norm(self) -> NormArgs:
        return NormArgs(self.in_features, self.eps, self.dtype, self.device_type)

    @property
    def act(self) -> ActArgs:
        return ActArgs(self.out_features // 2, self.activation, self.dtype, self.device_type)


def norm_linear_reference(args: FusedLinearArgs) -> Kernel:
    norm, linear = rms_norm_reference(args.norm), linear_reference(args.linear)

    def norm_linear(h: torch.Tensor, norm_weight: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        out: torch.Tensor = linear(norm(h, norm_weight), prepared)
        return out

    return norm_linear


def gated_linear_reference(args: FusedLinearArgs) -> Kernel:
    linear, act = linear_reference(args.linear), gated_act_reference(args.act)

    def gated_linear(x: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        out: torch.Tensor = act(linear(x, prepared))
        return out

    return gated_linear


def norm_gated_linear_reference(args: FusedLinearArgs) -> Kernel:
    norm, gated = rms_norm_reference(args.norm), gated_linear_reference(args)

    def norm_gated_linear(h: torch.Tensor, norm_weight: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        out: torch.Tensor = gated(norm(h, norm_weight), prepared)
        return out

    return norm_gated_linear


def linear_add_reference(args: FusedLinearArgs) -> Kernel:
    linear = linear_reference(args.linear)

    def linear_add(x: torch.Tensor, residual: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        return residual.add_(linear(x, prepared))

    return linear_add


registry.define("norm_linear", norm_linear_reference)
registry.define("gated_linear", gated_linear_reference)
registry.define("norm_gated_linear", norm_gated_linear_reference)
registry.define("linear_add", linear_add_reference)
