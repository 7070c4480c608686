"""What every layer needs while it is built: settled once a network, so that no layer asks twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hexad.common.errors import WeightsError
from hexad.models.families.family import DecoderFamily
from hexad.models.loader import WeightHandle, WeightStore
from hexad.models.quant.scheme import EmbeddingMethod, LinearMethod, Scheme
from hexad.models.spec import ModelSpec
from hexad.operators.registry import Bound, registry


class KVContext(Protocol):
    """What the operators that write and read keys and values are bound to."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def kv_dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def block_size(self) -> int: ...


@dataclass
class BuildContext:
    """Reads parameters and binds operators for one network; `weight_bytes` counts what stays resident."""

    spec: ModelSpec
    family: DecoderFamily
    store: WeightStore
    scheme: Scheme
    dtype: torch.dtype
    device: torch.device
    kv_dtype: torch.dtype
    block_size: int
    prefer: Mapping[str, str] | None = None
    weight_bytes: int = 0
    _bound: dict[tuple[str, object], Bound] = field(default_factory=dict)

    def bind(self, op: str, args: object) -> Bound:
        """The operator for `args`; equal ones are bound once."""
        key = (op, args)
        if key not in self._bound:
            self._bound[key] = registry.bind(op, args, self.prefer)
        return self._bound[key]

    def layer_name(self, index: int, name: str) -> str:
        return self.family.layer.format(index=index) + name

    def vector(self, name: str, size: int) -> torch.Tensor:
        """A small parameter (norm weight) [size] in the compute dtype."""
        handle = self.store.get(name)
        _check(handle, (size,))
        if self.family.norm_offset:
            tensor = (handle.load(torch.float32) + self.family.norm_offset).to(device=self.device, dtype=self.dtype)
        else:
            tensor = handle.load(self.dtype, self.device)
        self.weight_bytes += tensor.nbytes
        return tensor

    def linear(self, names: tuple[str, ...], out_features: int, in_features: int, *, bias: bool) -> LinearMethod:
        """One linear layer from the modules `names`, concatenated along the output dimension."""
        weights = [self.store.get(f"{name}.weight") for name in names]
        biases = [self.store.get(f"{name}.bias") for name in names] if bias else None
        _check_rows(weights, out_features, in_features)
        method = self.scheme.linear(weights, biases, dtype=self.dtype, device=self.device)
        self.weight_bytes += method.nbytes
        return method

    def embedding(self) -> EmbeddingMethod:
        handle = self.store.get(self.family.embedding)
        _check(handle, (self.spec.vocab_size, self.spec.hidden))
        method = self.scheme.embedding(handle, dtype=self.dtype, device=self.device)
        self.weight_bytes += method.nbytes
        return method

    def head(self) -> LinearMethod:
        """The output head; the embedding's own tensor where they are tied."""
        handle = self.store.get(self.family.embedding if self.spec.tied else self.family.head)
        _check(handle, (self.spec.vocab_size, self.spec.hidden))
        method = self.scheme.linear([handle], None, dtype=self.dtype, device=self.device)
        self.weight_bytes += method.nbytes
        return method


def _check(handle: WeightHandle, expected: tuple[int, ...]) -> None:
    if tuple(handle.shape) != expected:
        raise WeightsError(f"tensor {handle.name} has shape {list(handle.shape)}, the model's configuration needs {list(expected)}")


def _check_rows(weights: list[WeightHandle], out_features: int, in_features: int) -> None:
    rows = sum(handle.shape[0] for handle in weights)
    if rows != out_features or any(handle.shape[1:] != (in_features,) for handle in weights):
        shapes = ", ".join(f"{handle.name} {list(handle.shape)}" for handle in weights)
        raise WeightsError(f"{shapes}: the model's configuration needs {out_features} rows of {in_features} together")
