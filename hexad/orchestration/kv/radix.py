"""The prefix cache: a tree of blocks of token ids, one per namespace. No torch.

Contract
- A node stands for one full block of ids after its parent's; it holds at most one page per KV group (`NO_BLOCK`: none).
- A namespace is (cache salt, adapter, model revision, media hash, private id), compared in full. A child's key is the bytes of its
  block's ids, compared in full: a hash collision cannot give one prompt another's pages.
- Only confirmed ids, whose KV a retired plan has written, are inserted: the scheduler's duty.
- Every page that only the tree holds can be evicted: whole leaves first, and single window pages anywhere, least recently released
  first; as a last resort the pages inside a path whose lower part a request holds.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence

from hexad.engine.plan import NO_BLOCK
from hexad.orchestration.kv.pool import BlockPool

Namespace = tuple[str, int | None, str, str, int]  # salt, adapter, revision, media hash, private id (0: shared)


class Node:
    """One block. Mutated by the tree alone."""

    __slots__ = ("alive", "children", "key", "last_use", "namespace", "pages", "parent")

    def __init__(self, parent: Node | None, key: bytes, num_groups: int, namespace: Namespace) -> None:
        self.parent = parent
        self.key = key
        self.namespace = namespace
        self.children: dict[bytes, Node] = {}
        self.pages = [NO_BLOCK] * num_groups
        self.last_use = 0
        self.alive = True


class RadixTree:
    """Finds, keeps and evicts cached blocks. `windowed[g]`: pages of group g may go before their node does."""

    def __init__(self, pool: BlockPool, block_size: int, windowed: Sequence[bool]) -> None:
        self._pool = pool
        self._block_size = block_size
        self._windowed = tuple(windowed)
        self._roots: dict[Namespace, Node] = {}
        self._node_of: dict[int, Node] = {}  # page -> its node
        self._heap: list[tuple[int, int, Node]] = []  # candidates for eviction; stale entries are skipped when popped
        self._tick = 0
        self._pushes = 0
        self.num_nodes = 0
        self.num_evicted = 0  # pages, ever

    @property
    def num_pages(self) -> int:
        """Pages in the tree, shared with requests or not."""
        return len(self._node_of)

    def match(self, namespace: Namespace, ids: array[int], max_blocks: int) -> list[Node]:
        """The longest path of whole blocks that begin `ids`, at most `max_blocks`; some of its pages may be missing. Changes nothing."""
        node = self._roots.get(namespace)
        path: list[Node] = []
        if node is None:
            return path
        size = self._block_size
        for index in range(max_blocks):
            node = node.children.get(ids[index * size : (index + 1) * size].tobytes())
            if node is None:
                break
            path.append(node)
        return path

    def insert(
        self, namespace: Namespace, node: Node | None, ids: array[int], first: int, last: int, tables: Sequence[Sequence[int]]
    ) -> Node:
        """Add blocks `first .. last - 1` of `ids` with the pages of `tables` below `node` (None: the root); returns the last node.

        A block that is there already keeps its page; a page that is missing is filled in, and one that nobody uses is exchanged, so
        that the path of a running request is made of pages in use.
        """
        assert node is None or node.alive
        if node is None:
            node = self._roots.get(namespace)
            if node is None:
                node = self._roots[namespace] = Node(None, b"", len(self._windowed), namespace)
        size = self._block_size
        pool = self._pool
        for index in range(first, last):
            key = ids[index * size : (index + 1) * size].tobytes()
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, len(self._windowed), namespace)
                self.num_nodes += 1
            pages = child.pages
            for group, table in enumerate(tables):
                page, known = table[index], pages[group]
                if page in (known, NO_BLOCK):
                    continue
                if known != NO_BLOCK:
                    if pool.refs[known] > 1:
                        continue
                    self._drop_page(child, group)
                pool.cache(page)
                pages[group] = page
                self._node_of[page] = child
            node = child
        if not any(map(NO_BLOCK.__ne__, node.pages)):
            self._prune(node)  # a small window has passed all pages of the last block: the node returned is dead then
        return node

    def idle(self, page: int) -> None:
        """A request let go of a cached page and only the tree holds it now."""
        node = self._node_of[page]
        self._tick += 1
        node.last_use = self._tick
        if not node.children or self._windowed[node.pages.index(page)]:
            self._push(node)

    def evict(self, wanted_free: int) -> None:
        """Let pages go until the pool has `wanted_free` free ones or none is left that only the tree holds."""
        pool = self._pool
        while pool.num_free < wanted_free and self._heap:
            stamp, _, node = heapq.heappop(self._heap)
            if node.alive and stamp == node.last_use:
                self._evict_from(node)
        if pool.num_free < wanted_free and pool.num_evictable:
            self._evict_inside(wanted_free)

    def drop_namespace(self, namespace: Namespace) -> None:
        """Forget everything below one namespace; pages that requests hold stay theirs."""
        root = self._roots.pop(namespace, None)
        if root is not None:
            self._drop_below(root)

    def clear(self) -> int:
        """Forget everything; returns how many pages were in the tree."""
        count = self.num_pages
        for namespace in list(self._roots):
            self.drop_namespace(namespace)
        self._heap.clear()
        return count

    def check_integrity(self) -> None:
        """Assert that nodes, pages and the page map agree."""
        seen: dict[int, Node] = {}
        count = 0
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            assert node.alive
            for key, child in node.children.items():
                assert child.parent is node and child.key == key and len(key) == 4 * self._block_size
                assert child.children or any(page != NO_BLOCK for page in child.pages), "an empty leaf was left behind"
                count += 1
                for page in child.pages:
                    if page != NO_BLOCK:
                        assert page not in seen, f"page {page} is in two nodes"
                        assert self._pool.cached[page] and self._pool.refs[page] >= 1
                        seen[page] = child
                stack.append(child)
        assert seen == self._node_of, "page map and tree disagree"
        assert count == self.num_nodes, f"{count} nodes, counted {self.num_nodes}"
        assert sum(self._pool.cached) == len(seen), "a page is marked cached and in no node"

    def _push(self, node: Node) -> None:
        if len(self._heap) > 4 * self.num_nodes + 1_024:
            self._heap = list({id(n): (s, u, n) for s, u, n in self._heap if n.alive and s == n.last_use}.values())
            heapq.heapify(self._heap)
        self._pushes += 1  # breaks ties, so that nodes are never compared
        heapq.heappush(self._heap, (node.last_use, self._pushes, node))

    def _evict_from(self, node: Node) -> None:
        """Remove a leaf that nobody uses, or else the idle window pages of a node."""
        refs = self._pool.refs
        if not node.children and all(page == NO_BLOCK or refs[page] == 1 for page in node.pages):
            for group in range(len(node.pages)):
                self._evict_page(node, group)
        else:
            for group, windowed in enumerate(self._windowed):
                if windowed and node.pages[group] != NO_BLOCK and refs[node.pages[group]] == 1:
                    self._evict_page(node, group)
        self._prune(node)

    def _evict_inside(self, wanted_free: int) -> None:
        """Take pages above blocks that requests hold (they hold equal pages of their own, or none for want of a need)."""
        refs = self._pool.refs
        for page, node in list(self._node_of.items()):
            if self._pool.num_free >= wanted_free:
                return
            if refs[page] == 1:
                self._evict_page(node, node.pages.index(page))
                self._prune(node)

    def _evict_page(self, node: Node, group: int) -> None:
        if node.pages[group] != NO_BLOCK:
            self.num_evicted += 1
            self._drop_page(node, group)

    def _drop_page(self, node: Node, group: int) -> None:
        page = node.pages[group]
        node.pages[group] = NO_BLOCK
        del self._node_of[page]
        self._pool.uncache(page)

    def _prune(self, node: Node) -> None:
        """Remove nodes without pages and children, upwards; a parent that becomes a leaf is a candidate for eviction."""
        start = node
        while node.parent is not None and not node.children and all(page == NO_BLOCK for page in node.pages):
            parent = node.parent
            del parent.children[node.key]
            node.alive = False
            node.parent = None
            self.num_nodes -= 1
            node = parent
        if node is start or node.children:
            return
        if node.parent is None:
            node.alive = False
            del self._roots[node.namespace]
        else:
            self._push(node)

    def _drop_below(self, root: Node) -> None:
        stack = [root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            for group, page in enumerate(node.pages):
                if page != NO_BLOCK:
                    self._drop_page(node, group)
            if node is not root:
                self.num_nodes -= 1
            node.alive = False
            node.parent = None
            node.children = {}
