"""What each kind of KV group needs: how its table grows, which pages a position still reads, when a cached prefix is usable. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hexad.engine.plan import NO_BLOCK, KVGroupSpec
from hexad.orchestration.kv.radix import Node


class GroupRule(Protocol):
    """The rule of one group. Pages are indices into a request's table."""

    windowed: bool  # pages stop being read as the request goes on

    def first_page(self, start: int) -> int:
        """First page that computing position `start` or any later one reads or writes."""
        ...

    def usable_blocks(self, path: Sequence[Node], group: int) -> list[bool]:
        """For each L in 0..len(path): may a request go on after the first L blocks of the path, with this group's pages there?"""
        ...

    def min_pages(self, num_positions: int) -> int:
        """Pages that the request needs at once, at the least, to get through its first `num_positions` positions."""
        ...


class FullRule:
    """Every earlier position is read."""

    windowed = False

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def first_page(self, start: int) -> int:
        return 0

    def usable_blocks(self, path: Sequence[Node], group: int) -> list[bool]:
        usable = [True]
        for node in path:
            usable.append(usable[-1] and node.pages[group] != NO_BLOCK)
        return usable

    def min_pages(self, num_positions: int) -> int:
        return -(-num_positions // self._block_size)


class SlidingRule:
    """Position p reads positions p - window + 1 .. p: `window` keys are visible, its own included."""

    windowed = True

    def __init__(self, block_size: int, window: int) -> None:
        assert window >= 1
        self._block_size = block_size
        self._window = window

    def first_page(self, start: int) -> int:
        return max(0, start - self._window + 1) // self._block_size

    def usable_blocks(self, path: Sequence[Node], group: int) -> list[bool]:
        usable = [True]
        run = 0  # pages present without a gap, up to here
        for index, node in enumerate(path):
            run = run + 1 if node.pages[group] != NO_BLOCK else 0
            end = index + 1
            usable.append(run >= end - self.first_page(end * self._block_size))
        return usable

    def min_pages(self, num_positions: int) -> int:
        whole = -(-num_positions // self._block_size)
        return min(whole, -(-(self._window - 1) // self._block_size) + 1)


def make_rule(spec: KVGroupSpec, block_size: int) -> GroupRule:
    """The rule of a group. "latent" pages hold compressed vectors, "cross" pages what an encoder wrote once: both are read in full."""
    if spec.kind == "sliding":
        assert spec.window is not None, "a sliding group has a window"
        return SlidingRule(block_size, spec.window)
    assert spec.kind in ("full", "latent", "cross"), spec.kind
    return FullRule(block_size)
