"""KV bookkeeping of requests: tables per group, prefix hits, sliding windows, release. No torch.

Contract: the scheduler alone calls this. Methods change the request's `tables`, `first_page`, `capacity`, `node`, `num_inserted` and
nothing else of it. A failed allocation changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from hexad.engine.plan import NO_BLOCK, KVLayout
from hexad.orchestration.kv.groups import make_rule
from hexad.orchestration.kv.pool import BlockPool
from hexad.orchestration.kv.radix import Namespace, Node, RadixTree
from hexad.orchestration.request import Request

NewBlocks = tuple[tuple[int, ...], ...]


class KVManager:
    """Pool, tree and group rules of one engine."""

    def __init__(self, layout: KVLayout) -> None:
        assert layout.groups and layout.num_blocks > 0 and layout.block_size > 0
        self.layout = layout
        self.block_size = layout.block_size
        self.num_groups = len(layout.groups)
        self.rules = tuple(make_rule(spec, layout.block_size) for spec in layout.groups)
        self.pool = BlockPool(layout.num_blocks)
        self.tree = RadixTree(self.pool, layout.block_size, [rule.windowed for rule in self.rules])
        self._windowed = tuple(group for group, rule in enumerate(self.rules) if rule.windowed)

    # -- sizes

    def min_pages(self, num_positions: int) -> int:
        """Pages without which a request can never compute `num_positions` positions, even alone."""
        return sum(rule.min_pages(num_positions) for rule in self.rules)

    def max_positions(self, limit: int) -> int:
        """The largest number of positions up to `limit` that a request alone can compute."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.min_pages(middle) <= self.pool.num_blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def prompt_pages(self, total: int, num_shared: int) -> int:
        """Pages to add for `total` positions after a hit of `num_shared` blocks; windowed groups let go on the way."""
        rest = -(-total // self.block_size) - num_shared
        return sum(min(rest, rule.min_pages(total)) for rule in self.rules)

    # -- prefix hits

    def find_prefix(self, namespace: Namespace, ids: array[int], max_blocks: int) -> list[Node]:
        """The longest cached prefix in whole blocks from which a request can go on. Changes nothing."""
        path = self.tree.match(namespace, ids, max_blocks)
        if not path:
            return path
        usable = [rule.usable_blocks(path, group) for group, rule in enumerate(self.rules)]
        length = len(path)
        while not all(group[length] for group in usable):
            length -= 1
        return path[:length]

    def num_idle(self, path: list[Node]) -> int:
        """Pages of a hit that only the tree holds: taking them lessens what can be evicted."""
        refs = self.pool.refs
        start = len(path) * self.block_size
        firsts = [rule.first_page(start) for rule in self.rules]
        return sum(1 for group, first in enumerate(firsts) for node in path[first:] if refs[node.pages[group]] == 1)

    def take_prefix(self, request: Request, path: list[Node]) -> None:
        """Give a request with empty tables the pages of a hit."""
        start = len(path) * self.block_size
        for group, rule in enumerate(self.rules):
            first = rule.first_page(start)
            table = request.tables[group]
            assert not table
            for index, node in enumerate(path):
                page = node.pages[group] if index >= first else NO_BLOCK
                if page != NO_BLOCK:
                    self.pool.hold(page)
                table.append(page)
            request.first_page[group] = min(first, len(path))
        request.capacity = start
        request.node = path[-1] if path else None
        request.num_inserted = len(path)

    # -- growth

    def missing_pages(self, request: Request, end: int) -> int:
        """Pages to add before the request can compute positions below `end`."""
        blocks = -(-(end - request.capacity) // self.block_size)
        return blocks * self.num_groups if blocks > 0 else 0

    def make_free(self, count: int) -> bool:
        """Evict cached pages until `count` are free; False if that is not possible now."""
        pool = self.pool
        if pool.num_free < count and pool.num_free + pool.num_evictable >= count:
            self.tree.evict(count)
        return pool.num_free >= count

    def grow(self, request: Request, end: int) -> NewBlocks | None:
        """Extend the tables to hold positions below `end`; the new ids per group, or None if pages are short."""
        blocks = -(-(end - request.capacity) // self.block_size)
        if blocks <= 0:
            return ()
        groups = self.num_groups
        if not self.make_free(blocks * groups):
            return None
        pages = self.pool.take(blocks * groups)
        request.capacity += blocks * self.block_size
        if groups == 1:
            request.tables[0].extend(pages)
            return (tuple(pages),)
        new = tuple(tuple(pages[group * blocks : (group + 1) * blocks]) for group in range(groups))
        for table, added in zip(request.tables, new, strict=True):
            table.extend(added)
        return new

    def slide(self, request: Request, start: int) -> None:
        """Let go of the pages that no position from `start` on reads."""
        for group in self._windowed:
            first = request.first_page[group]
            table = request.tables[group]
            keep = min(self.rules[group].first_page(start), len(table))
            for index in range(first, keep):
                self._release(table[index], request.last_step)
                table[index] = NO_BLOCK
            if keep > first:
                request.first_page[group] = keep

    # -- the cache

    def insert(self, request: Request) -> None:
        """Enter the request's finished blocks (confirmed ids, computed by retired plans) into the tree."""
        last = min(min(request.num_done, len(request.ids)) // self.block_size, request.cache_limit_blocks)
        if last <= request.num_inserted:
            return
        node, first = request.node, request.num_inserted
        if node is None or not node.alive:
            node, first = None, 0
        request.node = self.tree.insert(request.namespace, node, request.ids, first, last, request.tables)
        request.num_inserted = last

    def release(self, request: Request) -> None:
        """Give back everything that the request holds."""
        step = request.last_step
        for group, table in enumerate(request.tables):
            for index in range(len(table) - 1, request.first_page[group] - 1, -1):
                self._release(table[index], step)
            table.clear()
            request.first_page[group] = 0
        request.capacity = 0
        request.node = None
        request.num_inserted = 0

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert that every page is held exactly by the tables that name it and the tree."""
        holders = [0] * self.pool.num_blocks
        for request in requests:
            for group, table in enumerate(request.tables):
                assert len(table) * self.block_size == request.capacity, f"{request}: tables and capacity disagree"
                first = request.first_page[group]
                assert all((page == NO_BLOCK) == (index < first) for index, page in enumerate(table)), f"{request}: gaps in a table"
                for page in table[first:]:
                    holders[page] += 1
            assert request.num_computed <= request.capacity or not request.capacity, f"{request}: computed beyond its tables"
        for page in range(self.pool.num_blocks):
            expected = holders[page] + self.pool.cached[page]
            assert self.pool.refs[page] == expected, f"page {page}: {self.pool.refs[page]} holders counted, {expected} found"
        self.pool.check_integrity()
        self.tree.check_integrity()

    def _release(self, page: int, step: int) -> None:
        if self.pool.release(page, step):
            self.tree.idle(page)
