"""Causal attention of ragged rows over paged keys and values.

`paged_attention(q [T, Hq, D], kv: KVPages, batch: AttentionBatch) -> [T, Hq * D]`

- Row b's queries are its last `query_start[b + 1] - query_start[b]` positions of `seq_lens[b]`; query i sees keys j <= i, and with a window
  only the last `window` of them, itself included. Keys and values of this step were written before (`rope_kv_write`).
- Query head h reads key head h // (Hq / Hkv). Block table entries of -1 are never read for a visible key.
- A padding row (seq_len 0) gives anything finite or not: its output is not read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hexad.operators.args import AttentionArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.registry import Kernel, registry


def gather(pages: torch.Tensor, blocks: torch.Tensor, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values [Hkv, last - first, D] at positions first .. last - 1 of the row whose table is `blocks`."""
    size = pages.shape[1]
    low, high = first // size, -(-last // size)
    rows = pages[blocks[low:high].long()].flatten(0, 1)  # [(high - low) * size, Hkv, D]
    return rows[first - low * size : last - low * size].transpose(0, 1).to(dtype)


def visible(start: int, queries: int, first: int, last: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which keys first .. last - 1 the queries at start .. start + queries - 1 see: bool [queries, last - first]."""
    query = torch.arange(start, start + queries, device=device).unsqueeze(1)
    key = torch.arange(first, last, device=device).unsqueeze(0)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def attend_row(args: AttentionArgs, q: torch.Tensor, kv: KVPages, blocks: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Attention of one row: q [n, Hq, D] -> [n, Hq, D]."""
    queries = q.shape[0]
    start = seq_len - queries
    first = 0 if args.window is None else max(0, start - args.window + 1)
    k = gather(kv.k, blocks, first, seq_len, args.dtype).unsqueeze(1)  # [Hkv, 1, L, D]
    v = gather(kv.v, blocks, first, seq_len, args.dtype).unsqueeze(1)
    group = args.heads // args.kv_heads
    grouped = q.view(queries, args.kv_heads, group, args.head_dim).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    mask = visible(start, queries, first, seq_len, args.window, q.device)
    if args.softcap is not None:
        scores = (grouped.float() @ k.float().transpose(-1, -2)) * args.scale
        scores = (torch.tanh(scores / args.softcap) * args.softcap).masked_fill_(~mask, float("-inf"))
        out = (scores.softmax(-1) @ v.float()).to(q.dtype)
    else:
        expanded = (args.kv_heads, group, seq_len - first, args.head_dim)
        out = F.scaled_dot_product_attention(grouped, k.expand(expanded), v.expand(expanded), mask, scale=args.scale)
    return out.permute(2, 0, 1, 3).reshape(queries, args.heads, args.head_dim)


def paged_attention_reference(args: AttentionArgs) -> Kernel:
    def paged_attention(q: torch.Tensor, kv: KVPages, batch: AttentionBatch) -> torch.Tensor:
        out = torch.empty(q.shape[0], args.heads, args.head_dim, dtype=q.dtype, device=q.device)
        starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
        for row, seq_len in enumerate(lengths):
            low, high = starts[row], starts[row + 1]
            if seq_len and high > low:
                out[low:high] = attend_row(args, q[low:high], kv, batch.block_table[row], seq_len)
        return out.flatten(1)

    return paged_attention


registry.define("paged_attention", paged_attention_reference)
