"""Random rows: temperature, then min_p, top_k, top_p, then the draw. Rows are grouped by the least work that serves them.

- dense: no ranking needed (temperature and min_p alone).
- short: top_k of at most SHORT_LIST tokens: only those are ranked.
- nucleus: top_p over the whole vocabulary, or a long top_k. Where the host can look (CPU), the best NUCLEUS_GUESSES are tried in turn, and
  only rows whose nucleus is larger are ranked whole; elsewhere all are, so that nothing waits for the device. The result is the same.

Definitions, each on what the one before left: min_p keeps tokens at least min_p times as likely as the best; top_k keeps the k best; top_p
keeps, best first, every token before which less than top_p of the mass was kept. The best token always stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hexad.common.params import SamplingParams
from hexad.engine.sampling import weights as w

SHORT_LIST = 1024
NUCLEUS_GUESSES = (256, 4096)

MakeTensor = Callable[[Sequence[float], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Random rows of one kind, with their options as tensors over the group's G rows."""

    kind: str  # "dense" | "short" | "nucleus"
    rows: Tensor  # [G] int64, rows of the batch
    temperature: Tensor  # [G] float32
    keys: Tensor  # [G] int64, randomness
    min_weight: Tensor | None  # [G] int64; None: no row has min_p
    top_k: Tensor  # [G] int64, the vocabulary size for no limit
    top_p: Tensor  # [G] float64
    list_length: int  # "short": the longest top_k

    def kept(self, logits: Tensor, best: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights after all filters, and the ids of their columns (None: column = id). logits: [G, V], best: [G]."""
        shifted = w.shift(logits, best, self.temperature)
        if self.kind == "dense":
            return self._above_minimum(w.weigh(shifted)), None
        keys = w.rank_keys(shifted)
        weights = self._above_minimum(w.weigh(shifted))
        if self.kind == "short":
            return _cut(weights, w.best_first(keys, self.list_length), self.top_k, self.top_p)
        return self._nucleus(weights, keys)

    def _above_minimum(self, weights: Tensor) -> Tensor:
        if self.min_weight is None:
            return weights
        return weights.masked_fill_(weights < self.min_weight[:, None], 0)

    def _nucleus(self, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        vocab = weights.shape[-1]
        if weights.device.type != "cpu":
            return _cut(weights, w.best_first(keys, vocab), self.top_k, self.top_p)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, their kept weights, their ids
        rows, top_k, top_p, total = torch.arange(weights.shape[0]), self.top_k, self.top_p, weights.sum(dim=-1)
        for count in (*(guess for guess in NUCLEUS_GUESSES if guess < vocab), vocab):
            kept, ids = _cut(weights, w.best_first(keys, count), top_k, top_p, total)
            settled = kept[:, -1] == 0
            if count == vocab or bool(settled.all()):
                parts.append((rows, kept, ids))
                break
            parts.append((rows[settled], kept[settled], ids[settled]))
            weights, keys, rows, top_k, top_p, total = (t[~settled] for t in (weights, keys, rows, top_k, top_p, total))
        return _join(parts, self.rows.shape[0])

    def draw(self, logits: Tensor, best: Tensor, uniforms: Tensor) -> Tensor:
        """One token id for each row: [G] int64."""
        kept, ids = self.kept(logits, best)
        column = w.draw(kept, uniforms)
        return column if ids is None else ids.gather(1, column[:, None])[:, 0]


def _cut(weights: Tensor, ids: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights of the best tokens `ids` [G, K] after top_k and top_p.

    `total` [G] is the mass of the whole vocabulary, needed when K is only a part of it. A row whose last weight stays above 0 may keep more
    than K tokens: it must be cut again with a larger K.
    """
    ranked = weights.gather(1, ids)
    place = torch.arange(ids.shape[-1], device=ids.device)
    ranked.masked_fill_(place >= top_k[:, None], 0)
    before = ranked.cumsum(dim=-1)
    mass = before[:, -1]
    if total is not None:  # where top_k cuts in beyond K, the mass is not known: keep everything for now
        complete = (top_k <= ids.shape[-1]) | (ranked[:, -1] == 0)
        mass = torch.where(complete, mass, torch.where(top_k < weights.shape[-1], torch.iinfo(torch.int64).max, total))
    limit = top_p * mass.to(torch.float64)
    before = before - ranked
    ranked.masked_fill_((before.to(torch.float64) >= limit[:, None]) & (place > 0), 0)
    return ranked, ids


def _join(parts: Sequence[tuple[Tensor, Tensor, Tensor]], num_rows: int) -> tuple[Tensor, Tensor]:
    """Lists of different lengths as one, in the order of the rows; the short ones end in weight 0."""
    if len(parts) == 1:
        return parts[0][1:]
    width = max(kept.shape[-1] for _, kept, _ in parts)
    all_kept = torch.zeros((num_rows, width), dtype=torch.int64)
    all_ids = torch.zeros((num_rows, width), dtype=torch.int64)
    for rows, kept, ids in parts:
        all_kept[rows, : kept.shape[-1]] = kept
        all_ids[rows, : ids.shape[-1]] = ids
    return all_kept, all_ids


def kind_of(params: SamplingParams, vocab_size: int) -> str:
    """Which group serves a random row."""
    limited = 0 < params.top_k < vocab_size
    if limited and params.top_k <= SHORT_LIST:
        return "short"
    return "nucleus" if limited or params.top_p < 1.0 else "dense"


def make_groups(
    rows: Sequence[tuple[int, SamplingParams, int]], vocab_size: int, max_group_rows: int, make: MakeTensor
) -> tuple[DrawGroup, ...]:
    """Group random rows, given as (row, params, key)."""
    by_kind: dict[str, list[tuple[int, SamplingParams, int]]] = {}
    for row in rows:
        by_kind.setdefault(kind_of(row[1], vocab_size), []).append(row)
    return tuple(
        _make_group(kind, members[start : start + max_group_rows], vocab_size, make)
        for kind, members in by_kind.items()
        for start in range(0, len(members), max_group_rows)
    )


def _make_group(kind: str, members: Sequence[tuple[int, SamplingParams, int]], vocab_size: int, make: MakeTensor) -> DrawGroup:
    params = [member[1] for member in members]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    has_min_p = any(p.min_p > 0 for p in params)
    return DrawGroup(
        kind=kind,
        rows=make([row for row, _, _ in members], torch.int64),
        temperature=make([p.temperature for p in params], torch.float32),
        keys=make([key for _, _, key in members], torch.int64),
        min_weight=make([math.ceil(p.min_p * w.SCALE) for p in params], torch.int64) if has_min_p else None,
        top_k=make(top_k, torch.int64),
        top_p=make([p.top_p for p in params], torch.float64),
        list_length=max(top_k),
    )
