"""Seam 4: a quantisation scheme, between layers and number formats. One per format; model code never asks which.

Contract
- `Scheme.linear(...)` makes the parameters of one linear layer from lazy handles, reading only what this rank needs, and returns a
  `LinearMethod`. Shapes: weight [out, in] row-major as in checkpoints; several handles are concatenated along `out` (merged QKV,
  gate-up).
- `LinearMethod.apply(x [.., in]) -> [.., out]` in the compute dtype; it never allocates state. `nbytes` counts what stays resident.
- `Scheme.embedding(...)` likewise for look-up tables; with tied weights the output head is made from the same handle.
- Errors name the tensor: WeightsError for a missing, misshapen or corrupt one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from hexad.models.loader import WeightHandle


class LinearMethod(Protocol):
    """One linear layer in one number format."""

    out_features: int
    in_features: int
    nbytes: int

    def apply(self, x: torch.Tensor) -> torch.Tensor: ...

    def gated(self, activation: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """x -> gated_act(apply(x)) as one operator (the gate's rows come first); None: this format has none."""
        ...

    def adding(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """(x, residual) -> residual + apply(x), written into `residual`; None: this format has none."""
        ...


class EmbeddingMethod(Protocol):
    """One look-up table in one number format."""

    nbytes: int

    def apply(self, token_ids: torch.Tensor) -> torch.Tensor: ...


class Scheme(Protocol):
    """One number format of weights."""

    name: str

    def linear(
        self,
        weights: Sequence[WeightHandle],
        biases: Sequence[WeightHandle] | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LinearMethod: ...

    def embedding(self, weight: WeightHandle, *, dtype: torch.dtype, device: torch.device) -> EmbeddingMethod: ...
