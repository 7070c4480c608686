"""Products of many rows by a named algorithm of cuBLASLt, for shapes where the one that torch takes is not the fastest.

`library.json` names algorithms by card, shape and rows, as `benchmarks/gpu/library_algorithms.py` found them, all with one version of the
library. Where the library, that version or an entry is missing, torch multiplies. Only algorithms that need no workspace are named, so that
products of several streams share nothing.

Interface: cuBLAS library documentation, "Using the cuBLASLt API".
"""

from __future__ import annotations

import ctypes as c
import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch

BF16, F32, COMPUTE_F32 = 14, 0, 68  # cudaDataType_t, cublasComputeType_t
TRANSPOSE_FIRST = 3  # cublasLtMatmulDescAttributes_t
SPLIT_K, REDUCTION = 2, 3  # cublasLtMatmulAlgoConfigAttributes_t, as the next
ATTRIBUTES = {"tile": (1, c.c_uint32), "stages": (6, c.c_uint32), "cluster": (8, c.c_uint16), "swizzle": (4, c.c_uint32),
              "inner": (7, c.c_uint16), "custom": (5, c.c_uint32)}  # fmt: skip
ALIGNMENT = 16  # bytes, of the tensors
MAX_LAYOUTS = 4096  # kept at a time: steps have many different numbers of rows
Algo = c.Array[c.c_uint64]  # cublasLtMatmulAlgo_t
Layouts = tuple[c.c_void_p, c.c_void_p, c.c_void_p]


class Algorithm(NamedTuple):
    """What tells one algorithm of the library from another; its own enumerations."""

    number: int
    tile: int
    stages: int
    cluster: int
    swizzle: int = 0
    inner: int = 0
    custom: int = 0


