"""Seam 5: a proposer of drafts, between the runner and a drafting method. No torch.

Contract
- `propose` is called once a step, after sampling, with the rids that will decode next; it returns at most `k` draft ids for each
  (fewer or none is always right). It must not block on the device if its inputs are on the host.
- `observe` tells it which ids were really appended to a request (prompt included, once, at `start` 0), in order, without gaps; after a
  rejection it is called with `start` below the length seen so far: everything from `start` on is replaced.
- `forget` drops a request; unknown rids are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Proposer(Protocol):
    """Guesses the next tokens of a request more cheaply than the model computes them."""

    def propose(self, rids: Sequence[int], k: int) -> Mapping[int, Sequence[int]]: ...

    def observe(self, rid: int, start: int, token_ids: Sequence[int]) -> None: ...

    def forget(self, rid: int) -> None: ...
