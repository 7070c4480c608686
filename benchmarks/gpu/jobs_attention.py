"""Attention: decode over pages at many batches and contexts, equal and ragged lengths; prefill beside cuDNN's."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import Job, Made, relative_error
from torch.nn.attention import SDPBackend, sdpa_kernel

from hexad.operators.args import AttentionArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.triton import attention
from hexad.operators.triton.attention import Tiles
from hexad.operators.triton.launch import target

HEADS, KV_HEADS, DIM = 32, 8, 128


def make_batch(
    query_lens: list[int], seq_lens: list[int], block: int, copies: int
) -> tuple[torch.Tensor, list[KVPages], Callable[[], AttentionBatch]]:
    """`copies` sets of pages and one batch that fits them all."""
    rows = len(seq_lens)
    per_row = -(-max(seq_lens) // block)
    counts = [-(-n // block) for n in seq_lens]
    order = torch.randperm(sum(counts), device="cuda").int()
    table = torch.full((rows, per_row), -1, dtype=torch.int32, device="cuda")
    at = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[at : at + count]
        at += count
    pages = [
        KVPages(*(torch.randn(sum(counts), block, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
        for _ in range(copies)
    ]  # fmt: skip
    starts = torch.tensor([0, *query_lens], device="cuda").cumsum(0).int()
    tokens = sum(query_lens)

    def batch() -> AttentionBatch:
        return AttentionBatch(
            starts, torch.tensor(seq_lens, dtype=torch.int32, device="cuda"), table, torch.empty(tokens, dtype=torch.int64, device="cuda"),
            max(query_lens), max(seq_lens), block, rows if max(query_lens) == 1 else 0,
        )  # fmt: skip

    q = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)[:, :HEADS]
    return q, pages, batch


def reference_row(q: torch.Tensor, kv: KVPages, table: torch.Tensor, length: int) -> torch.Tensor:
    """Attention of one row's queries in float32: q [n, Hq, D] -> [n, Hq * D]."""
    blocks = table[: -(-length // kv.k.shape[1])].long()
    k, v = (x[blocks].flatten(0, 1)[:length].float().transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0) for x in (kv.k, kv.v))
    scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * DIM**-0.5
    count = q.shape[0]
    unseen = torch.arange(length, device="cuda")[None] > torch.arange(length - count, length, device="cuda")[:, None]
    return (scores.masked_fill(unseen, float("-inf")).softmax(-1) @ v).transpose(0, 1).flatten(1)


def layout(q: torch.Tensor, kv: KVPages, block: int, copies: bool) -> attention.Layout:
    args = AttentionArgs(HEADS, KV_HEADS, DIM, DIM**-0.5, None, None, block, torch.bfloat16, torch.bfloat16, "cuda")
    return attention.Layout(args, target(), q.stride(0), block, kv.k.stride(), tensor_copies=copies)


def decode_job(batch_size: int, context: int, block: int, ragged: bool, per_sm: int = 4, parts: int = 32) -> Job:
    random.seed(context + batch_size)
    lens = [random.randrange(context // 8, 2 * context - context // 8) if ragged else context for _ in range(batch_size)]

    def make(copies: int) -> Made:
        q, pages, batch = make_batch([1] * batch_size, lens, block, copies)
        made = layout(q, pages[0], block, True)
        made.wanted = -(-per_sm * made.on.multiprocessors // KV_HEADS)
        made.set_combine(parts)
        out = torch.empty(batch_size, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
        step = batch()

        def check() -> float:
            out.fill_(float("nan"))
            made.decode(q, pages[0], batch(), batch_size, out)
            rows = sorted({0, batch_size - 1, lens.index(max(lens)), lens.index(min(lens))})
            expected = [reference_row(q[r : r + 1], pages[0], step.block_table[r], lens[r]) for r in rows]
            return max(relative_error(out, out), relative_error(out[rows], torch.cat(expected)))

        return [lambda kv=kv: made.decode(q, kv, step, batch_size, out) for kv in pages], check

    size = 4.0 * sum(lens) * KV_HEADS * DIM
    name = f"page {block} batch {batch_size} ctx {context} {'ragged' if ragged else 'equal'} {per_sm}/SM parts {parts}"
    labels = {"batch": batch_size, "context": context, "block": block, "ragged": ragged}
    return Job("decode", name, make, bytes_moved=size, buffer_bytes=size, flops=size * 4, labels=labels)


def decode_jobs() -> list[Job]:
    made = []
    for batch_size in (1, 8, 64, 256):
        for context in (512, 2048, 8192):
            made.append(decode_job(batch_size, context, 64, False))
            if context < 8192 or batch_size < 256:
                made.append(decode_job(batch_size, context, 64, True))
    for batch_size, context in ((1, 256), (1, 512), (1, 2048), (8, 256), (8, 2048), (64, 512), (64, 2048), (256, 256)):
        made.append(decode_job(batch_size, context, 16, False))
        for per_sm, parts in ((1, 16), (2, 16), (2, 32), (4, 64), (8, 64)):
            made.append(decode_job(batch_size, context, 64, False, per_sm, parts))
        made.append(decode_job(batch_size, context, 64, True, 8))
    return made


def prefill_job(rows: int, length: int, block: int, kind: str, tiles: Tiles | None) -> Job:
    def make(copies: int) -> Made:
        q, pages, batch = make_batch([length] * rows, [length] * rows, block, 1)
        if kind == "cudnn":
            dense = [torch.randn(rows, heads, length, DIM, device="cuda", dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS)]

            def call() -> torch.Tensor:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return F.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)

            return [call], lambda: 0.0
        made = layout(q, pages[0], block, kind != "pointer")
        if kind != "hopper":
            made.hopper = None
        if tiles is not None:
            attention.prefill_tiles = lambda *_: tiles
            made.prefill_launcher(short=False)
        step = batch()
        out = torch.empty(rows * length, HEADS * DIM, device="cuda", dtype=torch.bfloat16)

        def call() -> None:
            made.prefill(q, pages[0], step, 0, out)

        def check() -> float:
            out.fill_(float("nan"))
            call()
            expected = reference_row(q[-length:][-256:], pages[0], step.block_table[rows - 1], length)
            return max(relative_error(out, out), relative_error(out[-256:], expected))

        return [call], check

    flops = 2.0 * rows * HEADS * length * length * DIM
    shape = f" {tiles.queries}x{tiles.tile} {tiles.warps}w {tiles.stages}st" if tiles else ""
    return Job(
        "prefill", f"{rows}x{length} page {block} {kind}{shape}", make, flops=flops, labels={"rows": rows, "length": length, "kind": kind}
    )


def prefill_jobs() -> list[Job]:
    made = []
    for rows, length in ((1, 512), (32, 512), (8, 2048), (2, 8192), (1, 8192)):
        made.append(prefill_job(rows, length, 64, "cudnn", None))
        made.append(prefill_job(rows, length, 64, "hopper", None))
        for tiles in (Tiles(64, 4, 2, 128), Tiles(64, 4, 3, 64)):
            made.append(prefill_job(rows, length, 64, "tma", tiles))
        made.append(prefill_job(rows, length, 16, "pointer", Tiles(64, 8, 2, 128)))
        made.append(prefill_job(rows, length, 16, "pointer", Tiles(64, 4, 2, 64)))
    return made
