"""Activations of feed-forward blocks.

- `gated_act(gate_up [T, 2 I]) -> [T, I]`: act(gate) * up; the gate is the first half. Each factor is rounded to `dtype`, as Hugging Face
  does. `silu_mul` is the same op for activation "silu" alone, the common case of GPU kernels.
- `act(x [T, I]) -> [T, I]`: the plain activation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hexad.operators.args import ActArgs
from hexad.operators.registry import Kernel, registry

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def act_reference(args: ActArgs) -> Kernel:
    return ACTIVATIONS[args.activation]


def gated_act_reference(args: ActArgs) -> Kernel:
    width, act = args.intermediate, ACTIVATIONS[args.activation]

    def gated_act(gate_up: torch.Tensor) -> torch.Tensor:
        return act(gate_up[..., :width]).mul_(gate_up[..., width:])

    return gated_act


registry.define("act", act_reference)
registry.define("gated_act", gated_act_reference)
registry.define("silu_mul", gated_act_reference)
