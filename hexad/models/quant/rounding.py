"""Weights rounded to few bits while they are read (`--quantization`): round to nearest, in the block formats that packed products take.

| name | layers | tables (embedding, head) |
|---|---|---|
| int8 | 8 bits, a scale for each row | likewise |
| int4_g32 | 4 bits, a scale for each 32 numbers | 8 bits |
| int4_g32_zp | 4 bits, a scale and a zero point for each 32 numbers | 8 bits |

Rows that are not whole groups of 32 get 8 bits too. Whatever the checkpoint is stored as may be rounded: what is packed already is
unpacked first, and rounded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hexad.common.errors import WeightsError
from hexad.models.formats.blocks import dequantize
from hexad.operators.packed import INT8_ROWS

if TYPE_CHECKING:
    from hexad.models.loader import WeightHandle

GROUP = 32
QUANTIZATIONS = {"int8": INT8_ROWS, "int4_g32": "q4_0", "int4_g32_zp": "q4_1"}  # of ROUNDED -> format of a layer's rows
ROWS_AT_ONCE = 2_048  # bounds the float32 copy
_HALF_MAX = 65_504.0


@dataclass(frozen=True, slots=True)
class RoundedHandle:
    """Rows of a handle, rounded to `format` when they are read. A `StoredRows`, and what plain schemes need of a handle."""

    handle: WeightHandle
    format: str

    @property
    def name(self) -> str:
        return self.handle.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.handle.shape

    def raw(self) -> tuple[torch.Tensor, str]:
        rows = self.shape[0]
        parts = [self._rounded(low, min(low + ROWS_AT_ONCE, rows)) for low in range(0, rows, ROWS_AT_ONCE)]
        return torch.cat(parts), self.format

    def load(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor:
        stored, _ = self.raw()
        return unpack_rows(stored, self.format).to(device=device or "cpu", dtype=dtype or torch.float32)

    def _rounded(self, low: int, high: int) -> torch.Tensor:
        values = self.handle.slice(0, low, high).load(torch.float32)
        if not values.isfinite().all():
            raise WeightsError(
                f"tensor {self.name!r} holds infinities or NaN in rows {low} to {high} and cannot be rounded: fetch it again"
            )
        return round_rows(values, self.format)


def rounded_format(quantization: str, in_features: int, *, is_table: bool) -> str:
    """What a matrix with rows of `in_features` numbers is rounded to."""
    return INT8_ROWS if is_table or in_features % GROUP else QUANTIZATIONS[quantization]


def round_rows(values: torch.Tensor, format_name: str) -> torch.Tensor:
    """[rows, n] float32 -> [rows, bytes a row] uint8."""
    return _ROUND[format_name](values)


def unpack_rows(stored: torch.Tensor, format_name: str) -> torch.Tensor:
    """What rounded rows mean, [rows, n] float32."""
    if format_name != INT8_ROWS:
        return dequantize(stored, format_name)
    scales = stored[:, :2].contiguous().view(torch.float16).to(torch.float32)
    return scales * stored[:, 2:].view(torch.int8).to(torch.float32)


def _scale(wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float16 scale, 1 / scale in float32, 0 where the scale vanishes)."""
    scale = wanted.clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16)
    wide = scale.to(torch.float32)
    return scale, torch.where(wide == 0, 0.0, 1 / wide)


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    """[n, k] -> [n, bytes] uint8."""
    return numbers.contiguous().view(torch.uint8)


def _int8_rows(values: torch.Tensor) -> torch.Tensor:
    scale, inverse = _scale(values.abs().amax(dim=1, keepdim=True) / 127)
    codes = (values * inverse).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((_bytes(scale), _bytes(codes)), dim=1)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes [n, 32] below 16 -> [n, 16]: column k in the low nibble of byte k, column k + 16 in its high one."""
    codes = codes.to(torch.uint8)
    return codes[:, :16] | (codes[:, 16:] << 4)


def _symmetric(values: torch.Tensor) -> torch.Tensor:
    """Codes -8 .. 7, stored with 8 added; the largest number of a group is -8 steps, whatever its sign."""
    groups = values.reshape(-1, GROUP)
    largest = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True))
    scale, inverse = _scale(largest / -8)
    codes = (groups * inverse).round().clamp(-8, 7) + 8
    return torch.cat((_bytes(scale), _nibbles(codes)), dim=1).reshape(values.shape[0], -1)


def _zero_point(values: torch.Tensor) -> torch.Tensor:
    """Codes 0 .. 15 from the smallest number of a group to the largest; what code 0 means is stored beside the scale."""
    groups = values.reshape(-1, GROUP)
    base = groups.amin(dim=1, keepdim=True).clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16)
    start = base.to(torch.float32)
    scale, inverse = _scale((groups.amax(dim=1, keepdim=True) - start) / 15)
    codes = ((groups - start) * inverse).round().clamp(0, 15)
    return torch.cat((_bytes(scale), _bytes(base), _nibbles(codes)), dim=1).reshape(values.shape[0], -1)


_ROUND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {INT8_ROWS: _int8_rows, "q4_0": _symmetric, "q4_1": _zero_point}
