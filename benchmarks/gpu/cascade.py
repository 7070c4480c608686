"""Decode over a shared prefix on the card: variants of the shared kernel, each part of a step alone, and the plain decode beside them.

Usage: cascade.py --out DIR [--rows 256] [--shared 2048] [--tail 160]. First everything is compiled in parallel processes, then each variant
is checked against float32, then timed as replays of one graph over several layers' pages. A last section times prefill of 128 new tokens
over the same prefix, by the general and by the warp-specialised kernel. Prints a table; DIR/cascade.json has everything. About a minute.

What is expected for 256 rows of a Llama-3.1-8B over 2,048 shared keys (see operators/triton/cascade.py): shared kernel 13 us at best, 20 to
30 to be hoped for; keys after the prefix 168 MB, 40 us; merge next to nothing, since a row's only item does it. So 70 us a layer, against
200 to 350 us of a decode that reads the prefix 256 times from the L2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import calibrate, graph_us, relative_error

from hexad.operators.args import AttentionArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.triton import ahead
from hexad.operators.triton.attention import Layout
from hexad.operators.triton.launch import Target, target
from hexad.operators.triton.shared_prefix import SharedTiles

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
COPIES = 4  # layers whose pages are used in turn: 200 MB each
VARIANTS: dict[str, tuple[SharedTiles, bool]] = {  # tiles, bulk tensor copies
    "64 pairs, pointers, 2 stages": (SharedTiles(64, 4, 2, 2), False),
    "64 pairs, pointers, 3 stages": (SharedTiles(64, 4, 3, 2), False),
    "64 pairs, 3 stages": (SharedTiles(64, 4, 3, 2), True),
    "64 pairs, 4 stages": (SharedTiles(64, 4, 4, 2), True),
    "64 pairs, 4 stages, half the parts": (SharedTiles(64, 4, 4, 1), True),
    "128 pairs, pointers, 3 stages": (SharedTiles(128, 8, 3, 1), False),
    "128 pairs, 3 stages": (SharedTiles(128, 8, 3, 1), True),
    "128 pairs, 4 stages": (SharedTiles(128, 8, 4, 1), True),
    "128 pairs, 3 stages, twice the parts": (SharedTiles(128, 8, 3, 2), True),
    "256 pairs, 3 stages": (SharedTiles(256, 8, 3, 1), True),
}


class Problem:
    """Rows that share a prefix; pages of COPIES layers. On "meta" only shapes exist."""

    def __init__(self, rows: int, shared: int, tail: int, device: str) -> None:
        self.rows, self.shared, self.device = rows, shared, device
        own = -(-(tail + PAGE) // PAGE)
        prefix = shared // PAGE
        self.lengths = [shared + 1 + (tail - PAGE // 2 + (i * 37) % PAGE) for i in range(rows)]
        blocks = prefix + rows * own
        table = torch.cat([torch.arange(prefix).repeat(rows, 1), prefix + torch.arange(rows * own).view(rows, own)], 1).int()
        shuffled = torch.randperm(blocks).int()
        self.table = shuffled[table.long()].to(device)
        made = COPIES if device == "cuda" else 1
        self.pages = [KVPages(*(self._random(blocks, PAGE, KV_HEADS, DIM) for _ in range(2))) for _ in range(made)]
        self.q = self._random(rows, HEADS + 2 * KV_HEADS, DIM)[:, :HEADS]
        self.out = torch.empty(rows, HEADS * DIM, dtype=torch.bfloat16, device=device)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        self.slots = torch.zeros(rows, dtype=torch.int64, device=device)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def batch(self, *, cascade: bool) -> AttentionBatch:
        shared_len = torch.tensor([self.shared], dtype=torch.int32, device=self.device) if cascade else None
        longest = max(self.lengths)
        return AttentionBatch(self.starts, self.seq_lens, self.table, self.slots, 1, longest, PAGE, self.rows, shared_len=shared_len)

    def layout(self, tiles: SharedTiles | None = None, *, copies: bool = True) -> Layout:
        args = AttentionArgs(HEADS, KV_HEADS, DIM, DIM**-0.5, None, None, PAGE, torch.bfloat16, torch.bfloat16, "cuda")
        made = Layout(args, target(), self.q.stride(0), PAGE, self.pages[0].k.stride(), tensor_copies=copies)
        made.prefix.forced = tiles
        return made

    def error(self) -> float:
        """Of the output of the first layer's pages, for a few rows, against float32."""
        rows = sorted({0, 1, self.rows // 2, self.rows - 1})
        expected = []
        for row in rows:
            length = self.lengths[row]
            blocks = self.table[row, : -(-length // PAGE)].long()
            k, v = (x[blocks].flatten(0, 1)[:length].float().transpose(0, 1) for x in (self.pages[0].k, self.pages[0].v))
            q = self.q[row].float().view(KV_HEADS, HEADS // KV_HEADS, DIM)
            expected.append(((q @ k.transpose(1, 2) * DIM**-0.5).softmax(-1) @ v).flatten())
        return max(relative_error(self.out[rows], torch.stack(expected)), 0.0 if bool(torch.isfinite(self.out).all()) else float("inf"))


def decode_calls(problem: Problem, layout: Layout, *, cascade: bool) -> list[Callable[[], None]]:
    """One decode a layer; the plan is made once, by the first."""
    batch = problem.batch(cascade=cascade)
    return [lambda kv=kv: layout.decode(problem.q, kv, batch, problem.rows, problem.out) for kv in problem.pages]


def prefill_problem(device: str, rows: int, new: int, shared: int) -> tuple[torch.Tensor, AttentionBatch, torch.Tensor, KVPages, Layout]:
    """`rows` prompts of `new` tokens behind a shared prefix."""
    base = Problem(rows, shared, new, device)
    q = base._random(rows * new, HEADS + 2 * KV_HEADS, DIM)[:, :HEADS]
    lengths = torch.full((rows,), shared + new, dtype=torch.int32, device=device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * new
    slots = torch.zeros(rows * new, dtype=torch.int64, device=device)
    batch = AttentionBatch(starts, lengths, base.table, slots, new, shared + new, PAGE, 0)
    out = torch.empty(rows * new, HEADS * DIM, dtype=torch.bfloat16, device=device)
    return q, batch, out, base.pages[0], base.layout()


def prefill_calls(device: str, rows: int, new: int, shared: int) -> dict[str, Callable[[], None]]:
    q, batch, out, pages, layout = prefill_problem(device, rows, new, shared)

    def general() -> None:
        layout.prefill(q, pages, batch, 0, out)

    def specialised() -> None:
        assert layout.hopper is not None
        k_desc, v_desc = layout._flat_descriptors(pages)
        grid, abreast = layout.prompt_grid(batch, 128, rows)
        layout.hopper(
            grid, q, k_desc, v_desc, batch.block_table, batch.query_start, batch.seq_lens, out, batch.block_table.stride(0), 0, abreast,
        )  # fmt: skip

    return {"general": general, "warp-specialised": specialised}


def compile_shard(options: argparse.Namespace, shard: int, shards: int, on: Target) -> int:
    """This worker's share of what will be launched; nothing touches the card."""
    with ahead.gathering(on) as jobs:
        problem = Problem(options.rows, options.shared, options.tail, "meta")
        for tiles, copies in VARIANTS.values():
            for call in decode_calls(problem, problem.layout(tiles, copies=copies), cascade=True):
                call()
        for call in decode_calls(problem, problem.layout(), cascade=False):
            call()
        for call in prefill_calls("meta", 64, 128, options.shared).values():
            call()
    mine = list(jobs.values())[shard::shards]
    ahead.compile_jobs(mine, on.capability, lambda _index, _done: None)
    return len(mine)


def compile_all(arguments: list[str], shards: int) -> float:
    begin = time.time()
    workers = [subprocess.Popen([sys.executable, __file__, *arguments, "--compile", f"{i}/{shards}"]) for i in range(shards)]
    for worker in workers:
        worker.wait(timeout=60)
    return time.time() - begin


def parts(problem: Problem, layout: Layout) -> dict[str, float]:
    """Microseconds of each kernel of one cascade step, alone."""
    batch, out = problem.batch(cascade=True), problem.out
    (items, starts, partial, stats, capacity), _ = layout.split(batch, problem.rows)
    splits, shared_partial, shared_stats = layout.prefix.attend(problem.q, problem.pages[0], batch, problem.rows, serial=True)
    decode, (programs, merge) = layout.decode_launcher(shared=True), layout.combine_launcher(problem.rows, shared=True)

    def shared(kv: KVPages) -> None:
        layout.prefix.attend(problem.q, kv, batch, problem.rows, serial=False)

    def tail(kv: KVPages) -> None:
        decode(
            (KV_HEADS, capacity, 1), problem.q, kv.k, kv.v, batch.block_table, items, partial, stats, shared_partial, shared_stats, out,
            batch.block_table.stride(0), problem.rows, splits,
        )  # fmt: skip

    def plan() -> None:
        batch.scratch.clear()
        layout.split(batch, problem.rows)

    def combine() -> None:
        merge((problem.rows, programs, 1), partial, stats, starts, shared_partial, shared_stats, out, problem.rows, splits)

    found = {name: graph_us([lambda kv=kv, f=f: f(kv) for kv in problem.pages]) for name, f in (("shared", shared), ("tail", tail))}
    return found | {"merge": graph_us([combine]), "plan": graph_us([plan]), "splits": float(splits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--shared", type=int, default=2048)
    parser.add_argument("--tail", type=int, default=160)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        shard, shards = map(int, options.compile.split("/"))
        compile_shard(options, shard, shards, Target(90, 132, "NVIDIA H200"))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"compile_s": compile_all(sys.argv[1:], min(12, os.cpu_count() or 1)), "rows": []}
    torch.manual_seed(int(time.time()))
    problem = Problem(options.rows, options.shared, options.tail, "cuda")
    result |= {"device": torch.cuda.get_device_name(), "calibration": calibrate(), "shape": [options.rows, options.shared, options.tail]}
    print(result, flush=True)

    def keep(name: str, us: float, **more: Any) -> None:
        result["rows"].append({"name": name, "us": us, **more})
        (options.out / "cascade.json").write_text(json.dumps(result, indent=1))
        print(f"{name:42} {us:8.1f} us  " + "  ".join(f"{k} {v:.3g}" for k, v in more.items()), flush=True)

    for name, tiles, copies in (("plain decode", None, True), *((name, *variant) for name, variant in VARIANTS.items())):
        cascade = tiles is not None
        layout = problem.layout(tiles, copies=copies)
        calls = decode_calls(problem, layout, cascade=cascade)
        problem.out.fill_(float("nan"))
        try:
            calls[0]()
            torch.cuda.synchronize()
            error = problem.error()
            if error > 1e-2:
                print("WRONG", name, error, flush=True)
                continue
            keep(name, graph_us(calls), error=error, **(parts(problem, layout) if cascade else {}))
        except Exception as failure:
            print("FAILED", name, type(failure).__name__, str(failure)[:200], flush=True)
            if "CUDA error" in str(failure):
                raise
    del problem
    flops = 4.0 * 64 * 128 * (options.shared + 64) * HEADS * DIM
    for name, call in prefill_calls("cuda", 64, 128, options.shared).items():
        us = graph_us([call], 4)
        keep(f"prefill 64 x 128 over the prefix, {name}", us, tflop_s=flops / us / 1e6)


if __name__ == "__main__":
    main()
