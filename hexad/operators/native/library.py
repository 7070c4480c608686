"""The native library through ctypes: load it once, choose an instruction set, pack weights, multiply.

HEXAD_NATIVE_ISA: portable | avx2 | avx512 | avx512bf16 | amx | neon forces an instruction set, all compiles every one and takes the best
(tests), off disables the library, empty compiles and takes the best alone. HEXAD_NATIVE_LIBRARY: a library built elsewhere (with
sanitizers, or for another machine).

ctypes gives up the interpreter's lock during a call. The library serialises calls itself.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import time
from collections.abc import Sequence
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from hexad.common.errors import ConfigError, WeightsError
from hexad.operators.native.build import ALL, BuildError, cached_library
from hexad.operators.packed import INT8_ROWS

log = logging.getLogger(__name__)

VERSION = 7
SOURCES = {  # formats of rows that can be packed, as pack.h numbers them
    "q4_0": 0, "q4_1": 1, "q8_0": 2, "bfloat16": 3, "float32": 4, "q5_0": 5, "q5_1": 6, "q4_k": 7, "q5_k": 8, "q6_k": 9, "q3_k": 10,
    INT8_ROWS: 11,
}  # fmt: skip
BLOCKS = {name: 256 if name.endswith("_k") else 32 for name in SOURCES if name.startswith("q")}  # columns of a block
MOST_RANKED = 64  # weight.h: kMostRanked
MAX_PARTS = 8  # of a weight whose rows are in several formats (runtime.cpp)
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
PAGE_DTYPES = {**DTYPES, torch.int8: 2}  # of keys and values
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
STORE, GATED, ACT = 0, 2, 3  # what becomes of a product (weight.h)

_STATUS = {
    1: "no memory for a step's intermediate values",
    2: "a token id is outside the vocabulary",
    3: "a position is beyond the longest sequence",
    4: "a KV slot is outside the pages",
    5: "a block table names a page that does not exist",
    6: "rows, queries and lengths do not fit together",
}


class Library:
    """The loaded library: its functions, typed."""

    def __init__(self, path: Path, isa: str) -> None:
        """Raises OSError (cannot be loaded) or ConfigError (this machine has no such instruction set)."""
        self.handle = ctypes.CDLL(str(path))
        _declare(self.handle)
        found = self.handle.hx_version()
        if found != VERSION:
            raise OSError(f"{path} has version {found}, not {VERSION}")
        chosen = self.handle.hx_choose(isa.encode())
        if chosen is None:
            raise ConfigError(f"HEXAD_NATIVE_ISA is {isa!r}; this machine has {', '.join(self.available())}, or off")
        self.isa: str = chosen.decode()

    def available(self) -> list[str]:
        """Names of the instruction sets that this machine can run, best last."""
        out = ctypes.create_string_buffer(256)
        self.handle.hx_available(out, len(out))
        return out.value.decode().split()

    def choose(self, isa: str) -> None:
        """Take another instruction set from now on (for tests)."""
        assert self.handle.hx_choose(isa.encode()) is not None, isa
        self.isa = isa

    def set_threads(self, threads: int) -> None:
        self.handle.hx_set_threads(threads)

    def set_cores(self, cores: Sequence[int]) -> None:
        """Thread i of the pool keeps to core cores[i]; the caller, thread 0, is left alone. None: the system moves them."""
        self.handle.hx_set_cores((c_int32 * len(cores))(*cores), len(cores))


def _declare(handle: ctypes.CDLL) -> None:
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "hx_version": (c_int32, []),
        "hx_choose": (c_char_p, [c_char_p]),
        "hx_available": (None, [c_char_p, c_int32]),
        "hx_set_threads": (None, [c_int32]),
        "hx_set_cores": (None, [c_void_p, c_int32]),
        "hx_weight_new": (c_void_p, [c_int32, c_int64, c_int64]),
        "hx_weight_delete": (None, [c_void_p]),
        "hx_weight_bytes": (c_int64, [c_void_p]),
        "hx_weight_fill": (None, [c_void_p, c_int32, c_int64, c_int64, c_void_p, c_int64]),
        "hx_weight_append": (None, [c_void_p, c_void_p]),
        "hx_row_bytes": (c_int64, [c_int32, c_int64]),
        "hx_weight_bias": (c_int32, [c_void_p, c_void_p]),
        "hx_linear": (c_int32, [c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_int32]),
        "hx_rows": (c_int32, [c_void_p, c_void_p, c_int32, c_void_p, c_int32]),
        "hx_draw": (c_int32, [c_void_p, c_int32]),
        "hx_rank": (c_int32, [c_void_p, c_int32]),
        "hx_stack_forward": (c_int32, [c_void_p, c_void_p, c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(handle, name)
        function.restype, function.argtypes = result, arguments


@functools.cache
def probe() -> tuple[Library | None, str]:
    """(the library, "") or (None, why there is none). Builds it on the first call of the first process.

    Raises:
        ConfigError: HEXAD_NATIVE_ISA names an instruction set that this machine lacks.
    """
    isa = os.environ.get("HEXAD_NATIVE_ISA", "")
    if isa == "off":
        return None, "HEXAD_NATIVE_ISA is off"
    given = os.environ.get("HEXAD_NATIVE_LIBRARY")
    started = time.perf_counter()
    try:
        library = Library(Path(given), isa) if given else _built(isa)
    except (BuildError, OSError) as error:
        log.warning("no native operators, torch serves instead: %s", error)
        return None, f"no native library: {str(error).splitlines()[0]}"
    log.info("native operators: %s, ready after %.1f s", library.isa, time.perf_counter() - started)
    return library, ""


def _built(isa: str) -> Library:
    if isa:
        return Library(cached_library(isa), "" if isa == ALL else isa)
    try:
        return Library(cached_library(), "")
    except ConfigError:  # the processor has it, but the system does not let this process use it
        return Library(cached_library(ALL), "")


def require() -> Library:
    """The library, where `probe` has said that there is one."""
    library, reason = probe()
    assert library is not None, reason
    return library


def check(status: int) -> None:
    """Raises what a status stands for."""
    if status == 1:
        raise MemoryError(_STATUS[1])
    assert status == 0, f"native operators refuse the call: {_STATUS.get(status, status)}"


class PackedWeight:
    """A weight matrix in the library's memory; freed with this object. Rows below it may be in another format (`append`)."""

    def __init__(self, source: str, out_features: int, in_features: int) -> None:
        """Raises WeightsError: rows of `in_features` numbers are not whole blocks of `source`."""
        self.library = require()
        self.source = source
        self.rows_here = out_features
        self.out_features = out_features  # with those of what was appended
        self.in_features = in_features
        self._below: list[PackedWeight] = []
        block = BLOCKS.get(source, 1)
        if in_features % block:
            raise WeightsError(f"rows of {in_features} numbers are not whole blocks of {block} ({source})")
        pointer = self.library.handle.hx_weight_new(SOURCES[source], out_features, in_features)
        if not pointer:
            raise MemoryError(f"no memory for a weight of {out_features} x {in_features} ({source})")
        self.pointer: int = pointer
        self.nbytes: int = self.library.handle.hx_weight_bytes(pointer)

    def __del__(self) -> None:
        pointer = self.__dict__.pop("pointer", None)
        if pointer:
            self.library.handle.hx_weight_delete(pointer)

    def fill(self, first: int, rows: torch.Tensor) -> None:
        """Pack rows [first, first + n) from stored ones [n, bytes a row] (or [n, in_features] of plain numbers).

        Raises:
            WeightsError: the rows do not fit this weight, or are cut short.
        """
        wanted = self.library.handle.hx_row_bytes(SOURCES[self.source], self.in_features)
        found = rows.shape[1] * rows.element_size() if rows.dim() == 2 else 0
        if found != wanted:
            raise WeightsError(
                f"a row of {self.in_features} numbers takes {wanted} bytes as {self.source}, not {found} ({tuple(rows.shape)})"
            )
        if first < 0 or first + rows.shape[0] > self.rows_here:
            raise WeightsError(f"rows {first} to {first + rows.shape[0]} lie outside a weight of {self.rows_here} rows")
        rows = rows.contiguous()
        self.library.handle.hx_weight_fill(self.pointer, SOURCES[self.source], first, rows.shape[0], rows.data_ptr(), found)

    def append(self, below: PackedWeight) -> None:
        """Put the rows of `below` under these; it stays alive with this object."""
        assert below.in_features == self.in_features and len(self.parts) + len(below.parts) <= MAX_PARTS
        self.library.handle.hx_weight_append(self.pointer, below.pointer)
        self._below += below.parts
        self.out_features += below.out_features
        self.nbytes += below.nbytes

    @property
    def parts(self) -> list[PackedWeight]:
        """This one's rows and those below, a part for each format."""
        return [self, *self._below]

    def set_bias(self, bias: torch.Tensor) -> None:
        values = bias.detach().to(torch.float32).contiguous()
        assert values.shape == (self.out_features,)
        for part, own in zip(self.parts, torch.split(values, [part.rows_here for part in self.parts]), strict=True):
            check(self.library.handle.hx_weight_bias(part.pointer, own.data_ptr()))

    def linear(self, x: torch.Tensor, out_dtype: torch.dtype, epilogue: int = STORE, activation: int = 0) -> torch.Tensor:
        """epilogue(x [T, in] W^T + b) -> [T, out] (gated: [T, out / 2])."""
        x = x.contiguous()
        assert x.shape[-1] == self.in_features
        width = self.out_features // 2 if epilogue == GATED else self.out_features
        out = torch.empty(*x.shape[:-1], width, dtype=out_dtype)
        rows = x.numel() // self.in_features
        call = self.library.handle.hx_linear
        check(call(self.pointer, x.data_ptr(), DTYPES[x.dtype], rows, epilogue, activation, out.data_ptr(), DTYPES[out_dtype]))
        return out

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `ids` [T] of the matrix -> [T, in]."""
        assert not self._below, "tables are in one format"
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty(*ids.shape, self.in_features, dtype=dtype)
        check(self.library.handle.hx_rows(self.pointer, ids.data_ptr(), ids.numel(), out.data_ptr(), DTYPES[dtype]))
        return out


class DrawTask(ctypes.Structure):
    """weight.h: DrawTask."""

    _fields_ = [
        ("logits", c_void_p),
        ("stride", c_int64),
        ("vocab", c_int64),
        *((name, c_void_p) for name in ("best", "temperature", "min_weight", "top_k", "top_p", "uniforms", "out")),
    ]


class RankTask(ctypes.Structure):
    """weight.h: RankTask."""

    _fields_ = [
        ("logits", c_void_p),
        ("stride", c_int64),
        ("vocab", c_int64),
        ("best", c_void_p),
        ("token_ids", c_void_p),
        ("top", c_int32),
        *((name, c_void_p) for name in ("ranks", "totals", "top_ids")),
    ]


class LayerDesc(ctypes.Structure):
    """stack.h: LayerDesc."""

    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "attention_out", "gate_up", "down", "input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("attention_out_norm", "down_norm", "cos_sin")),
        ("kv_group", c_int32),
        ("window", c_int32),
    ]  # fmt: skip


class StackDesc(ctypes.Structure):
    """stack.h: StackDesc."""

    _fields_ = [
        *((name, c_int32) for name in (
            "hidden", "heads", "kv_heads", "dim", "rotary", "interleaved", "intermediate", "activation", "gated", "layers", "dtype",
            "kv_dtype",
        )),
        *((name, c_float) for name in ("eps", "scale", "softcap", "embedding_scale")),
        *((name, c_void_p) for name in ("embedding", "final_norm")),
        ("max_len", c_int64),
    ]  # fmt: skip


class GroupCall(ctypes.Structure):
    """stack.h: GroupCall."""

    _fields_ = [("block_table", c_void_p), ("slots", c_void_p), ("table_stride", c_int64)]


class StackCall(ctypes.Structure):
    """stack.h: StackCall."""

    _fields_ = [
        *((name, c_void_p) for name in ("token_ids", "positions", "query_start", "seq_lens", "groups", "keys", "values", "out", "last")),
        ("num_blocks", c_int64),
        *((name, c_int32) for name in ("tokens", "rows", "num_groups", "block_size", "num_last")),
    ]  # fmt: skip
