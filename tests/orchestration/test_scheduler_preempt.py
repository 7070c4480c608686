"""Preemption by recompute: forced at every step in turn, and under memory pressure. Nothing that a client sees may change."""

from __future__ import annotations

import pytest
from sched_driver import FULL, Driver, Seen, layout, sliding

from hexad.engine.executor.fake import FakeScript

PROMPT = tuple(range(3, 24))
SCRIPT = FakeScript(vocab_size=60, eos_every=25)


def told(seen: Seen) -> tuple:
    """All that a client may notice of one choice, but for timing and the number of preemptions."""
    last = seen.events[-1]
    return (
        seen.tokens,
        [tuple(event.token_ids) for event in seen.events],
        seen.logprobs,
        seen.prompt_logprobs,
        seen.finish_reason,
        last.stop_token_id,
        seen.events[0].num_cached,
    )


def run(hook=None, **options) -> tuple[Driver, list[tuple]]:
    driver = Driver(layout(256, 4, *options.pop("groups", (FULL,))), script=SCRIPT, **options)
    driver.scheduler.preempt_hook = hook
    rids = driver.submit(PROMPT, n=3, seed=5, logprobs=2, max_tokens=12, eos=(7,))
    rids += driver.submit(PROMPT[::-1], temperature=0.0, prompt_logprobs=1, stop_token_ids=(9, 11), max_tokens=14)
    rids += driver.submit(PROMPT[:9], min_tokens=6, max_tokens=9, eos=(7,), seed=1)
    driver.drain()
    return driver, [told(driver.seen[rid]) for rid in rids]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [8, 64])  # 8: preemption also falls into the middle of prompts
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, sliding(5))], ids=["full", "mixed"])
def test_b37_preempt_everything_at_each_step_in_turn(depth, budget, caching, groups):
    options = {"depth": depth, "max_num_batched_tokens": budget, "enable_prefix_caching": caching, "groups": groups}
    undisturbed, expected = run(**options)
    assert undisturbed.scheduler.stats().preemptions_total == 0
    num_steps = len(undisturbed.plans)
    for k in range(num_steps):
        driver, got = run(lambda step, k=k: step == k, **options)
        assert got == expected, f"preemption before step {k} shows"
        assert driver.scheduler.stats().preemptions_total > 0 or k == 0
        assert driver.scheduler.stats().prompt_tokens_total == undisturbed.scheduler.stats().prompt_tokens_total, "prompts count once"


def test_preemption_at_every_second_step():
    _, expected = run()
    driver, got = run(lambda step: step % 2 == 1)
    assert got == expected and driver.scheduler.stats().preemptions_total > 20


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_b37_memory_for_three_of_eight(depth, caching):
    """Eight long requests, blocks for about three, against each alone with plenty."""
    block_size, prompt_len, max_tokens = 16, 200, 300
    need = -(-(prompt_len + max_tokens) // block_size)
    fields = [
        {},
        {"n": 3},
        {"temperature": 0.8, "seed": 11},
        {"logprobs": 2},
        {"stop_token_ids": (5,)},
        {"temperature": 0.0},
        {"prompt_logprobs": 0},
        {"min_tokens": 250, "eos": (7,)},
    ]
    options = {"script": FakeScript(vocab_size=500), "max_model_len": 512, "depth": depth, "check": False, "max_num_batched_tokens": 256}
    prompts = [[k * 31 % 97, *range(k, k + prompt_len - 1)] for k in range(8)]

    tight = Driver(layout(3 * need, block_size), enable_prefix_caching=caching, max_num_seqs=10, **options)
    together = [tight.submit(prompt, max_tokens=max_tokens, **more) for prompt, more in zip(prompts, fields, strict=True)]
    tight.drain()
    tight.scheduler.check_integrity()
    assert tight.scheduler.stats().preemptions_total > 0

    for rids, prompt, more in zip(together, prompts, fields, strict=True):
        alone = Driver(layout(8 * need, block_size), max_num_seqs=10, **options)
        solo = alone.submit(prompt, max_tokens=max_tokens, **more)
        alone.drain()
        for rid, other in zip(rids, solo, strict=True):
            assert told(tight.seen[rid]) == told(alone.seen[other])


def test_the_count_of_preemptions_is_told_at_the_end():
    driver = Driver(layout(64))
    driver.scheduler.preempt_hook = lambda step: step in (3, 6)
    seen = driver.run(PROMPT, max_tokens=12)
    assert seen.events[-1].num_preemptions == 2 and all(not event.num_preemptions for event in seen.events[:-1])


def test_a_finish_among_the_results_of_a_preempted_request_ends_it():
    """The token in flight at the preemption is EOS: the request must not run again."""
    script = FakeScript(vocab_size=60, outputs={PROMPT: (4, 5, 6, 7)})
    driver = Driver(layout(64), script=script, depth=2)
    driver.scheduler.preempt_hook = lambda step: step == 4
    rid = driver.submit(PROMPT, eos=(7,), max_tokens=20)[0]
    driver.drain()
    assert driver.seen[rid].tokens == [4, 5, 6, 7] and driver.seen[rid].finish_reason == "stop"
    assert sum(new.rid == rid for plan in driver.plans for new in plan.new) == 1


def test_a_resumed_request_starts_from_its_cached_blocks():
    driver = Driver(layout(64))
    driver.scheduler.preempt_hook = lambda step: step == 5
    driver.run(PROMPT, max_tokens=12)
    again = [new for plan in driver.plans for new in plan.new][1]
    assert again.num_cached >= 20 and sum(len(segment.ids) for segment in again.prompt) > len(PROMPT) == again.prompt_len
