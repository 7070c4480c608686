"""The pool of KV pages that all groups share. No torch.

Contract
- A page belongs to its holders: each request whose table names it, and the radix tree. `refs` counts them; a page nobody holds is free.
- A freed page that a plan in flight names is not handed out before that plan has retired: it waits in a list of its own.
- `retire(step)` is called once for each step, in order, when its result has come back.
"""

from __future__ import annotations


class BlockPool:
    """Reference counts and the free list. O(1) for each page touched, nothing per step."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.cached = bytearray(num_blocks)  # 1: the radix tree is one of the holders
        self.last_step = [-1] * num_blocks  # last plan known to name the page
        self.retired = -1  # last step whose result came back
        self.num_evictable = 0  # pages that only the tree holds
        self.num_deferred = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: recently used pages first
        self._deferred: dict[int, list[int]] = {}  # step -> pages free once it has retired

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    @property
    def num_reachable(self) -> int:
        """Pages that can be had without taking any from a request: now, by eviction, or once plans in flight have retired."""
        return len(self._free) + self.num_evictable + self.num_deferred

    @property
    def num_used(self) -> int:
        """Pages that some request holds."""
        return self.num_blocks - self.num_reachable

    def take(self, count: int) -> list[int]:
        """Hand out `count` free pages with one holder each. The caller has checked `num_free`."""
        free = self._free
        assert count <= len(free), f"{count} pages wanted, {len(free)} free"
        if count == 1:
            pages = [free.pop()]
        else:
            pages = free[len(free) - count :]
            del free[len(free) - count :]
        refs = self.refs
        for page in pages:
            refs[page] = 1
        return pages

    def hold(self, page: int) -> None:
        """One more holder of a page that has one."""
        refs = self.refs[page]
        assert refs > 0, f"page {page} is free: nobody can share it"
        if refs == 1 and self.cached[page]:
            self.num_evictable -= 1
        self.refs[page] = refs + 1

    def release(self, page: int, step: int) -> bool:
        """One holder fewer; `step` is the last plan in which it used the page (-1: none).

        Returns:
            True if only the tree holds the page now.
        """
        refs = self.refs[page] - 1
        assert refs >= 0, f"page {page} released more often than held"
        self.refs[page] = refs
        if step > self.last_step[page]:
            self.last_step[page] = step
        if refs == 0:
            self._free_page(page)
            return False
        if refs == 1 and self.cached[page]:
            self.num_evictable += 1
            return True
        return False

    def cache(self, page: int) -> None:
        """The tree becomes a holder of a page that a request holds."""
        assert not self.cached[page] and self.refs[page], f"page {page} is in the tree already, or free"
        self.refs[page] += 1
        self.cached[page] = 1

    def uncache(self, page: int) -> None:
        """The tree lets go."""
        assert self.cached[page], f"page {page} is not in the tree"
        self.cached[page] = 0
        if self.refs[page] == 1:
            self.num_evictable -= 1
        self.release(page, -1)

    def names(self, page: int, step: int) -> None:
        """Plan `step` names the page although its holder has no row there (the source of a copy)."""
        if step > self.last_step[page]:
            self.last_step[page] = step

    def retire(self, step: int) -> None:
        """Plan `step` is done with its pages."""
        assert step == self.retired + 1, f"step {step} retires after {self.retired}"
        self.retired = step
        pages = self._deferred.pop(step, None)
        if pages:
            self.num_deferred -= len(pages)
            self._free.extend(pages)

    def check_integrity(self) -> None:
        """Assert that free list, deferred pages and counts agree."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        deferred = [page for pages in self._deferred.values() for page in pages]
        assert len(deferred) == self.num_deferred == len(set(deferred)), "deferred pages miscounted"
        assert all(step > self.retired for step in self._deferred), "pages wait for a plan that has retired"
        idle = free.union(deferred)
        assert len(idle) == len(free) + len(deferred), "a page is free and deferred"
        for page, refs in enumerate(self.refs):
            assert (refs == 0) == (page in idle), f"page {page}: {refs} holders, free: {page in idle}"
            assert refs or not self.cached[page], f"page {page} is cached and free"
        evictable = sum(1 for page, refs in enumerate(self.refs) if refs == 1 and self.cached[page])
        assert evictable == self.num_evictable, f"{evictable} evictable pages, counted {self.num_evictable}"

    def _free_page(self, page: int) -> None:
        step = self.last_step[page]
        if step > self.retired:
            self._deferred.setdefault(step, []).append(page)
            self.num_deferred += 1
        else:
            self._free.append(page)
