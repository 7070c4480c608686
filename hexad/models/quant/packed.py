"""Weights that stay packed: GGUF's blocks as the file has them, plain ones in bfloat16, through the operator `packed_linear`.

A layer whose rows no provider packs is dequantised to bfloat16 and packed as that; where even this is not to be had (float32 arithmetic
with plain weights) it becomes plain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hexad.models.quant.plain import PlainScheme, stack_rows
from hexad.models.quant.rounding import RoundedHandle, rounded_format
from hexad.models.quant.scheme import EmbeddingMethod, LinearMethod
from hexad.operators.packed import PackedLinearArgs, StoredRows, formats_of
from hexad.operators.registry import registry

if TYPE_CHECKING:
    from hexad.models.loader import WeightHandle

Apply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class BFloat16Rows:
    """A handle's numbers as rows of bfloat16."""

    handle: WeightHandle
    format: str = "bfloat16"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.handle.shape

    def raw(self) -> tuple[torch.Tensor, str]:
        return self.handle.load(torch.bfloat16), self.format

    def load(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor:
        return self.handle.load(torch.bfloat16, device).to(dtype or torch.bfloat16)


class PackedLinear:
    """x W^T + b with packed W. `packed` is the provider's object, for operators that take several layers at once."""

    def __init__(self, args: PackedLinearArgs, packed: Any, nbytes: int, prefer: Mapping[str, str] | None) -> None:
        self.in_features = args.in_features
        self.out_features = args.out_features
        self.nbytes = nbytes
        self.packed = packed
        call = registry.bind("packed_linear", args, prefer).call
        exact = registry.bind("packed_linear", _with_float32(args), prefer).call
        self.apply: Apply = lambda x: call(x, packed)
        self.apply_float32: Apply = lambda x: exact(x, packed)  # not rounded to the compute dtype

    def gated(self, activation: str) -> Apply | None:
        """None: the whole stack is one operator instead."""
        return None

    def adding(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """None: the whole stack is one operator instead."""
        return None


class PackedEmbedding:
    """Rows of a packed table."""

    def __init__(self, packed: Any, dtype: torch.dtype, nbytes: int) -> None:
        self.packed = packed
        self.nbytes = nbytes
        self.apply: Apply = lambda token_ids: packed.rows(token_ids, dtype)


class PackedScheme:
    """One per network: it remembers tables, so that a tied head shares the embedding's memory."""

    name = "packed"

    def __init__(self, prefer: Mapping[str, str] | None = None, quantization: str | None = None, tables: Collection[str] = ()) -> None:
        """Args:
        quantization: round weights to this while they are read (rounding.py).
        tables: names of the embedding and the output head.
        """
        self._prefer = prefer
        self._quantization = quantization
        self._table_names = frozenset(tables)
        self._plain = PlainScheme(prefer)
        self._tables: dict[str, tuple[PackedLinearArgs, Any]] = {}

    def linear(
        self,
        weights: Sequence[WeightHandle],
        biases: Sequence[WeightHandle] | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LinearMethod:
        table = self._tables.get(weights[0].name) if len(weights) == 1 and not biases else None
        if table is not None:
            return PackedLinear(*table, nbytes=0, prefer=self._prefer)
        weights = self._rounded(weights)
        made = self._pack(weights, biases, dtype, device)
        if made is None:
            return self._plain.linear(weights, biases, dtype=dtype, device=device)
        return PackedLinear(*made, nbytes=made[1].nbytes, prefer=self._prefer)

    def embedding(self, weight: WeightHandle, *, dtype: torch.dtype, device: torch.device) -> EmbeddingMethod:
        (weight,) = self._rounded([weight])
        made = self._pack([weight], None, dtype, device)
        if made is None:
            return self._plain.embedding(weight, dtype=dtype, device=device)
        self._tables[weight.name] = made
        return PackedEmbedding(made[1], dtype, made[1].nbytes)

    def _rounded(self, weights: Sequence[WeightHandle]) -> Sequence[Any]:
        """The handles, to be rounded when they are read if that was asked for."""
        if self._quantization is None:
            return weights
        formats = [rounded_format(self._quantization, w.shape[1], is_table=w.name in self._table_names) for w in weights]
        return [RoundedHandle(weight, name) for weight, name in zip(weights, formats, strict=True)]

    def _pack(
        self, weights: Sequence[WeightHandle], biases: Sequence[WeightHandle] | None, dtype: torch.dtype, device: torch.device
    ) -> tuple[PackedLinearArgs, Any] | None:
        """(args, packed rows); None: no provider packs them."""
        candidates: list[Sequence[StoredRows]] = [weights, [BFloat16Rows(weight) for weight in weights]]
        for rows in candidates:
            out_features, in_features = sum(row.shape[0] for row in rows), rows[0].shape[1]
            args = PackedLinearArgs(in_features, out_features, bool(biases), formats_of(rows), dtype, dtype, device.type)
            if can_pack(args, self._prefer):
                bias = stack_rows(biases, torch.float32, device) if biases else None
                return args, registry.bind("packed_linear", args, self._prefer).prepare((rows, bias))
        return None


def can_pack(args: PackedLinearArgs, prefer: Mapping[str, str] | None) -> bool:
    """Whether a provider other than the reference packs such weights."""
    return any(candidate.chosen and candidate.provider != "torch" for candidate in registry.explain("packed_linear", args, prefer))


def packs_here(dtype: torch.dtype, device: torch.device, prefer: Mapping[str, str] | None) -> bool:
    """Whether this machine packs 4-bit weights at all."""
    return can_pack(PackedLinearArgs(32, 16, False, "q4_0", dtype, dtype, device.type), prefer)


def _with_float32(args: PackedLinearArgs) -> PackedLinearArgs:
    return PackedLinearArgs(args.in_features, args.out_features, args.bias, args.format, args.dtype, torch.float32, args.device_type)
