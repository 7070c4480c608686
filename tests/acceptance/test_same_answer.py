"""The same answer whatever the batch, the chunks, the cache, the order of launching, the size of the pool: one at a time and combined."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from whole_engine import KINDS, Ask, Setup, World, alone, assert_same, random_asks, random_params, run, usage

from hexad.orchestration.result import RequestOutput

NUM_ASKS = 8


class Case:
    def __init__(self, world: World) -> None:
        self.world = world
        self.asks = random_asks(world, NUM_ASKS)
        self.expected: list[RequestOutput] = alone(world, self.asks)


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    made = Case(World(tmp_path_factory.mktemp("model"), request.param))
    yield made
    made.world.executor.close()


@pytest.fixture(autouse=True)
def show_seed(case: Case) -> None:
    print(f"seed {case.world.seed}")


def test_the_requests_are_worth_it(case: Case) -> None:
    """Most of them end at a stop, and the choices of one request differ."""
    reasons = [choice.finish_reason for result in case.expected for choice in result.outputs]
    assert set(reasons) <= {"stop", "length"}
    assert all(total > 0 for _, total in map(usage, case.expected))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_b15_chunks(case: Case, chunk: int | None, depth: int) -> None:
    got = run(case.world, case.asks, Setup(depth=depth, chunk=chunk, max_num_seqs=24))
    assert_same(case.world, case.asks, got.results, case.expected)
    for ask in case.asks[:2]:
        single = run(case.world, [ask], Setup(depth=depth, chunk=chunk, max_num_seqs=4))
        assert_same(case.world, [ask], single.results, [case.expected[case.asks.index(ask)]])


def test_b15_whole_prompts(case: Case) -> None:
    assert_same(case.world, case.asks, run(case.world, case.asks, Setup(depth=2, chunked=False)).results, case.expected)


@pytest.mark.parametrize("depth", [1, 2])
def test_b15_cold_and_warm_cache(case: Case, depth: int) -> None:
    cold = run(case.world, case.asks, Setup(depth=depth, caching=True))
    warm = run(case.world, case.asks, Setup(depth=depth, caching=True), times=2)
    assert warm.stats.prefix_hits_total > cold.stats.prefix_hits_total
    for got in (cold, warm):
        assert_same(case.world, case.asks, got.results, case.expected)
    for ask, result in zip(case.asks, warm.results, strict=True):
        assert 0 <= result.metrics.num_cached_tokens < len(ask.prompt)


@pytest.mark.parametrize("count", [7, 31])
def test_b15_among_neighbours(case: Case, count: int) -> None:
    """Neighbours come at any time, some leave in the middle."""
    world, rng = case.world, case.world.rng
    neighbours = [
        Ask(tuple(world.prompt()), random_params(world), rng.randrange(20), rng.choice([None, None, rng.randrange(40)]))
        for _ in range(count)
    ]
    for index in range(NUM_ASKS):
        mine = dataclasses.replace(case.asks[index], at_step=rng.randrange(10))
        got = run(world, [*neighbours, mine], Setup(depth=2, caching=True, budget=60))
        assert_same(world, [mine], got.results[count:], [case.expected[index]])


def random_setup(world: World) -> Setup:
    rng = world.rng
    disturbed = frozenset(rng.sample(range(150), rng.choice([0, 5, 40])))  # not at a fixed distance: a chunked prompt must get through
    return Setup(
        depth=rng.choice([1, 2]),
        caching=rng.random() < 0.6,
        chunk=rng.choice([None, None, 1, 5, 7, 16, 64]),
        budget=rng.choice([24, 50, 100, 4096]),
        blocks=rng.choice([24, 30, 45, 2000]),
        max_num_seqs=rng.choice([1, 3, 8, 24]),
        policy=rng.choice(["fcfs", "priority", "fair"]),
        preempt=lambda step: step in disturbed,
    )


@pytest.mark.parametrize("example", range(12))
def test_b15_b37_everything_combined(case: Case, example: int) -> None:
    world, rng = case.world, case.world.rng
    setup = random_setup(world)
    asks = [dataclasses.replace(ask, at_step=rng.randrange(12)) for ask in case.asks]
    order = rng.sample(range(NUM_ASKS), NUM_ASKS)
    print(setup, order)
    got = run(world, [asks[index] for index in order], setup, times=rng.choice([1, 1, 2]))
    assert_same(world, [asks[index] for index in order], got.results, [case.expected[index] for index in order])