class BlasLt:
    """out [R, N] (+)= x [R, K] W [N, K]^T in bfloat16 on one device."""

    def __init__(self, path: str) -> None:
        """Raises: OSError, RuntimeError: the library is not there or refuses."""
        self.lib = c.CDLL(path)
        self.lib.cublasLtGetVersion.restype = c.c_size_t
        self.lib.cublasLtMatmul.argtypes = [*[c.c_void_p] * 14, c.c_size_t, c.c_void_p]
        self.version = int(self.lib.cublasLtGetVersion())
        self.handle, self.operation = c.c_void_p(), c.c_void_p()
        self.call("cublasLtCreate", c.byref(self.handle))
        self.call("cublasLtMatmulDescCreate", c.byref(self.operation), COMPUTE_F32, F32)
        self.call("cublasLtMatmulDescSetAttribute", self.operation, TRANSPOSE_FIRST, c.byref(c.c_int32(1)), c.c_size_t(4))
        self._one, self._factors = c.c_float(1.0), (c.c_float(0.0), c.c_float(1.0))
        self._layouts: dict[tuple[int, int, int], c.c_void_p] = {}

    def call(self, name: str, *args: Any) -> None:
        """Raises RuntimeError with the status."""
        status = getattr(self.lib, name)(*args)
        if status:
            raise RuntimeError(f"{name} returned {status}")

    def algorithm(self, names: Algorithm) -> Algo:
        """Raises RuntimeError: this library has no such algorithm."""
        algo = (c.c_uint64 * 8)()
        types = (COMPUTE_F32, F32, BF16, BF16, BF16, BF16)
        self.call("cublasLtMatmulAlgoInit", self.handle, *types, names.number, c.byref(algo))
        values = [(attribute, kind(getattr(names, name))) for name, (attribute, kind) in ATTRIBUTES.items()]
        for attribute, value in [*values, (SPLIT_K, c.c_int32(1)), (REDUCTION, c.c_uint32(0))]:
            self.call("cublasLtMatmulAlgoConfigSetAttribute", c.byref(algo), attribute, c.byref(value), c.c_size_t(c.sizeof(value)))
        return algo

    def layout(self, inner: int, outer: int, stride: int) -> c.c_void_p:
        """A matrix of `outer` rows of `inner` values that are `stride` apart (a column-major one of `outer` columns, to the library)."""
        key = inner, outer, stride
        made = self._layouts.get(key)
        if made is None:
            made = c.c_void_p()
            sizes = c.c_uint64(inner), c.c_uint64(outer), c.c_int64(stride)
            self.call("cublasLtMatrixLayoutCreate", c.byref(made), BF16, *sizes)
            self._layouts[key] = made
        return made

    def layouts(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Layouts:
        """Of the weight, `x` and `out`."""
        if len(self._layouts) > MAX_LAYOUTS:
            for old in self._layouts.values():
                self.call("cublasLtMatrixLayoutDestroy", old)
            self._layouts.clear()
        rows, inner = x.shape
        features = weight.shape[0]
        return (
            self.layout(inner, features, weight.stride(0)),
            self.layout(inner, rows, x.stride(0)),
            self.layout(features, rows, out.stride(0)),
        )

    def multiply(self, algo: Algo, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, add: bool) -> bool:
        """Multiply on the current stream. False: the algorithm does not serve these tensors, and `out` is as it was."""
        pointers = weight.data_ptr(), x.data_ptr(), out.data_ptr()
        if (pointers[0] | pointers[1] | pointers[2]) % ALIGNMENT:
            return False
        w, rows, result = self.layouts(x, weight, out)
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        status = self.lib.cublasLtMatmul(
            self.handle, self.operation, c.addressof(self._one), pointers[0], w, pointers[1], rows, c.addressof(self._factors[add]),
            pointers[2], result, pointers[2], result, c.addressof(algo), None, 0, stream,
        )  # fmt: skip
        return bool(status == 0)


@cache
def on_device(index: int) -> BlasLt | None:
    """The library that torch has loaded, for one device; None if it cannot be had."""
    try:
        with torch.cuda.device(index):
            torch.mm(*torch.zeros((2, 8, 8), dtype=torch.bfloat16, device="cuda"))  # torch loads it when it is first needed
            loaded = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcublasLt.so" in line)
            path = next(loaded, None)
            return None if path is None else BlasLt(path)
    except (OSError, RuntimeError):
        return None


@cache
def table() -> dict[str, dict[str, Any]]:
    """device name -> {"version": of the library, "products": {"out,in" or "out,in,add": {rows: fields of Algorithm}}}."""
    loaded: dict[str, dict[str, Any]] = json.loads(files("hexad.operators.triton").joinpath("library.json").read_text())
    return loaded


def spans(entries: dict[str, list[int]]) -> list[tuple[range, Algorithm]]:
    """Which algorithm serves how many rows: the one measured at R rows serves (7/8 R, R], the one of the most rows from half of that on."""
    most = max(map(int, entries), default=0)
    found = []
    for rows, fields in entries.items():
        measured = int(rows)
        low, high = (measured // 2, 2**31) if measured == most and measured >= 4096 else (measured * 7 // 8, measured)
        found.append((range(low + 1, high + 1), Algorithm(*fields)))
    return found


Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None]


def chosen(device: str, out_features: int, in_features: int, *, add: bool = False) -> Multiply | None:
    """`multiply(x, weight, residual)` for one shape, by the table; with `add` the product is added to `residual`, else that is None.

    None, then and there, where the table has nothing for these rows or the library refuses.
    """
    card = table().get(device, {"products": {}})
    entries = card["products"].get(f"{out_features},{in_features}" + (",add" if add else ""))
    if not entries:
        return None
    if torch.cuda.is_available():
        on_device(torch.cuda.current_device())  # now, not while a graph is captured
    serving = spans(entries)
    made: dict[tuple[int, Algorithm], Algo | None] = {}

    def make(library: BlasLt | None, names: Algorithm) -> Algo | None:
        if library is None or library.version != card["version"]:
            return None
        try:
            return library.algorithm(names)
        except RuntimeError:
            return None

    def multiply(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
        names = next((names for rows, names in serving if x.shape[0] in rows), None)
        if names is None or not x.is_cuda or x.stride(1) != 1:
            return None
        library, key = on_device(x.device.index), (x.device.index, names)
        if key not in made:
            made[key] = make(library, names)
        algo = made[key]
        if library is None or algo is None:
            return None
        out = torch.empty((x.shape[0], out_features), dtype=x.dtype, device=x.device) if residual is None else residual
        if library.multiply(algo, x, weight, out, add=add):
            return out
        return None

    return multiply
