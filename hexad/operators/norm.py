"""RMSNorm (Zhang and Sennrich 2019), alone and fused with the residual addition before it.

- `rms_norm(x [T, H], weight [H]) -> [T, H]`: the mean square is taken in float32, the normalised row is rounded to `dtype`, then
  multiplied by the weight in `dtype` (Hugging Face Llama's order of rounding).
- `add_rms_norm(x [T, H], residual [T, H], weight [H]) -> (normed, new_residual)`: new_residual = residual + x, rounded to `dtype`;
  normed = rms_norm(new_residual). It may write into `residual`, which the caller must not read again; `x` stays as it was.
"""

from __future__ import annotations

import torch

from hexad.operators.args import NormArgs
from hexad.operators.registry import Kernel, registry


def rms_norm_reference(args: NormArgs) -> Kernel:
    shape, eps = (args.hidden,), args.eps

    def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x, shape, None, eps).mul_(weight)

    return rms_norm


def add_rms_norm_reference(args: NormArgs) -> Kernel:
    norm = rms_norm_reference(args)

    def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual.add_(x)
        return norm(residual, weight), residual

    return add_rms_norm


registry.define("rms_norm", rms_norm_reference)
registry.define("add_rms_norm", add_rms_norm_reference)
