"""The prefix cache: what is found, for whom, and what goes first."""

from __future__ import annotations

from array import array

import pytest
from sched_driver import FULL, Driver, layout, sliding

from hexad.engine.executor.fake import FakeScript, Fault
from hexad.orchestration.kv.pool import BlockPool
from hexad.orchestration.kv.radix import RadixTree

SHARED = ("", None, "", "", 0)


class Bench:
    """A tree of one full group whose pages come and go by hand."""

    def __init__(self, num_blocks: int = 8, windowed=(False,)) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, 2, windowed)

    def put(self, *ids: int, namespace=SHARED, keep: bool = False) -> list[int]:
        tokens = array("I", ids)
        tables = [self.pool.take(len(ids) // 2) for _ in self.tree._windowed]
        self.tree.insert(namespace, None, tokens, 0, len(ids) // 2, tables)
        if not keep:
            self.let_go(tables)
        return tables[0]

    def let_go(self, tables) -> None:
        for table in tables:
            for page in reversed(table):
                if self.pool.release(page, -1):
                    self.tree.idle(page)
        self.tree.check_integrity()
        self.pool.check_integrity()

    def found(self, *ids: int, namespace=SHARED) -> int:
        return len(self.tree.match(namespace, array("I", ids), len(ids) // 2))


def test_the_longest_common_prefix_in_whole_blocks():
    bench = Bench()
    bench.put(1, 2, 3, 4, 5, 6)
    assert bench.found(1, 2, 3, 4, 5, 6) == 3
    assert bench.found(1, 2, 3, 4, 5, 7) == 2
    assert bench.found(1, 2, 3) == 1
    assert bench.found(1, 3, 3, 4) == 0


@pytest.mark.parametrize("other", [("salt", None, "", "", 0), ("", 1, "", "", 0), ("", None, "rev", "", 0), ("", None, "", "media", 0)])
def test_namespaces_do_not_see_each_other(other):
    bench = Bench()
    bench.put(1, 2, 3, 4)
    assert bench.found(1, 2, 3, 4, namespace=other) == 0
    bench.put(1, 2, namespace=other)
    assert (bench.found(1, 2, 3, 4), bench.found(1, 2, 3, 4, namespace=other)) == (2, 1)


def test_equal_hashes_are_not_equal_keys():
    """Python hashes 2**61 - 1 + k like k; a key that were only a hash would mix such prompts up. Ids are compared in full."""
    bench = Bench()
    bench.put(1, 2)
    assert bench.found(2, 1) == 0 and bench.found(1, 2) == 1
    assert bench.found(0x0002_0001, 0) == 0, "ids of other widths with the same bytes"


def test_a_block_that_is_there_keeps_its_page_while_it_is_used():
    bench = Bench()
    first = bench.put(1, 2, keep=True)
    second = bench.put(1, 2, keep=True)
    assert bench.pool.cached[first[0]] and not bench.pool.cached[second[0]]
    bench.let_go([second])
    assert bench.pool.num_free == 7


def test_an_unused_page_gives_way_to_one_in_use():
    bench = Bench()
    first = bench.put(1, 2)
    second = bench.put(1, 2, 3, 4, keep=True)
    assert not bench.pool.cached[first[0]] and bench.pool.cached[second[0]]
    bench.let_go([second])


def test_least_recently_used_leaves_go_first():
    bench = Bench(6)
    bench.put(1, 2, 3, 4)
    bench.put(5, 6)
    again = array("I", (1, 2, 3, 4))
    path = bench.tree.match(SHARED, again, 2)
    for node in path:
        bench.pool.hold(node.pages[0])
    bench.let_go([[node.pages[0] for node in path]])  # used again: 5, 6 is the oldest now
    bench.tree.evict(4)
    assert (bench.found(1, 2, 3, 4), bench.found(5, 6)) == (2, 0)
    bench.tree.evict(5)
    assert bench.found(1, 2, 3, 4) == 1, "a leaf goes before its parent"
    bench.tree.evict(6)
    assert bench.tree.num_nodes == 0 and not bench.tree._roots
    bench.tree.check_integrity()


def test_pages_in_use_are_never_evicted():
    bench = Bench(4)
    bench.put(1, 2, 3, 4, keep=True)
    bench.put(1, 2, 5, 6)
    bench.tree.evict(4)
    assert bench.pool.num_free == 2 and bench.found(1, 2, 3, 4) == 2 and bench.found(1, 2, 5, 6) == 1


def test_window_pages_go_before_their_node():
    bench = Bench(4, windowed=(False, True))
    tables = [bench.pool.take(2), bench.pool.take(2)]
    bench.tree.insert(SHARED, None, array("I", (1, 2, 3, 4)), 0, 2, tables)
    bench.let_go([[], tables[1][:1]])  # the window passed the first page
    assert bench.pool.num_evictable == 1
    bench.tree.evict(1)
    assert bench.found(1, 2, 3, 4) == 2 and bench.pool.num_free == 1
    bench.let_go([tables[0], tables[1][1:]])


def test_the_heap_of_candidates_stays_small():
    bench = Bench(4)
    page = bench.put(1, 2)[0]
    for _ in range(5_000):
        bench.pool.hold(page)
        bench.let_go([[page]])
    assert len(bench.tree._heap) < 2_000
    bench.tree.evict(4)
    assert bench.pool.num_free == 4


# -- through the scheduler


def test_turns_of_a_conversation_reuse_prompt_and_answer():
    driver = Driver(layout(64))
    first = driver.run(range(13), max_tokens=12)
    second = driver.run([*range(13), *first.tokens, 50, 51, 52], max_tokens=4)
    assert second.events[0].num_cached == 24, "13 + 11 computed positions are six blocks; the last token was never computed"


def test_unconfirmed_and_failed_blocks_are_not_cached():
    driver = Driver(layout(64), faults=(Fault(kind="nan", step=0, rid=0),), depth=2)
    driver.run(range(16), max_tokens=4)
    assert driver.scheduler.stats().num_tree_blocks == 0
    assert driver.run(range(16), max_tokens=4).events[0].num_cached == 0


def test_what_overshot_is_not_cached():
    prompt = tuple(range(7))
    driver = Driver(layout(64), script=FakeScript(vocab_size=60, outputs={prompt: (9,)}), depth=2)
    driver.run(prompt, eos=(9,), max_tokens=8)  # the eighth position was computed by a step that did not count
    assert driver.scheduler.stats().num_tree_blocks == 1


def test_salts_separate_tenants():
    driver = Driver(layout(64))
    driver.run(range(20), cache_salt="a", max_tokens=2)
    assert driver.run(range(20), cache_salt="b", max_tokens=2).events[0].num_cached == 0
    assert driver.run(range(20), cache_salt="a", max_tokens=2).events[0].num_cached == 16
    assert driver.run(range(20), adapter_id=3, cache_salt="a", max_tokens=2).events[0].num_cached == 0


def test_a_whole_prompt_in_the_cache_leaves_one_token_to_compute():
    driver = Driver(layout(64))
    driver.run(range(16), max_tokens=5)
    assert driver.run(range(16), max_tokens=5).events[0].num_cached == 12


@pytest.mark.parametrize("groups", [(FULL,), (FULL, sliding(5))])
def test_reset_empties_the_tree_and_bars_running_requests(groups):
    driver = Driver(layout(64, 4, *groups))
    driver.run(range(16), max_tokens=3)
    driver.submit(range(30, 50), max_tokens=20)
    for _ in range(5):
        driver.step()
    assert driver.scheduler.reset_prefix_cache() > 0
    driver.drain()
    stats = driver.scheduler.stats()
    assert stats.num_tree_blocks == 0 and stats.num_free_blocks == stats.num_blocks
    assert driver.run(range(16), max_tokens=3).events[0].num_cached == 0


def test_without_caching_nothing_stays():
    driver = Driver(layout(64), enable_prefix_caching=False)
    for _ in range(2):
        assert driver.run(range(20), max_tokens=8).events[0].num_cached == 0
    assert driver.scheduler.stats().num_free_blocks == 64


def test_cached_pages_are_taken_when_needed():
    driver = Driver(layout(12))
    for k in range(6):
        driver.run([k] * 20, max_tokens=20)
    stats = driver.scheduler.stats()
    assert stats.evicted_blocks_total > 20 and stats.preemptions_total == 0
