"""Causal attention of ragged rows over paged keys and values.

`paged_attention(q [T, Hq, D], kv: KVPages, batch: AttentionBatch) -> [T, Hq * D]`

- Row b's queries are its last `query_start[b + 1] - query_start[b]` positions of `seq_lens[b]`; query i sees keys j <= i, and with a window
  only the last `window` of them, itself included. Keys and values of this step were written before (`rope_kv_write`).
- Query head h reads key head h // (Hq / Hkv). Block table entries of -1 are never read for a visible key.
- A row reads no other row's keys and nothing past its own length, so that NaN in one row, or stale memory, harms no neighbour.
- The output of a padding row (seq_len 0) is not read.

The reference sorts a step's rows into pieces once (`AttentionBatch.scratch`) and runs each piece as one fused attention: rows with one
query are gathered together by similar length, other rows one by one. Query heads that share a key head become queries of that head, so
that keys are gathered once and never repeated.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hexad.operators.args import AttentionArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.kv_int8 import KV_INT8, dequantize_heads, page_reasons
from hexad.operators.registry import Kernel, registry


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that are computed together: `rows` rows of `queries` queries over `keys` keys each, shorter ones padded and masked."""

    token_index: torch.Tensor | None  # [rows * queries] int64: their places in q; None: all of them, in order
    slots: torch.Tensor  # [rows * keys] int64: flat slots of the keys; padding repeats the row's own last key
    mask: torch.Tensor | None  # bool, broadcasts to [rows, queries, keys]: True = visible; None: all are
    causal: bool  # queries == keys and the mask is the plain triangle
    rows: int
    queries: int
    keys: int


def plan_pieces(batch: AttentionBatch, window: int | None) -> list[Piece]:
    """Cut a step into pieces. Runs once a step, on the host."""
    starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
    counts = [high - low for low, high in itertools.pairwise(starts)]
    decodes = [row for row, (n, length) in enumerate(zip(counts, lengths, strict=True)) if n == 1 and length]
    pieces = [_decode_piece(batch, rows, starts, lengths, window) for rows in _buckets(decodes, lengths, window)]
    for row, (n, length) in enumerate(zip(counts, lengths, strict=True)):
        if n > 1 and length:
            pieces.append(_chunk_piece(batch, row, starts[row], n, length, window))
    return pieces


def _buckets(rows: list[int], lengths: list[int], window: int | None) -> list[list[int]]:
    """Rows of similar length together, so that padding wastes at most half."""
    limit = window or max(lengths, default=0)
    buckets: dict[int, list[int]] = {}
    for row in rows:
        buckets.setdefault(max(6, min(lengths[row], limit) - 1).bit_length(), []).append(row)
    return list(buckets.values())


def _decode_piece(batch: AttentionBatch, rows: list[int], starts: list[int], lengths: list[int], window: int | None) -> Piece:
    device = batch.slots.device
    firsts = [0 if window is None else max(0, lengths[row] - window) for row in rows]
    spans = [lengths[row] - first for row, first in zip(rows, firsts, strict=True)]
    keys = max(spans)
    first = torch.tensor(firsts, device=device).unsqueeze(1)
    last = torch.tensor([lengths[row] - 1 for row in rows], device=device).unsqueeze(1)
    positions = torch.minimum(first + torch.arange(keys, device=device), last)  # [rows, keys]
    table = batch.block_table if len(rows) == len(lengths) else batch.block_table[rows]
    slots = table.long().gather(1, positions // batch.block_size) * batch.block_size + positions % batch.block_size
    mask = None
    if min(spans) < keys:
        span = torch.tensor(spans, device=device).unsqueeze(1)
        mask = (torch.arange(keys, device=device) < span).unsqueeze(1)  # [rows, 1, keys]
    places = [starts[row] for row in rows]
    whole = places == list(range(batch.slots.shape[0]))
    return Piece(None if whole else torch.tensor(places, device=device), slots.flatten(), mask, False, len(rows), 1, keys)


def _chunk_piece(batch: AttentionBatch, row: int, start: int, queries: int, length: int, window: int | None) -> Piece:
    device = batch.slots.device
    computed = length - queries  # positions before this chunk
    first = 0 if window is None else max(0, computed - window + 1)
    positions = torch.arange(first, length, device=device)
    slots = batch.block_table[row].long()[positions // batch.block_size] * batch.block_size + positions % batch.block_size
    causal = computed == 0 and (window is None or window >= length)
    mask = None
    if not causal:
        query = torch.arange(computed, length, device=device).unsqueeze(1)
        mask = positions <= query  # [queries, keys]
        if window is not None:
            mask &= positions > query - window
    index = None if queries == batch.slots.shape[0] else torch.arange(start, start + queries, device=device)
    return Piece(index, slots, mask, causal, 1, queries, length - first)


def gather_keys(args: AttentionArgs, piece: Piece, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The piece's keys (or values) from pages -> [rows, Hkv, keys, D]."""
    width = pages.shape[-1]
    flat = pages.view(-1, args.kv_heads * width).index_select(0, piece.slots).view(piece.rows, piece.keys, args.kv_heads, width)
    return (dequantize_heads(flat, dtype) if pages.dtype == KV_INT8 else flat.to(dtype)).transpose(1, 2)


def attend(args: AttentionArgs, piece: Piece, q: torch.Tensor, kv: KVPages) -> torch.Tensor:
    """Attention of one piece: q [rows * queries, Hq, D] -> [rows * queries, Hq * D]."""
    width, group = args.head_dim, args.heads // args.kv_heads
    grouped = q.view(piece.rows, piece.queries, args.kv_heads, group, width)
    k, v = (gather_keys(args, piece, pages, q.dtype) for pages in (kv.k, kv.v))  # [rows, Hkv, keys, D]
    if piece.queries == 1:
        out = _fused(args, grouped.squeeze(1), k, v, piece.mask.unsqueeze(1) if piece.mask is not None else None, causal=False)
        return out.reshape(piece.rows, -1)  # [rows, Hkv, G, D]
    heads = grouped.squeeze(0).permute(1, 2, 0, 3)  # [Hkv, G, queries, D]: key heads as the batch, so that k and v are only strided
    expanded = (args.kv_heads, group, piece.keys, width)
    out = _fused(args, heads, k.transpose(0, 1).expand(expanded), v.transpose(0, 1).expand(expanded), piece.mask, causal=piece.causal)
    return out.permute(2, 0, 1, 3).reshape(piece.queries, -1)


def _fused(
    args: AttentionArgs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
) -> torch.Tensor:
    if args.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=args.scale)
    scores = torch.tanh((q.float() @ k.float().transpose(-1, -2)) * (args.scale / args.softcap)) * args.softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def paged_attention_reference(args: AttentionArgs) -> Kernel:
    key = f"torch.pieces.{args.window}"

    def paged_attention(q: torch.Tensor, kv: KVPages, batch: AttentionBatch) -> torch.Tensor:
        pieces: list[Piece] | None = batch.scratch.get(key)
        if pieces is None:
            pieces = batch.scratch[key] = plan_pieces(batch, args.window)
        if len(pieces) == 1 and pieces[0].token_index is None:
            return attend(args, pieces[0], q, kv)
        out = torch.zeros(q.shape[0], args.heads * args.head_dim, dtype=q.dtype, device=q.device)
        for piece in pieces:
            if piece.token_index is None:
                return attend(args, piece, q, kv)
            out.index_copy_(0, piece.token_index, attend(args, piece, q.index_select(0, piece.token_index), kv))
        return out

    return paged_attention


registry.define("paged_attention", paged_attention_reference, page_reasons)
