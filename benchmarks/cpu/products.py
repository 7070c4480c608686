"""Times products of packed weights: every format at each shape, all in turn, on one thread; the two kernel tables of docs/cpu.md.

    python benchmarks/cpu/products.py [--json FILE] [--seconds 1.0] [--shape 3072x768 ...] [--rows 1 ...] [--formats q4_1 ...]

Prints a table in Markdown: the best time of each, in microseconds. The formats of a row of the table are called one after the other, so
that none finds its weights in the nearest cache and a busy machine slows all alike. Codes are random; times do not depend on them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hexad.models.formats.stored import FORMATS
from hexad.operators.args import LinearArgs
from hexad.operators.load import load_operators
from hexad.operators.native.library import require
from hexad.operators.packed import INT8_ROWS, PackedLinearArgs
from hexad.operators.registry import registry

ONEDNN = "onednn bf16"  # torch's linear with weights packed once, for comparison
SMOLLM2 = ("960x576", "3072x576", "576x1536")  # out x in
EVERY = (ONEDNN, "bfloat16", INT8_ROWS, "q8_0", "q5_k", "q6_k", "q5_0", "q4_1", "q4_k", "q3_k", "q4_0")
Call = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """Random rows as a checkpoint has them."""

    shape: tuple[int, int]
    format: str

    def raw(self) -> tuple[torch.Tensor, str]:
        out, inner = self.shape
        if self.format == "bfloat16":
            return torch.randn(out, inner).bfloat16(), self.format
        block, size = (inner, inner + 2) if self.format == INT8_ROWS else FORMATS[self.format]
        return torch.randint(0, 256, (out, inner // block * size), dtype=torch.uint8), self.format

    def load(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor:
        raise AssertionError("only packed products are timed")


def product(name: str, out: int, inner: int) -> Call:
    if name == ONEDNN:
        args = LinearArgs(inner, out, False, torch.bfloat16, "cpu")
        bound, params = registry.bind("linear", args, {"linear": "onednn"}), (torch.randn(out, inner).bfloat16(), None)
    else:
        packed = PackedLinearArgs(inner, out, False, name, torch.bfloat16, torch.bfloat16, "cpu")
        bound, params = registry.bind("packed_linear", packed, {"packed_linear": "native"}), ([Rows((out, inner), name)], None)
    prepared = bound.prepare(params)
    return lambda x: bound.call(x, prepared)


def best_us(calls: dict[str, Call], x: torch.Tensor, seconds: float) -> dict[str, float]:
    best = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call(x)
            best[name] = min(best[name], (time.perf_counter() - start) * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=list(SMOLLM2), help="out x in")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 512])
    parser.add_argument("--formats", nargs="+", default=list(EVERY))
    parser.add_argument("--seconds", type=float, default=1.0, help="for each format, shape and number of rows")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    load_operators()
    found = []
    for shape in given.shape:
        out, inner = map(int, shape.split("x"))
        calls = {name: product(name, out, inner) for name in given.formats if inner % FORMATS.get(name, (1, 0))[0] == 0}
        for rows in given.rows:
            best = best_us(calls, torch.randn(rows, inner).bfloat16(), given.seconds)
            found += [{"shape": shape, "rows": rows, "format": name, "us": us} for name, us in best.items()]
    print(f"{require().isa}, 1 thread, best, microseconds\n\n| out x in | rows | " + " | ".join(given.formats) + " |")
    print("|---" * (2 + len(given.formats)) + "|")
    for shape in given.shape:
        for rows in given.rows:
            times = {line["format"]: line["us"] for line in found if line["shape"] == shape and line["rows"] == rows}
            print(f"| {shape} | {rows} | " + " | ".join(f"{times[n]:,.0f}" if n in times else "" for n in given.formats) + " |")
    if given.json is not None:
        given.json.write_text(json.dumps({"isa": require().isa, "seconds": given.seconds, "times": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
