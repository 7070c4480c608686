"""Finds cuBLASLt's fastest algorithms for the products of Llama-3.1-8B on a card that is at its power limit, as under load.

    python benchmarks/gpu/library_algorithms.py FILE [--rows 8192 512 256] [--table hexad/operators/triton/library.json]

Candidates are what the library's heuristic offers, and those with other clusters and orders of tiles. Each is checked against float32; all
run in turn, whole CUDA graphs over weights that no cache holds, beside what torch takes; the best go on to longer turns. FILE gets one JSON
object; the screen a line a product. `--table` writes the table of this card: algorithms that took at least 1.5 % less time than torch's.
"""

from __future__ import annotations

import argparse
import ctypes as c
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hexad.bench.results import tree_hash
from hexad.operators.triton.blaslt import ATTRIBUTES, Algo, Algorithm, BlasLt, Layouts, on_device

SHAPES = {"gate_up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096), "o": (4096, 4096), "head": (128256, 4096)}  # out, in
ADDED = ("down", "o")  # to the residual, in place
MAX_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t
CLUSTERS = range(2, 13)  # cublasLtClusterShape_t: 1x1 to 1x8
READ_BYTES_S, BF16_FLOPS_S = 4.48e12, 684e12  # sustained
TURN_S = 0.02
WORTH = 0.985
Call = Callable[[int], Any]


class Found(c.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [("algo", c.c_uint64 * 8), ("workspace", c.c_size_t), ("state", c.c_int), ("waves", c.c_float), ("reserved", c.c_int * 4)]


def names_of(library: BlasLt, algo: Algo) -> tuple[Algorithm, int]:
    """What tells `algo` from others, and into how many parts it splits the inner dimension."""

    def read(attribute: int, kind: Any) -> int:
        value, size = kind(0), c.c_size_t(0)
        library.call(
            "cublasLtMatmulAlgoConfigGetAttribute", c.byref(algo), attribute, c.byref(value), c.c_size_t(c.sizeof(value)), c.byref(size)
        )
        return int(value.value)

    return Algorithm(read(0, c.c_int32), **{name: read(*entry) for name, entry in ATTRIBUTES.items()}), read(2, c.c_int32)


def offered(library: BlasLt, layouts: Layouts) -> list[Algorithm]:
    """What the heuristic offers without a workspace and without a split inner dimension, best first."""
    preference, found, count = c.c_void_p(), (Found * 100)(), c.c_int(0)
    w, x, out = layouts
    library.call("cublasLtMatmulPreferenceCreate", c.byref(preference))
    library.call("cublasLtMatmulPreferenceSetAttribute", preference, MAX_WORKSPACE, c.byref(c.c_uint64(0)), c.c_size_t(8))
    library.call(
        "cublasLtMatmulAlgoGetHeuristic", library.handle, library.operation, w, x, out, out, preference, 100, found, c.byref(count)
    )
    named = [names_of(library, entry.algo) for entry in found[: count.value] if entry.state == 0]
    return [names for names, parts in named if parts <= 1]


def serves(library: BlasLt, names: Algorithm, layouts: Layouts) -> bool:
    w, x, out = layouts
    result = Found()
    try:
        algo = library.algorithm(names)
        library.call("cublasLtMatmulAlgoCheck", library.handle, library.operation, w, x, out, out, c.byref(algo), c.byref(result))
    except RuntimeError:
        return False
    return result.state == 0 and result.workspace == 0


def candidates(library: BlasLt, layouts: Layouts, most: int) -> list[Algorithm]:
    """What is offered, then its variations."""
    first = offered(library, layouts)
    found = dict.fromkeys(first)
    for names in first:
        for swizzle in (0, 1):
            for cluster in CLUSTERS:
                other = names._replace(cluster=cluster, swizzle=swizzle)
                if other not in found and len(found) < most and serves(library, other, layouts):
                    found[other] = None
    return list(found)


def captured(call: Call, calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index)
    return graph


def in_turn(graphs: dict[Any, torch.cuda.CUDAGraph], calls: int, turns: int, replays: int) -> dict[Any, float]:
    """Median microseconds a call; each turn replays every graph, forwards and backwards by turns, so that what ran before differs."""
    times: dict[Any, list[float]] = {key: [] for key in graphs}
    for turn in range(turns):
        for key in list(graphs)[:: 1 - 2 * (turn % 2)]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graphs[key].replay()
            begin.record()
            for _ in range(replays):
                graphs[key].replay()
            end.record()
            torch.cuda.synchronize()
            times[key].append(begin.elapsed_time(end) * 1e3 / calls / replays)
    return {key: statistics.median(sample) for key, sample in times.items()}


def measure(library: BlasLt, name: str, rows: int, most: int) -> dict[str, Any]:
    out_features, inner = SHAPES[name]
    add, copies = name in ADDED, max(1, int(400e6 / (out_features * inner * 2)))
    weights = [torch.randn(out_features, inner, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    added = torch.randn(rows, out_features, device="cuda", dtype=torch.bfloat16)
    out = added.clone()
    expected = (added.float() if add else 0) + x.float() @ weights[0].float().t()
    layouts = library.layouts(x, weights[0], out)
    floor_us = max(out_features * inner * 2 / READ_BYTES_S, 2 * rows * out_features * inner / BF16_FLOPS_S) * 1e6
    calls = max(4, copies, int(TURN_S * 1e6 / floor_us))

    def by_torch(index: int) -> Any:
        w = weights[index % copies].t()
        return out.addmm_(x, w) if add else torch.mm(x, w, out=out)

    def by_library(algo: Algo) -> Call:
        return lambda index: library.multiply(algo, x, weights[index % copies], out, add=add)

    graphs, wrong = {"torch": captured(by_torch, calls)}, []
    for names in candidates(library, layouts, most):
        call = by_library(library.algorithm(names))
        out.copy_(added)
        served = call(0)
        error = float((out.float() - expected).norm() / expected.norm())
        if not served or not error < 0.005:
            wrong.append((names, error))
            continue
        graphs[names] = captured(call, calls)
    del expected
    quick = in_turn(graphs, calls, 2, 1)
    kept = ["torch", *sorted((key for key in graphs if key != "torch"), key=lambda key: quick[key])[:5]]
    long = in_turn({key: graphs[key] for key in kept}, calls, 6, 2)
    return {
        "product": name,
        "rows": rows,
        "floor_us": floor_us,
        "torch_us": long.pop("torch"),
        "algorithms": [{**names._asdict(), "us": us} for names, us in sorted(long.items(), key=lambda entry: entry[1])],
        "tried": len(graphs) - 1,
        "wrong": [(names._asdict(), error) for names, error in wrong],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 512, 256])
    parser.add_argument("--most", type=int, default=20, help="candidates a product")
    parser.add_argument("--table", type=Path, help="the table of algorithms to write this card's part of")
    options = parser.parse_args()
    library = on_device(torch.cuda.current_device())
    if library is None:
        print("torch has no cuBLASLt here", file=sys.stderr)
        return 1
    result: dict[str, Any] = {
        "kind": "library_algorithms",
        "tree": tree_hash(),
        "device": {"name": torch.cuda.get_device_name()},
        "command": " ".join(["python3", "benchmarks/gpu/library_algorithms.py", *(Path(part).name for part in sys.argv[1:])]),
        "versions": {"torch": torch.__version__, "cublasLt": library.version},
        "products": [],
    }
    products: dict[str, dict[str, list[int]]] = {}
    for name, (out_features, inner) in SHAPES.items():
        for rows in options.rows:
            if name == "head" and rows > 512:
                continue  # only rows that sample have logits
            row = measure(library, name, rows, options.most)
            torch.cuda.empty_cache()
            result["products"].append(row)
            options.file.write_text(json.dumps(result))
            best = dict(row["algorithms"][0])
            share = best.pop("us") / row["torch_us"]
            line = (
                f"{name:8} {rows:4} rows, us: floor {row['floor_us']:.1f}, torch {row['torch_us']:.1f}; best of {row['tried']}: {share:.3f}"
            )
            print(line, *best.values(), f"({len(row['wrong'])} wrong)" if row["wrong"] else "", flush=True)
            if share < WORTH:
                key = f"{out_features},{inner}" + (",add" if name in ADDED else "")
                products.setdefault(key, {})[str(rows)] = list(best.values())
    if options.table:
        whole = json.loads(options.table.read_text())
        whole[result["device"]["name"]] = {"version": library.version, "products": products}
        options.table.write_text(json.dumps(whole, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
