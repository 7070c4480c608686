"""The native library with every instruction set, for tests: built once, then taken from the cache."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch

from hexad.models.formats.blocks import dequantize
from hexad.models.formats.stored import FORMATS
from hexad.operators.native import library
from hexad.operators.native.build import ALL, BuildError, cached_library


@functools.cache
def full_library():
    given = os.environ.get("HEXAD_NATIVE_LIBRARY")
    try:
        return library.Library(Path(given) if given else cached_library(ALL), "")
    except BuildError as error:
        return str(error)


@functools.cache
def isas() -> list[str]:
    found = full_library()
    return ["none"] if isinstance(found, str) else found.available()


def use(monkeypatch, isa: str, threads: int = 2):
    """Everything native runs in this instruction set until the test ends."""
    found = full_library()
    if isinstance(found, str):
        pytest.skip(f"no native library: {found}")
    monkeypatch.setattr(library, "probe", lambda: (found, ""))
    found.choose(isa)
    found.set_threads(threads)
    return found


_HALVES = {  # format -> bytes at which a block has its float16 numbers
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,),
    "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip


def random_rows(make: torch.Generator, source: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(stored rows with scales of a reasonable size, the numbers they mean in float64)."""
    if source in ("bfloat16", "float32"):
        stored = torch.randn(rows, columns, generator=make).to(getattr(torch, source))
        return stored, stored.to(torch.bfloat16).double()
    if source == "int8_rows":
        stored = torch.randint(0, 256, (rows, 2 + columns), generator=make, dtype=torch.uint8)
        scales = (torch.randn(rows, 1, generator=make) * 0.1).half()
        stored[:, :2] = scales.view(torch.uint8)
        return stored, scales.double() * stored[:, 2:].view(torch.int8).double()
    block, size = FORMATS[source]
    blocks = torch.randint(0, 256, (rows * (columns // block), size), generator=make, dtype=torch.uint8)
    for at in _HALVES[source]:
        blocks[:, at : at + 2] = (torch.randn(blocks.shape[0], 1, generator=make) * 0.1).half().view(torch.uint8)
    stored = blocks.reshape(rows, -1)
    return stored, dequantize(stored, source, torch.float32).double()


def block_of(source: str) -> int:
    """Columns that a block of stored rows has."""
    return FORMATS[source][0] if source in FORMATS else 1
