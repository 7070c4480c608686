"""A request says the same whenever it is preempted, whatever it asks for."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from whole_engine import BLOCK_SIZE, KINDS, Ask, Run, Setup, World, alone, assert_same, random_asks, random_params, run, with_stops

from hexad.common.params import SamplingParams


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("model"), request.param)
    yield made
    made.executor.close()


@pytest.fixture(autouse=True)
def show_seed(world: World) -> None:
    print(f"seed {world.seed}")


def everything(world: World) -> tuple[Ask, Run]:
    """One request with all that keeps a history, choices and log-probabilities included, that meets a stop string and a stop token."""
    rng = world.rng
    for _ in range(50):
        params = SamplingParams(
            n=3,
            max_tokens=rng.randint(8, 14),
            min_tokens=3,
            temperature=1.0,
            top_p=0.95,
            seed=rng.randrange(2**63),
            logprobs=2,
            prompt_logprobs=1,
            presence_penalty=0.6,
            frequency_penalty=0.4,
            repetition_penalty=1.2,
            logit_bias=dict.fromkeys(world.ids(5), 2.0),
        )
        prompt = tuple(world.ids(rng.choice([5, 17, 30])))
        first, second, third = run(world, [Ask(prompt, params)]).results[0].outputs
        stops = {
            "stop_token_ids": tuple(first.token_ids[-3:-2]),
            "stop": tuple(filter(None, [second.text[len(second.text) // 2 :][:3]])),
            "bad_words_ids": (tuple(third.token_ids[1:2] or [1]),),
        }
        ask = Ask(prompt, msgspec.structs.replace(params, **stops))
        undisturbed = run(world, [ask], Setup(chunk=11, max_num_seqs=4))
        reasons = {type(choice.stop_reason) for choice in undisturbed.results[0].outputs}
        if {int, str} <= reasons and undisturbed.stats.steps_total > 10:
            return ask, undisturbed
    raise AssertionError("no request meets both kinds of stop")


@pytest.mark.parametrize("depth", [1, 2])
def test_b37_preempted_at_every_step_in_turn(world: World, depth: int) -> None:
    ask, expected = everything(world)
    undisturbed = run(world, [ask], Setup(depth=depth, chunk=11, max_num_seqs=4))
    assert_same(world, [ask], undisturbed.results, expected.results, cached=True)
    preempted = 0
    for k in range(1, undisturbed.stats.steps_total):
        got = run(world, [ask], Setup(depth=depth, chunk=11, max_num_seqs=4, preempt=lambda step, k=k: step == k))
        assert got.stats.preemptions_total > 0 or k >= undisturbed.stats.steps_total - depth, f"step {k} was never reached"
        assert_same(world, [ask], got.results, undisturbed.results, cached=True)
        preempted += got.stats.preemptions_total
    assert preempted > 0


@pytest.mark.parametrize("every", [2, 3, 5])
def test_b37_preempted_again_and_again(world: World, every: int) -> None:
    asks = random_asks(world, 6)
    expected = alone(world, asks)
    got = run(world, asks, Setup(depth=2, caching=True, preempt=lambda step: step % every == 0))
    assert got.stats.preemptions_total > 0
    assert_same(world, asks, got.results, expected)


@pytest.mark.parametrize("depth", [1, 2])
def test_b37_a_pool_that_holds_a_third_of_the_load(world: World, depth: int) -> None:
    """Natural preemption: eight long requests on a pool for about three."""
    asks = []
    for _ in range(8):
        params = msgspec.structs.replace(random_params(world), n=1, max_tokens=60, min_tokens=0, stop_token_ids=(), ignore_eos=True)
        asks.append(Ask(tuple(world.ids(70)), params))
    asks[3] = Ask(asks[3].prompt, msgspec.structs.replace(asks[3].params, n=3, temperature=0.8))
    for index, seen in enumerate(alone(world, asks)):
        if index in (1, 5, 7):  # the others run to their end: they cannot all fit
            asks[index] = Ask(asks[index].prompt, with_stops(world, asks[index].params, seen))
    expected = alone(world, asks)
    need = {"full": -(-(70 + 60) // BLOCK_SIZE), "sliding": 5}  # pages that one request holds at its end
    pages = 3 * sum(need[group.kind] for group in world.groups)
    got = run(world, asks, Setup(depth=depth, blocks=pages // len(world.groups), caching=True, budget=100))
    assert got.stats.preemptions_total > 0 or need["full"] * len(world.groups) > pages  # windows alone may just get by
    assert_same(world, asks, got.results, expected)
