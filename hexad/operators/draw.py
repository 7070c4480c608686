"""`draw(logits [G, V] float32, best [G], options, uniforms [G] float64) -> [G] int64`: one token id for each random row.

Temperature, then min_p, top_k, top_p, then the draw. Each on what the one before left: min_p keeps tokens at least min_p times as likely as
the best; top_k keeps the k best; top_p keeps, best first, every token before which less than top_p of the mass was kept. The best token
always stays. Of the tokens kept, in the order of their ids, the first is drawn whose running weight exceeds `uniform` times the whole.

Weights are integers (`token_weights`), so a row's draw does not depend on the batch, on threads, or on the order of sums; providers agree
with each other as far as their `exp` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hexad.operators import token_weights as w
from hexad.operators.args import DrawArgs
from hexad.operators.registry import Kernel, registry

NUCLEUS_GUESSES = (256, 4096)


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """What G rows want, on the device of their logits. `kind` is the least that serves all of them.

    - "dense": temperature and min_p alone.
    - "short": top_k of at most `list_length`, a small part of the vocabulary.
    - "nucleus": top_p over the whole vocabulary, or a long top_k.
    """

    kind: str
    temperature: Tensor  # [G] float32
    min_weight: Tensor | None  # [G] int64; None: no row has min_p
    top_k: Tensor  # [G] int64, the vocabulary size for no limit
    top_p: Tensor  # [G] float64
    list_length: int  # the longest top_k


def kept(logits: Tensor, best: Tensor, options: DrawOptions) -> tuple[Tensor, Tensor | None]:
    """Weights after all filters, and the ids of their columns (None: column = id). logits: [G, V], best: [G].

    A nucleus is looked for among the best NUCLEUS_GUESSES tokens first where the host can look (CPU); elsewhere all are ranked, so that
    nothing waits for the device. The result is the same.
    """
    shifted = w.shift(logits, best, options.temperature)
    if options.kind == "dense":
        return _above_minimum(w.weigh(shifted), options), None
    keys = w.rank_keys(shifted)
    weights = _above_minimum(w.weigh(shifted), options)
    if options.kind == "short":
        return _cut(weights, w.best_first(keys, options.list_length), options.top_k, options.top_p)
    return _nucleus(weights, keys, options)


def _above_minimum(weights: Tensor, options: DrawOptions) -> Tensor:
    if options.min_weight is None:
        return weights
    return weights.masked_fill_(weights < options.min_weight[:, None], 0)


def _nucleus(weights: Tensor, keys: Tensor, options: DrawOptions) -> tuple[Tensor, Tensor]:
    count, vocab = weights.shape
    if weights.device.type != "cpu":
        return _cut(weights, w.best_first(keys, vocab), options.top_k, options.top_p)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, their kept weights, their ids
    rows, top_k, top_p, total = torch.arange(count), options.top_k, options.top_p, weights.sum(dim=-1)
    for guess in (*(guess for guess in NUCLEUS_GUESSES if guess < vocab), vocab):
        left, ids = _cut(weights, w.best_first(keys, guess), top_k, top_p, total)
        settled = left[:, -1] == 0
        if guess == vocab or bool(settled.all()):
            parts.append((rows, left, ids))
            break
        parts.append((rows[settled], left[settled], ids[settled]))
        weights, keys, rows, top_k, top_p, total = (t[~settled] for t in (weights, keys, rows, top_k, top_p, total))
    return _join(parts, count)


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
        mass = torch.where(complete, mass, total)
    limit = top_p * mass.to(torch.float64)
    if total is not None:
        limit.masked_fill_(~complete & (top_k < weights.shape[-1]), float("inf"))
    before = before - ranked
    ranked.masked_fill_((before.to(torch.float64) >= limit[:, None]) & (place > 0), 0)
    return ranked, ids


def _join(parts: list[tuple[Tensor, Tensor, Tensor]], num_rows: int) -> tuple[Tensor, Tensor]:
    """Lists of different lengths as one, in the order of the rows; the short ones end in weight 0."""
    if len(parts) == 1:
        return parts[0][1:]
    width = max(left.shape[-1] for _, left, _ in parts)
    all_kept = torch.zeros((num_rows, width), dtype=torch.int64)
    all_ids = torch.zeros((num_rows, width), dtype=torch.int64)
    for rows, left, ids in parts:
        all_kept[rows, : left.shape[-1]] = left
        all_ids[rows, : ids.shape[-1]] = ids
    return all_kept, all_ids


def draw_reference(_args: DrawArgs) -> Kernel:
    def draw(logits: Tensor, best: Tensor, options: DrawOptions, uniforms: Tensor) -> Tensor:
        weights, ids = kept(logits, best, options)
        if ids is None:
            return w.draw(weights, uniforms)
        ids, order = ids.sort(dim=-1)
        column = w.draw(weights.gather(1, order), uniforms)
        return ids.gather(1, column[:, None])[:, 0]

    return draw


registry.define("draw", draw_reference)
