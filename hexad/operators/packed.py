"""`packed_linear(x [T, in], prepared) -> [T, out]`: x W^T + b with weights that stay as packed as the file has them.

`prepare(args, (rows, bias [out] | None))` takes `StoredRows`, one below the other, and packs them once; the reference keeps them and
dequantises at every call. The result has `out_dtype`. Sums are taken in float32 at least, and a provider may use weights that are more
exact than `dtype` holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from hexad.operators.registry import Kernel, registry

INT8_ROWS = "int8_rows"  # stored rows: a float16 scale, then one signed byte a number


class StoredRows(Protocol):
    """Rows of a weight matrix as a checkpoint has them (a `WeightHandle` is one)."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def format(self) -> str:
        """ "q4_0", "q4_1", "q8_0", "bfloat16", ..."""
        ...

    def raw(self) -> tuple[torch.Tensor, str]:
        """[rows, bytes a row] uint8 of a block format, or plain numbers [rows, in]; and the format."""
        ...

    def load(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor: ...


def formats_of(rows: Sequence[StoredRows]) -> str:
    """`PackedLinearArgs.format` of parts one below the other."""
    return "+".join(part.format for i, part in enumerate(rows) if i == 0 or part.format != rows[i - 1].format)


PackedParams = tuple[Sequence[StoredRows], torch.Tensor | None]


@dataclass(frozen=True)
class PackedLinearArgs:
    """`packed_linear`: x W^T + b, W [out_features, in_features] in `format`."""

    in_features: int
    out_features: int
    bias: bool
    format: str  # of all rows; "a+b+...": of parts one below the other, equal neighbours named once
    dtype: torch.dtype  # of x
    out_dtype: torch.dtype
    device_type: str


def packed_linear_reference(args: PackedLinearArgs) -> Kernel:
    def packed_linear(x: torch.Tensor, prepared: PackedParams) -> torch.Tensor:
        rows, bias = prepared
        weight = torch.cat([part.load(x.dtype, x.device) for part in rows])
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype)).to(args.out_dtype)

    return packed_linear


registry.define("packed_linear", packed_linear_reference)
