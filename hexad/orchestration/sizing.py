"""How many tokens a pool of KV pages holds. No torch."""

from __future__ import annotations

from hexad.engine.plan import KVGroupSpec


def pages_for(num_tokens: int, groups: tuple[KVGroupSpec, ...], block_size: int) -> int:
    """Pages that one sequence of `num_tokens` keeps over all KV groups."""
    pages = 0
    for group in groups:
        kept = num_tokens if group.window is None else min(num_tokens, group.window + block_size)
        pages += -(-kept // block_size)
    return pages


def longest_sequence(num_blocks: int, groups: tuple[KVGroupSpec, ...], block_size: int, limit: int) -> int:
    """The longest sequence, up to `limit`, whose pages all fit."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if pages_for(middle, groups, block_size) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
