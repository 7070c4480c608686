"""cuBLASLt's algorithms for the products of Llama-3.1-8B, each inside a CUDA graph over weights that no cache holds.

    python benchmarks/gpu/library_algorithms.py FILE [--rows 64 128 256 ...]

Asks the library's heuristic for all the algorithms that it would consider, checks each against float32 and times it beside what torch
takes. FILE gets one JSON object; the screen a line a product. Needs the CUDA libraries that torch has loaded, no other package.
"""

from __future__ import annotations

import argparse
import ctypes as c
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SHAPES = {"gate_up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096), "o": (4096, 4096), "head": (128256, 4096)}  # out, in
ADDED = ("down", "o")  # to the residual, in place
BF16, F32, COMPUTE_F32 = 14, 0, 68  # cudaDataType_t, cublasComputeType_t
TRANSA, MAX_WORKSPACE = 3, 1  # cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t
ALGO_FIELDS = {"tile": 1, "split_k": 2, "stages": 6, "cluster": 8}  # cublasLtMatmulAlgoConfigAttributes_t
WORKSPACE = 64 << 20
READ_BYTES_S, BF16_FLOPS_S = 4.5e12, 700e12


class Heuristic(c.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [("algo", c.c_uint64 * 8), ("workspace", c.c_size_t), ("state", c.c_int), ("waves", c.c_float), ("reserved", c.c_int * 4)]


def loaded_library() -> c.CDLL:
    torch.mm(*(torch.zeros(8, 8, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
    line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if "libcublasLt.so" in line)
    return c.CDLL(line.split()[-1])


class Library:
    """out [rows, N] (+)= x [rows, K] W [N, K]^T in bfloat16."""

    def __init__(self) -> None:
        self.lib = loaded_library()
        self.handle, self.operation, self.preference = c.c_void_p(), c.c_void_p(), c.c_void_p()
        self.call("cublasLtCreate", c.byref(self.handle))
        self.call("cublasLtMatmulDescCreate", c.byref(self.operation), COMPUTE_F32, F32)
        self.call("cublasLtMatmulDescSetAttribute", self.operation, TRANSA, c.byref(c.c_int32(1)), 4)
        self.call("cublasLtMatmulPreferenceCreate", c.byref(self.preference))
        self.call("cublasLtMatmulPreferenceSetAttribute", self.preference, MAX_WORKSPACE, c.byref(c.c_uint64(WORKSPACE)), 8)
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")

    def call(self, name: str, *args: Any) -> None:
        status = getattr(self.lib, name)(*args)
        if status:
            raise RuntimeError(f"{name} returned {status}")

    def version(self) -> int:
        self.lib.cublasLtGetVersion.restype = c.c_size_t
        return int(self.lib.cublasLtGetVersion())

    def layout(self, rows: int, columns: int) -> c.c_void_p:
        made = c.c_void_p()
        self.call("cublasLtMatrixLayoutCreate", c.byref(made), BF16, c.c_uint64(rows), c.c_uint64(columns), c.c_int64(rows))
        return made

    def algorithms(self, layouts: tuple[c.c_void_p, ...]) -> list[Heuristic]:
        found, count = (Heuristic * 100)(), c.c_int(0)
        w, x, out = layouts
        self.call(
            "cublasLtMatmulAlgoGetHeuristic", self.handle, self.operation, w, x, out, out, self.preference, 100, found, c.byref(count)
        )
        return list(found[: count.value])

    def product(self, algorithm: Heuristic, layouts: tuple[c.c_void_p, ...], w: Any, x: Any, added: Any, out: Any, *, add: bool) -> None:
        one, beta = c.c_float(1.0), c.c_float(1.0 if add else 0.0)
        pointers = [c.c_void_p(tensor.data_ptr()) for tensor in (w, x, added, out, self.workspace)]
        self.call(
            "cublasLtMatmul", self.handle, self.operation, c.byref(one), pointers[0], layouts[0], pointers[1], layouts[1], c.byref(beta),
            pointers[2], layouts[2], pointers[3], layouts[2], c.byref(algorithm.algo), pointers[4], c.c_size_t(WORKSPACE),
            c.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def describe(self, algorithm: Heuristic) -> dict[str, Any]:
        found: dict[str, Any] = {"waves": round(algorithm.waves, 2)}
        for name, field in ALGO_FIELDS.items():
            value, size = c.c_int32(0), c.c_size_t(0)
            self.lib.cublasLtMatmulAlgoConfigGetAttribute(c.byref(algorithm.algo), field, c.byref(value), 4, c.byref(size))
            found[name] = value.value
        return found


def graph_us(call: Callable[[int], Any], calls: int, repeats: int = 5) -> float:
    """Median microseconds a call, `calls` of them in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index)
    for _ in range(repeats + 1):  # the first is not counted
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times[1:])[repeats // 2]


def measure(library: Library, name: str, rows: int) -> dict[str, Any]:
    out_features, inner = SHAPES[name]
    add, copies = name in ADDED, max(1, int(400e6 / (out_features * inner * 2)))
    weights = [torch.randn(out_features, inner, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    added, out = (torch.randn(rows, out_features, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    layouts = library.layout(inner, out_features), library.layout(inner, rows), library.layout(out_features, rows)
    expected = (added.float() if add else 0) + x.float() @ weights[0].float().t()
    calls, residual = max(4, copies), added.clone()

    def by_torch(index: int) -> Any:
        w = weights[index % copies].t()
        return residual.addmm_(x, w) if add else torch.mm(x, w, out=out)

    found = []
    for index, algorithm in enumerate(library.algorithms(layouts)):

        def once(call: int, algorithm: Heuristic = algorithm) -> None:
            library.product(algorithm, layouts, weights[call % copies], x, added, out, add=add)

        once(0)
        torch.cuda.synchronize()
        error = float((out.float() - expected).norm() / expected.norm())
        found.append({"place": index, "us": graph_us(once, calls), "error": error, **library.describe(algorithm)})
    floor_us = max(out_features * inner * 2 / READ_BYTES_S, 2 * rows * out_features * inner / BF16_FLOPS_S) * 1e6
    return {"product": name, "rows": rows, "floor_us": floor_us, "torch_us": graph_us(by_torch, calls), "algorithms": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128, 192, 256, 384, 512])
    options = parser.parse_args()
    library = Library()
    result: dict[str, Any] = {
        "kind": "library_algorithms",
        "device": {"name": torch.cuda.get_device_name()},
        "command": " ".join(sys.argv),
        "versions": {"torch": torch.__version__, "cublasLt": library.version()},
        "products": [],
    }
    for name in SHAPES:
        for rows in options.rows:
            row = measure(library, name, rows)
            torch.cuda.empty_cache()
            result["products"].append(row)
            options.file.write_text(json.dumps(result))
            best = min(row["algorithms"], key=lambda entry: entry["us"])
            print(
                f"{name:8} {rows:4} rows, us: floor {row['floor_us']:.1f}, torch {row['torch_us']:.1f}, best {best['us']:.1f} {best}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
