"""Pages of full and sliding groups: what stays, what goes, what a hit needs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sched_driver import FULL, Driver, layout, sliding

from hexad.engine.plan import NO_BLOCK, KVGroupSpec
from hexad.orchestration.kv.groups import FullRule, SlidingRule, make_rule
from hexad.orchestration.kv.manager import KVManager
from hexad.orchestration.kv.radix import Node


def path_of(pages: list[int]) -> list[Node]:
    nodes = []
    for page in pages:
        node = Node(None, b"", 1, ("", None, "", "", 0))
        node.pages[0] = page
        nodes.append(node)
    return nodes


@given(size=st.integers(1, 5), window=st.integers(1, 12), start=st.integers(0, 60))
def test_b46_exactly_the_pages_of_the_window_are_needed(size, window, start):
    visible = range(max(0, start - window + 1), start + 1)  # `window` keys, the position itself included
    rule = SlidingRule(size, window)
    assert rule.first_page(start) == visible[0] // size
    assert len({position // size for position in visible}) <= rule.min_pages(start + 1)


@given(size=st.integers(1, 4), window=st.integers(1, 12), pages=st.lists(st.sampled_from([NO_BLOCK, 1]), max_size=12))
def test_b46_a_hit_is_usable_only_if_the_window_is_there(size, window, pages):
    usable = SlidingRule(size, window).usable_blocks(path_of(pages), 0)
    for length, answer in enumerate(usable):
        position = length * size  # the first one computed after the hit
        read = {p // size for p in range(max(0, position - window + 1), position)}
        assert answer == all(pages[page] != NO_BLOCK for page in read)


@given(size=st.integers(1, 4), pages=st.lists(st.sampled_from([NO_BLOCK, 1]), max_size=12))
def test_a_full_group_needs_every_page(size, pages):
    usable = FullRule(size).usable_blocks(path_of(pages), 0)
    assert usable == [all(page != NO_BLOCK for page in pages[:length]) for length in range(len(pages) + 1)]


@pytest.mark.parametrize("kind", ["full", "latent", "cross"])
def test_kinds_that_are_read_in_full(kind):
    rule = make_rule(KVGroupSpec(kind=kind, num_layers=2), 4)
    assert not rule.windowed and rule.first_page(100) == 0 and rule.min_pages(9) == 3


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
@pytest.mark.parametrize("prompt_len", [5, 7, 8, 9, 10, 17, 40])
def test_b46_every_path_through_a_window_is_right(window, chunk, prompt_len):
    """In one go, in chunks, decode by decode, from a cached prefix: the fake executor reads all that the window shows."""
    driver = Driver(layout(64, 4, FULL, sliding(window)), max_num_seqs=1, max_num_batched_tokens=chunk)
    first = driver.run(range(prompt_len), max_tokens=20)
    second = driver.run(range(prompt_len), max_tokens=20)
    assert first.tokens == second.tokens
    assert second.events[0].num_cached == (prompt_len - 1) // 4 * 4


def test_b46_pages_that_fell_out_of_the_window_are_free_for_others():
    driver = Driver(layout(64, 4, sliding(8)), enable_prefix_caching=False, max_model_len=250)
    driver.submit([1] * 100, max_tokens=150)
    most = 0
    for _ in range(120):
        driver.step()
        if len(driver.plans) > 8:  # the prompt is computed and a new page was needed since
            most = max(most, 64 - driver.scheduler.stats().num_free_blocks)
    assert most <= 4, "8 keys lie in at most 3 pages of 4, and one more while a plan in flight names it"
    driver.drain()


def test_a_window_lets_requests_run_that_full_attention_could_not_hold():
    driver = Driver(layout(8, 4, sliding(8)), max_model_len=200)
    assert driver.run([1] * 90, max_tokens=100).finish_reason == "length"


def test_max_positions_is_the_largest_that_fits():
    for _ in range(50):
        seed = random.SystemRandom().randrange(2**32)
        r = random.Random(seed)
        groups = [FULL] * r.randint(0, 2) + [sliding(r.randint(1, 20)) for _ in range(r.randint(1, 2))]
        kv = KVManager(layout(r.randint(8, 60), r.randint(1, 8), *groups))
        limit = r.randint(1, 500)
        best = max(n for n in range(limit + 1) if kv.min_pages(n) <= kv.pool.num_blocks)
        assert kv.max_positions(limit) == best, f"seed {seed}"
