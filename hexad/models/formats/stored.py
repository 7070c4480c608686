"""Where a tensor lies in a file, and what its numbers are. Shared by the header readers. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hexad.common.errors import WeightsError

MAX_ELEMENTS = 2**48  # more than any tensor that exists; keeps every later product inside 64 bits

# name -> (elements a block, bytes a block)
FORMATS: dict[str, tuple[int, int]] = {
    "float64": (1, 8), "float32": (1, 4), "float16": (1, 2), "bfloat16": (1, 2), "float8_e4m3": (1, 1), "float8_e5m2": (1, 1),
    "int64": (1, 8), "int32": (1, 4), "int16": (1, 2), "int8": (1, 1), "uint8": (1, 1), "bool": (1, 1),
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file. `shape` is row-major, outermost first; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    format: str  # key of FORMATS
    path: Path
    offset: int
    nbytes: int


def packed_nbytes(name: str, shape: tuple[int, ...], format_name: str, path: Path) -> int:
    """Bytes that a tensor of this shape and format takes.

    Raises:
        WeightsError: a negative or absurd dimension, or rows that are not whole blocks.
    """
    block, block_bytes = FORMATS[format_name]
    count = math.prod(shape)
    if any(d < 0 for d in shape) or count > MAX_ELEMENTS or any(d > MAX_ELEMENTS for d in shape):
        raise WeightsError(f"{path}: tensor {name!r} claims shape {list(shape)}, which no file can hold: corrupt, fetch it again")
    row = shape[-1] if shape else 1
    if row % block:
        raise WeightsError(f"{path}: tensor {name!r} has rows of {row} numbers, but {format_name} comes in blocks of {block}: corrupt file")
    return count // block * block_bytes


def check_layout(tensors: Iterable[StoredTensor], path: Path, end: int) -> None:
    """Every tensor inside the file, and no two of them overlapping.

    Raises:
        WeightsError: names the tensor, the bytes it needs and the bytes there are.
    """
    previous: StoredTensor | None = None
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset + tensor.nbytes > end:
            raise WeightsError(
                f"{path}: tensor {tensor.name!r} ends at byte {tensor.offset + tensor.nbytes:,}, but the file has {end:,}: "
                "it is cut short or corrupt, fetch it again"
            )
        if previous is not None and tensor.nbytes and tensor.offset < previous.offset + previous.nbytes:
            raise WeightsError(f"{path}: tensors {previous.name!r} and {tensor.name!r} overlap: the file is corrupt, fetch it again")
        if tensor.nbytes:
            previous = tensor
