"""The pool's contract: holders, free list, and pages that plans in flight still name."""

from __future__ import annotations

import pytest

from hexad.orchestration.kv.pool import BlockPool


def test_a_page_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(4)
    pages = pool.take(2)
    pool.hold(pages[0])
    pool.release(pages[0], -1)
    assert pool.num_free == 2
    pool.release(pages[0], -1)
    pool.release(pages[1], -1)
    assert pool.num_free == 4
    pool.check_integrity()


def test_a_page_in_flight_is_not_handed_out_before_its_plan_retires():
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.release(first, 0)
    pool.release(second, 1)
    assert (pool.num_free, pool.num_deferred) == (0, 2)
    pool.retire(0)
    assert pool.take(1) == [first]
    pool.check_integrity()
    pool.retire(1)
    assert pool.take(1) == [second]


def test_the_latest_plan_counts_over_all_holders():
    pool = BlockPool(1)
    (page,) = pool.take(1)
    pool.hold(page)
    pool.release(page, 3)
    pool.release(page, 1)
    for step in range(3):
        pool.retire(step)
        assert pool.num_free == 0
    pool.retire(3)
    assert pool.num_free == 1


def test_a_copy_source_counts_as_named():
    pool = BlockPool(1)
    (page,) = pool.take(1)
    pool.names(page, 2)
    pool.release(page, 0)
    pool.retire(0)
    pool.retire(1)
    assert pool.num_free == 0
    pool.retire(2)
    assert pool.num_free == 1


def test_evictable_are_the_pages_that_only_the_tree_holds():
    pool = BlockPool(3)
    (page,) = pool.take(1)
    pool.cache(page)
    assert pool.num_evictable == 0
    assert pool.release(page, -1) is True
    assert pool.num_evictable == 1 and pool.num_reachable == 3 and pool.num_used == 0
    pool.hold(page)
    assert pool.num_evictable == 0 and pool.num_used == 1
    pool.uncache(page)
    assert pool.num_free == 2
    pool.release(page, -1)
    assert pool.num_free == 3
    pool.check_integrity()


def _free_twice(pool: BlockPool, page: int) -> None:
    pool.release(page, -1)
    pool.release(page, -1)


def _share_a_free_page(pool: BlockPool, page: int) -> None:
    pool.release(page, -1)
    pool.hold(page)


def _cache_twice(pool: BlockPool, page: int) -> None:
    pool.cache(page)
    pool.cache(page)


@pytest.mark.parametrize(
    "misuse", [_free_twice, _share_a_free_page, _cache_twice, lambda pool, page: pool.take(2), lambda pool, page: pool.retire(1)]
)
def test_misuse_is_an_assertion(misuse):
    pool = BlockPool(2)
    (page,) = pool.take(1)
    with pytest.raises(AssertionError):
        misuse(pool, page)
