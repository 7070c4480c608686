"""`linear(x [T, in], prepared) -> [T, out]`: x W^T + b.

`prepare(args, (weight [out, in], bias [out] | None))` packs the parameters once; the reference keeps them as they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hexad.operators.args import LinearArgs
from hexad.operators.registry import Kernel, registry


def linear_reference(_args: LinearArgs) -> Kernel:
    def linear(x: torch.Tensor, prepared: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
        return F.linear(x, prepared[0], prepared[1])

    return linear


registry.define("linear", linear_reference)
