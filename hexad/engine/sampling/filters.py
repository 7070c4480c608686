"""Random rows, grouped by the least work that serves them (see `operators/draw.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hexad.common.params import SamplingParams
from hexad.operators import token_weights as w
from hexad.operators.draw import DrawOptions

SHORT_LIST = 1024

MakeTensor = Callable[[Sequence[float], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Random rows of one kind, with their options as tensors over the group's G rows."""

    rows: Tensor  # [G] int64, rows of the batch
    keys: Tensor  # [G] int64, randomness
    options: DrawOptions


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
    options = DrawOptions(
        kind=kind,
        temperature=make([p.temperature for p in params], torch.float32),
        min_weight=make([math.ceil(p.min_p * w.SCALE) for p in params], torch.int64) if has_min_p else None,
        top_k=make(top_k, torch.int64),
        top_p=make([p.top_p for p in params], torch.float64),
        list_length=max(top_k),
    )
    return DrawGroup(make([row for row, _, _ in members], torch.int64), make([key for _, _, key in members], torch.int64), options)
