"""Weight handles over mapped bytes. Both kinds are immutable, and slicing shares the mapping.

`PlainHandle`: one number after the other. `PackedHandle`: rows of GGUF blocks. Either may hold its rows in another order than the
network wants (GGUF interleaves Llama's q and k rows per head); `order` [R] then has, for each row, the stored row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hexad.common.errors import WeightsError
from hexad.models.formats.blocks import dequantize, is_packed
from hexad.models.formats.stored import FORMATS, StoredTensor

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip


def check_slice(name: str, shape: tuple[int, ...], dim: int, start: int, stop: int) -> None:
    """Raises WeightsError unless [start:stop] along `dim` lies inside `shape`."""
    if not 0 <= dim < len(shape) or not 0 <= start <= stop <= shape[dim]:
        raise WeightsError(f"tensor {name!r} of shape {list(shape)} has no part [{start}:{stop}] along dimension {dim}")


def stored_handle(name: str, data: torch.Tensor, tensor: StoredTensor, heads: int = 0, added: float = 0.0) -> PlainHandle | PackedHandle:
    """The handle of a mapped tensor. `heads`: undo the interleaving of rotary rows over this many heads (0: none).

    Raises:
        WeightsError: the rows do not divide into heads, or a packed tensor had a constant added.
    """
    order = _deinterleaved(tensor, heads) if heads else None
    if not is_packed(tensor.format):
        return PlainHandle(name, tensor.format, _numbers(data, tensor.format, tensor.shape), order, added)
    if added:
        raise WeightsError(f"tensor {tensor.name!r} is stored as {tensor.format}, but must be plain numbers: convert the model again")
    block, block_bytes = FORMATS[tensor.format]
    shape = tensor.shape or (1,)
    return PackedHandle(name, tensor.format, data.reshape(*shape[:-1], shape[-1] // block * block_bytes), (0, shape[-1]), order)


def _deinterleaved(tensor: StoredTensor, heads: int) -> torch.Tensor:
    """Stored row of each row: within a head, features (0, 1), (2, 3), ... were paired; networks here pair the two halves."""
    rows = tensor.shape[0] if tensor.shape else 0
    if rows % (2 * heads):
        raise WeightsError(f"tensor {tensor.name!r} has {rows} rows, which are not {heads} heads of an even size: the metadata do not fit")
    return torch.arange(rows).reshape(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _numbers(data: torch.Tensor, format_name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes -> a tensor view; a copy only if the file left them unaligned."""
    dtype = TORCH_DTYPES[format_name]
    if data.numel() == 0:
        return torch.empty(shape, dtype=dtype)
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class PlainHandle:
    """A tensor of plain numbers; `added` is a constant that the stored values have on top."""

    name: str
    format: str
    view: torch.Tensor
    order: torch.Tensor | None = None
    added: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.view.shape[:1] if self.order is None else self.order.shape
        return (*rows, *self.view.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.view.dtype

    @property
    def nbytes(self) -> int:
        count = self.view.itemsize
        for size in self.shape:
            count *= size
        return count

    def load(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor:
        view = self.view if self.order is None else self.view[self.order]
        if self.added:
            view = view.to(torch.float32) - self.added
        return view.to(device=device or "cpu", dtype=dtype or self.dtype).contiguous()

    def slice(self, dim: int, start: int, stop: int) -> PlainHandle:
        check_slice(self.name, self.shape, dim, start, stop)
        if dim == 0 and self.order is not None:
            return replace(self, order=self.order[start:stop])
        return replace(self, view=self.view.narrow(dim, start, stop - start))

    def raw(self) -> tuple[torch.Tensor, str]:
        if self.added:
            raise WeightsError(f"tensor {self.name!r} is stored with {self.added} added to it and cannot be used as it is: load() it")
        return self.load(), self.format


@dataclass(frozen=True, slots=True)
class PackedHandle:
    """A tensor of blocks: `rows` [..., bytes a row] uint8, of which the numbers `columns` [start, stop) of each row are meant."""

    name: str
    format: str
    rows: torch.Tensor
    columns: tuple[int, int]
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.rows.shape[:1] if self.order is None else self.order.shape
        leading = (*rows, *self.rows.shape[1:-1]) if self.rows.dim() > 1 else ()
        return (*leading, self.columns[1] - self.columns[0])

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def nbytes(self) -> int:
        first, last = self._block_range()
        count = (last - first) * FORMATS[self.format][1]
        for size in self.shape[:-1]:
            count *= size
        return count

    def load(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor:
        first, _ = self._block_range()
        packed = self._covering_blocks().to(device or "cpu")
        numbers = dequantize(packed, self.format, dtype or self.dtype)
        skip = self.columns[0] - first * FORMATS[self.format][0]
        return numbers[..., skip : skip + self.columns[1] - self.columns[0]].contiguous()

    def slice(self, dim: int, start: int, stop: int) -> PackedHandle:
        check_slice(self.name, self.shape, dim, start, stop)
        if dim == len(self.shape) - 1:
            return replace(self, columns=(self.columns[0] + start, self.columns[0] + stop))
        if dim == 0 and self.order is not None:
            return replace(self, order=self.order[start:stop])
        return replace(self, rows=self.rows.narrow(dim, start, stop - start))

    def raw(self) -> tuple[torch.Tensor, str]:
        block = FORMATS[self.format][0]
        if self.columns[0] % block or self.columns[1] % block:
            start, stop = self.columns
            raise WeightsError(f"tensor {self.name!r}: columns {start}..{stop} cut through blocks of {block} ({self.format})")
        return self._covering_blocks(), self.format

    def _block_range(self) -> tuple[int, int]:
        """First and last + 1 block of a row that `columns` touches."""
        block = FORMATS[self.format][0]
        return self.columns[0] // block, -(-self.columns[1] // block)

    def _covering_blocks(self) -> torch.Tensor:
        first, last = self._block_range()
        block_bytes = FORMATS[self.format][1]
        rows = self.rows[..., first * block_bytes : last * block_bytes]
        return (rows if self.order is None else rows[self.order]).contiguous()
