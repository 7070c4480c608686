"""Weights as plain numbers in the compute dtype; packed formats are dequantised while they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hexad.common.errors import WeightsError
from hexad.operators.args import EmbeddingArgs, LinearArgs
from hexad.operators.fused import FusedLinearArgs
from hexad.operators.registry import Kernel, registry

if TYPE_CHECKING:
    from hexad.models.loader import WeightHandle

Apply = Callable[[torch.Tensor], torch.Tensor]


class PlainLinear:
    """x W^T + b through the operator `linear`, and through its composites where a provider other than the reference has them."""

    def __init__(self, apply: Apply, args: LinearArgs, prepared: Any, nbytes: int, prefer: Mapping[str, str] | None) -> None:
        self.apply = apply
        self.out_features = args.out_features
        self.in_features = args.in_features
        self.nbytes = nbytes
        self._args = args
        self._prepared = prepared
        self._prefer = prefer

    def gated(self, activation: str) -> Apply | None:
        """gated_act(linear(x)) as one operator; None: no provider has it."""
        call = self._composite("gated_linear", activation)
        prepared = self._prepared
        return None if call is None else lambda x: call(x, prepared)

    def adding(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """(x, residual) -> residual + linear(x), written into `residual`; None: no provider has it."""
        call = self._composite("linear_add")
        prepared = self._prepared
        return None if call is None else lambda x, residual: call(x, residual, prepared)

    def _composite(self, op: str, activation: str = "") -> Kernel | None:
        plain = self._args
        args = FusedLinearArgs(plain.in_features, plain.out_features, plain.bias, plain.dtype, plain.device_type, activation=activation)
        chosen = next(candidate.provider for candidate in registry.explain(op, args, self._prefer) if candidate.chosen)
        return None if chosen == "torch" else registry.bind(op, args, self._prefer).call


class PlainEmbedding:
    """A look-up table through the operator `embedding`."""

    def __init__(self, apply: Apply, nbytes: int) -> None:
        self.apply = apply
        self.nbytes = nbytes


class PlainScheme:
    """One per network: it remembers tables, so that a tied head shares the embedding's memory."""

    name = "plain"

    def __init__(self, prefer: Mapping[str, str] | None = None) -> None:
        self._prefer = prefer
        self._tables: dict[str, torch.Tensor] = {}

    def linear(
        self,
        weights: Sequence[WeightHandle],
        biases: Sequence[WeightHandle] | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PlainLinear:
        shared = self._tables.get(weights[0].name) if len(weights) == 1 else None
        weight = stack_rows(weights, dtype, device) if shared is None else shared
        bias = stack_rows(biases, dtype, device) if biases else None
        out_features, in_features = weight.shape
        args = LinearArgs(in_features, out_features, bias is not None, dtype, device.type)
        bound = registry.bind("linear", args, self._prefer)
        prepared = bound.prepare((weight, bias))
        kept = prepared[0] if isinstance(prepared, tuple) else None
        nbytes = 0 if shared is not None and kept is shared else weight.nbytes + (bias.nbytes if bias is not None else 0)
        return PlainLinear(_apply(bound.call, prepared), args, prepared, nbytes, self._prefer)

    def embedding(self, weight: WeightHandle, *, dtype: torch.dtype, device: torch.device) -> PlainEmbedding:
        table = stack_rows([weight], dtype, device)
        self._tables[weight.name] = table
        bound = registry.bind("embedding", EmbeddingArgs(table.shape[0], table.shape[1], dtype, device.type), self._prefer)
        return PlainEmbedding(_apply(bound.call, table), table.nbytes)


def _apply(call: Callable[..., torch.Tensor], prepared: object) -> Apply:
    return lambda x: call(x, prepared)


def stack_rows(handles: Sequence[WeightHandle], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The handles' numbers, one below the other.

    Raises:
        WeightsError: their shapes do not fit together.
    """
    tail = handles[0].shape[1:]
    for handle in handles:
        if handle.shape[1:] != tail:
            raise WeightsError(f"tensor {handle.name} has shape {handle.shape}, but {handles[0].name} has {handles[0].shape}")
    if len(handles) == 1:
        return handles[0].load(dtype, device)
    stacked = torch.empty(sum(handle.shape[0] for handle in handles), *tail, dtype=dtype, device=device)
    row = 0
    for handle in handles:
        stacked[row : row + handle.shape[0]] = handle.load(dtype, device)
        row += handle.shape[0]
    return stacked
