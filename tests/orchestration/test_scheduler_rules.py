"""The scheduler's rules one by one: limits, finishing, chunks, order, refusals, deadlines, aborts, choices."""

from __future__ import annotations

import random

import pytest
from sched_driver import FULL, Driver, layout, sliding

from hexad.common.errors import ConfigError, ContextLengthError, NeverFitsError, OverloadedError, RequestError
from hexad.engine.executor.fake import FakeScript, Fault
from hexad.orchestration.intake import MAX_RETRY_S, MIN_RETRY_S
from hexad.orchestration.settings import SchedulerSettings

PROMPT = tuple(range(10, 23))  # 13 tokens


def scripted(prompt, outputs, **more) -> FakeScript:
    return FakeScript(vocab_size=100, outputs={tuple(prompt): tuple(outputs)}, **more)


# -- finishing


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_finish_reasons(depth):
    driver = Driver(layout(64), script=scripted(PROMPT, [5, 6, 7, 8, 9]), depth=depth)
    eos = driver.run(PROMPT, eos=(7,), max_tokens=20)
    assert (eos.tokens, eos.finish_reason, eos.events[-1].stop_token_id) == ([5, 6, 7], "stop", 7)
    stop_id = driver.run(PROMPT, eos=(99,), stop_token_ids=(6,), max_tokens=20)
    assert (stop_id.tokens, stop_id.finish_reason, stop_id.events[-1].stop_token_id) == ([5, 6], "stop", 6)
    ignored = driver.run(PROMPT, eos=(7,), ignore_eos=True, max_tokens=5)
    assert (ignored.tokens, ignored.finish_reason, ignored.events[-1].stop_token_id) == ([5, 6, 7, 8, 9], "length", None)
    both = driver.run(PROMPT, eos=(7,), max_tokens=3)
    assert (both.tokens, both.finish_reason) == ([5, 6, 7], "stop"), "EOS at the last allowed token is a stop"


@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_computes_a_token_past_max_tokens(depth):
    driver = Driver(layout(64), depth=depth)
    driver.run(PROMPT, max_tokens=5)
    assert sum(plan.num_tokens for plan in driver.plans) == len(PROMPT) + 4, "the last token is never computed"


def test_a_finish_found_late_drops_the_overshoot():
    driver = Driver(layout(64), script=scripted(PROMPT, [5, 6]), depth=2)
    seen = driver.run(PROMPT, eos=(6,), max_tokens=20)
    assert seen.tokens == [5, 6] and seen.finish_reason == "stop"
    assert len(driver.plans) == 3, "one step was in flight when EOS became known, and its token went nowhere"


def test_min_tokens_lets_stop_ids_pass():
    driver = Driver(layout(64), script=scripted(PROMPT, [7, 7, 7, 7]))
    assert driver.run(PROMPT, eos=(7,), min_tokens=2, max_tokens=10).tokens == [7, 7, 7]


def test_max_tokens_zero_computes_the_prompt_only():
    driver = Driver(layout(64), max_num_batched_tokens=8)
    seen = driver.run(PROMPT, max_tokens=0)
    assert (seen.tokens, seen.finish_reason) == ([], "length")
    assert [len(plan.rows) for plan in driver.plans] == [1, 1] and not any(row.samples for plan in driver.plans for row in plan.rows)


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("preempt_at", [None, 1])
def test_b09_prompt_logprobs_come_once_and_complete(max_tokens, budget, preempt_at):
    driver = Driver(layout(64), max_num_batched_tokens=budget)
    driver.scheduler.preempt_hook = lambda step: step == preempt_at
    driver.run(PROMPT, max_tokens=3)
    seen = driver.run(PROMPT, max_tokens=max_tokens, prompt_logprobs=2, logprobs=2)
    assert len(seen.prompt_logprobs) == len(PROMPT) and seen.prompt_logprobs[0] is None
    assert len(seen.logprobs) == len(seen.tokens) == max_tokens
    assert sum(bool(event.prompt_logprobs) for event in seen.events) == 1
    assert seen.events[0].num_cached == 0, "a cached prefix has no logits: the request must not use it"


def test_only_choice_0_reports_prompt_logprobs():
    driver = Driver(layout(64))
    rids = driver.submit(PROMPT, n=3, prompt_logprobs=0)
    driver.drain()
    assert [len(driver.seen[rid].prompt_logprobs) for rid in rids] == [len(PROMPT), 0, 0]


def test_one_failing_request_harms_nobody_else():
    driver = Driver(layout(64), faults=(Fault(kind="nan", step=3, rid=0),))
    bad, good = driver.submit(PROMPT, max_tokens=9)[0], driver.submit(PROMPT, max_tokens=9)[0]
    driver.drain()
    assert "NaN" in driver.seen[bad].error and driver.seen[bad].events[-1].error_code == "request_failed"
    assert driver.seen[good].finish_reason == "length"


# -- limits


def test_refusals_say_what_would_work():
    driver = Driver(layout(8, 4), max_model_len=64)
    with pytest.raises(ContextLengthError, match="prompt has 64 tokens, model context is 64: shorten it to at most 63"):
        driver.submit([1] * 64)
    with pytest.raises(ContextLengthError, match=r"max_tokens is 60, model context is 64: send max_tokens of at most 44"):
        driver.submit([1] * 20, max_tokens=60)
    with pytest.raises(NeverFitsError, match=r"39 tokens of KV are needed, the whole KV pool holds 32 .*max_tokens of at most 13"):
        driver.submit([1] * 20, max_tokens=20)
    with pytest.raises(NeverFitsError, match="shorten the prompt to at most 32"):
        driver.submit([1] * 40, max_tokens=1)
    with pytest.raises(RequestError, match="no tokens"):
        driver.submit([])
    with pytest.raises(RequestError, match="negative"):
        driver.submit([-1])
    driver.submit([1], request_id="twice")
    with pytest.raises(RequestError, match="in use"):
        driver.submit([1], request_id="twice")
    assert driver.run([1] * 20, max_tokens=13).finish_reason == "length", "the value that the message gave works"
    assert len(driver.run([1] * 20, max_tokens=None).tokens) == 13, "without a limit the output is what the pool holds"


def test_the_whole_pool_and_the_whole_context_can_be_used():
    driver = Driver(layout(16, 4), max_model_len=64)
    assert len(driver.run([1] * 63, max_tokens=1).tokens) == 1
    assert len(driver.run([1], max_tokens=63).tokens) == 63
    assert driver.run([1] * 64, max_tokens=0).finish_reason == "length"


@pytest.mark.parametrize(
    "values",
    [
        {"max_num_seqs": 65},
        {"max_num_seqs": 0},
        {"enable_chunked_prefill": False},
        {"max_prefill_tokens_per_step": 0},
        {"scheduling_policy": "lifo"},
        {"tenant_weights": {"a": 0.0}},
    ],
)
def test_contradicting_settings_are_refused(values):
    with pytest.raises(ConfigError):
        SchedulerSettings(**{"max_num_batched_tokens": 64, "max_num_seqs": 8, **values}).check()


# -- the budget


@pytest.mark.parametrize("budget", [8, 9, 16, 64])
def test_chunks_of_any_size_give_the_same_tokens(budget):
    driver = Driver(layout(128), max_num_batched_tokens=budget)
    for length in (1, 7, 8, 9, 40):
        driver.submit(range(length), max_tokens=6)
    driver.drain()
    assert max(plan.num_tokens for plan in driver.plans) <= budget


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [32, 41, 256])
@pytest.mark.parametrize("caching", [True, False])
def test_b15_tokens_depend_on_the_request_alone(depth, budget, caching):
    """Alone, among 31 others, in chunks, from the cache, asynchronously: what a request gets is its own."""
    r = random.Random(seed := random.SystemRandom().randrange(2**32))
    print("seed", seed)
    options = {"depth": depth, "enable_prefix_caching": caching, "max_num_seqs": 32, "max_num_batched_tokens": budget}
    alone = Driver(layout(512), **options).run(PROMPT, seed=4, max_tokens=30).tokens
    crowd = Driver(layout(512), **options)
    for _ in range(31):
        crowd.submit([*PROMPT[: r.randrange(13)], r.randrange(99)], seed=r.randrange(99), max_tokens=r.randrange(1, 40))
    for _ in range(2):  # cold, then warm
        assert crowd.run(PROMPT, seed=4, max_tokens=30).tokens == alone


def test_a_long_prompt_does_not_starve_decodes():
    driver = Driver(layout(256), max_num_batched_tokens=16, max_model_len=900)
    short = driver.submit([1, 2], max_tokens=30)[0]
    driver.step()
    driver.submit([3] * 400, max_tokens=2)
    for _ in range(24):
        driver.step()
    assert len(driver.seen[short].tokens) >= 22, "one token a step, whatever else there is to do"
    driver.drain()


def test_prefill_tokens_beside_decodes_are_bounded():
    driver = Driver(layout(256), max_num_batched_tokens=64, max_prefill_tokens_per_step=5, max_model_len=900)
    driver.submit([3] * 60, max_tokens=40)
    driver.step()
    assert driver.plans[0].num_tokens == 60, "nobody decodes: the whole budget"
    driver.submit([4] * 60, max_tokens=2)
    driver.drain()
    mixed = [plan for plan in driver.plans[1:] if len(plan.rows) > 1]
    assert mixed and max(plan.num_tokens for plan in mixed) <= 1 + 5


def test_without_chunks_a_prompt_is_computed_at_once():
    driver = Driver(layout(256), max_num_batched_tokens=64, max_model_len=64, enable_chunked_prefill=False)
    for length in (40, 40, 63, 5):
        driver.submit([7] * length, max_tokens=1)
    driver.drain()
    starts = [row.num_tokens for plan in driver.plans for row in plan.rows if row.start == 0]
    assert sorted(starts) == [5, 40, 40, 63] or sum(new.num_cached > 0 for plan in driver.plans for new in plan.new)


# -- order


def first_steps(driver: Driver) -> dict[int, int]:
    """rid -> step in which it was first computed."""
    return {new.rid: plan.step_id for plan in reversed(driver.plans) for new in plan.new}


def test_fcfs_keeps_the_order_of_arrival():
    driver = Driver(layout(64), max_num_seqs=1)
    rids = [driver.submit([k, k], priority=-k, max_tokens=2)[0] for k in range(5)]
    driver.drain()
    steps = first_steps(driver)
    assert [steps[rid] for rid in rids] == sorted(steps.values())


def test_priority_goes_first_and_takes_blocks_only_when_they_run_out():
    driver = Driver(layout(12, 4), scheduling_policy="priority")
    low = driver.submit(range(20), priority=5, max_tokens=20)[0]
    for _ in range(3):
        driver.step()
    small = driver.submit([1, 2, 3], priority=1, max_tokens=4)[0]
    driver.step()
    assert driver.scheduler.stats().preemptions_total == 0, "there was room for both"
    high = driver.submit(range(30, 58), priority=0, max_tokens=8)[0]
    driver.drain()
    assert driver.scheduler.stats().preemptions_total >= 1
    assert driver.seen[low].events[-1].num_preemptions >= 1
    assert driver.seen[high].events[-1].num_preemptions == driver.seen[small].events[-1].num_preemptions == 0


def test_a_better_priority_overtakes_in_the_queue():
    driver = Driver(layout(64), scheduling_policy="priority", max_num_seqs=1)
    rids = {priority: driver.submit([priority, 1], priority=priority, max_tokens=2)[0] for priority in (3, 1, 2, 0)}
    driver.drain()
    steps = first_steps(driver)
    assert sorted(rids, key=lambda priority: steps[rids[priority]]) == [0, 1, 2, 3]


def test_the_victim_is_the_latest_of_the_lowest_priority():
    driver = Driver(layout(12, 2), scheduling_policy="priority", max_num_seqs=4)
    rids = [driver.submit([k] * 4, priority=priority, max_tokens=12)[0] for k, priority in enumerate((1, 0, 1))]
    driver.drain()
    preempted = [driver.seen[rid].events[-1].num_preemptions for rid in rids]
    assert preempted[1] == 0 and preempted[2] >= 1 and preempted[2] >= preempted[0]


# -- overload, deadlines


def test_the_queue_is_bounded_by_requests():
    driver = Driver(layout(64), max_num_seqs=2, max_num_queued_reqs=3)
    for _ in range(5):
        driver.submit([1], max_tokens=2)
    with pytest.raises(OverloadedError, match=r"limit is 3 \(max_num_queued_reqs\)") as refused:
        driver.submit([1])
    assert MIN_RETRY_S <= refused.value.retry_after_s <= MAX_RETRY_S
    driver.drain()
    driver.run([1], max_tokens=1)


def test_the_queue_is_bounded_by_tokens_but_one_request_always_gets_in():
    driver = Driver(layout(64), max_num_seqs=1, max_queued_tokens=10)
    driver.submit([1] * 20, max_tokens=2)
    with pytest.raises(OverloadedError, match="max_queued_tokens"):
        driver.submit([1])
    driver.drain()


def test_retry_after_follows_the_measured_drain_rate():
    driver = Driver(layout(64), max_num_seqs=1, max_num_queued_reqs=1)
    for _ in range(10):  # one admission each 2 s
        driver.submit([1], max_tokens=1)
        driver.drain()
        driver.clock.advance(2.0)
    driver.submit([1])
    driver.submit([1])
    waits = set()
    for _ in range(20):
        with pytest.raises(OverloadedError) as refused:
            driver.submit([1])
        waits.add(refused.value.retry_after_s)
    assert len(waits) > 10, "jittered"
    assert all(1.4 <= wait <= 2.6 for wait in waits)


def test_deadlines_end_waiting_and_running_requests():
    driver = Driver(layout(64), max_num_seqs=1)
    running = driver.submit([1], max_tokens=100, deadline_s=5.0)[0]
    waiting = driver.submit([1], max_tokens=100, deadline_s=3.0)[0]
    patient = driver.submit([1], max_tokens=3, deadline_s=100.0)[0]
    for _ in range(4):
        driver.step()
    driver.clock.advance(3.0)
    driver.expire()
    assert driver.seen[waiting].events[-1].error_code == "deadline_exceeded" and not driver.seen[running].ended
    driver.clock.advance(2.0)
    driver.expire()
    assert driver.seen[running].ended and "deadline of 5 s" in driver.seen[running].error
    driver.drain()
    assert driver.seen[patient].finish_reason == "length"


# -- aborts


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("after", range(7))
def test_b36_an_abort_frees_everything_within_one_step(after, depth):
    """Queued, in prefill, in decode, with results in flight, n = 4; neighbours go on unharmed."""
    driver = Driver(layout(64), max_num_batched_tokens=8, max_num_seqs=6, depth=depth)
    neighbour = driver.submit(PROMPT, max_tokens=30)[0]
    gone = driver.submit(PROMPT, n=4, max_tokens=200)
    for _ in range(after):
        driver.step()
    driver.abort(gone[0])
    assert all(driver.seen[rid].finish_reason == "abort" for rid in gone)
    before = len(driver.plans)
    driver.drain()
    late = {row.rid for plan in driver.plans[before:] for row in plan.rows}
    assert not late.intersection(gone), "no step after the abort computes for it"
    assert driver.seen[neighbour].finish_reason == "length"


def test_b36_a_thousand_aborts_leave_nothing_behind():
    r = random.Random(seed := random.SystemRandom().randrange(2**32))
    print("seed", seed)
    driver = Driver(layout(128), max_num_seqs=6, check=False)
    normal = [driver.submit([k, 1, 2], max_tokens=200)[0] for k in range(2)]
    for _ in range(1_000):
        rid = driver.submit([r.randrange(3) for _ in range(r.randrange(1, 12))], n=r.choice([1, 1, 4]), max_tokens=40)[0]
        for _ in range(r.randrange(4)):
            driver.step()
        driver.abort(rid)
    driver.scheduler.check_integrity()
    driver.drain()
    assert all(driver.seen[rid].finish_reason == "length" for rid in normal)
    assert len(driver.executor._states) <= 8, "the executor forgets what was aborted"


def test_one_choice_can_be_aborted_alone():
    driver = Driver(layout(64))
    rids = driver.submit(PROMPT, n=3, max_tokens=10)
    for _ in range(4):
        driver.step()
    driver.abort(rids[1], choice=1)
    driver.drain()
    assert [driver.seen[rid].finish_reason for rid in rids] == ["length", "abort", "length"]


def test_unknown_aborts_are_ignored():
    driver = Driver(layout(64))
    driver.submit([1], request_id="mine")
    assert driver.scheduler.abort("theirs") == []
    assert driver.scheduler.abort("mine", front_end=b"other") == [], "ids belong to their front end"
    driver.drain()


# -- choices of one prompt


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 8, 13, 16, 17])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, sliding(6))])
def test_choices_share_the_prompt_without_computing_it_again(caching, length, groups):
    driver = Driver(layout(128, 4, *groups), enable_prefix_caching=caching)
    rids = driver.submit(range(length), n=4, seed=3, max_tokens=6)
    driver.drain()
    assert len({tuple(driver.seen[rid].tokens) for rid in rids}) == 4, "choices differ"
    computed = sum(row.num_tokens for plan in driver.plans for row in plan.rows if row.start < length)
    assert computed == length + 3, "each further choice computes the last prompt token alone"
    assert sum(plan.num_tokens for plan in driver.plans) == length + 3 + 4 * 5
    if not caching:
        assert driver.scheduler.stats().num_tree_blocks == 0, "what was kept for the choices is gone"
        assert driver.scheduler.stats().prefix_queries_total == 0


def test_full_blocks_of_the_prompt_are_held_once():
    driver = Driver(layout(128, 4), max_num_seqs=8)
    driver.submit(range(40), n=4, max_tokens=20)
    for _ in range(6):
        driver.step()
    used = driver.scheduler.stats().num_blocks - driver.scheduler.stats().num_free_blocks
    assert used <= 10 + 4 * 2, "ten prompt blocks, once, and each choice's own"
    driver.drain()


def test_the_source_of_a_copy_is_not_reused_while_the_copy_is_in_flight():
    """Choice 0 ends while the plan that copies its last block runs, without a row of its own in that plan."""
    driver = Driver(layout(64), depth=2)
    driver.submit(range(6), n=2, max_tokens=2)
    while not any(plan.kv_moves for plan in driver.plans):
        driver.step()
    driver.collect()
    for k in range(4):
        driver.submit([k] * 6, max_tokens=1)
    driver.drain()
    move = next(plan for plan in driver.plans if plan.kv_moves)
    assert all(row.rid != 0 for row in move.rows) and move.kv_moves[0].num_tokens == 1


def test_a_blocked_prompt_is_tried_again_when_blocks_come_back():
    driver = Driver(layout(16), max_num_batched_tokens=64)
    driver.submit([1] * 30, max_tokens=20)
    driver.step()
    blocked = driver.submit([2] * 40, max_tokens=2)[0]
    small = driver.submit([3], max_tokens=2)[0]
    for _ in range(10):
        driver.step()
    assert driver.scheduler.get(blocked).queued_s is None and driver.scheduler.get(small).queued_s is None, "nobody passes the head"
    driver.drain()


def test_deadlines_of_ended_requests_do_not_pile_up():
    driver = Driver(layout(16), check=False)
    for _ in range(500):
        driver.run([1], max_tokens=1, deadline_s=1e6)
    assert len(driver.scheduler._deadlines) <= 70


@pytest.mark.parametrize("how", ["abort", "fail", "deadline"])
def test_choices_go_on_without_the_first(how):
    faults = (Fault(kind="nan", step=1, rid=0),) if how == "fail" else ()
    driver = Driver(layout(64), max_num_batched_tokens=8, faults=faults)
    rids = driver.submit(PROMPT, n=3, max_tokens=5)
    driver.launch()
    if how == "abort":
        driver.abort(rids[0], choice=0)
    elif how == "deadline":
        driver.scheduler.get(rids[0]).deadline_s = 0.0
        driver.scheduler._deadlines.append((0.0, rids[0]))
        driver.expire()
    driver.drain()
    assert driver.seen[rids[0]].finish_reason in ("abort", None)
    assert [driver.seen[rid].finish_reason for rid in rids[1:]] == ["length", "length"]


def test_b08_the_prompt_and_its_cached_part_are_counted_once():
    driver = Driver(layout(128, 4))
    driver.run(PROMPT, max_tokens=4)
    for n in (1, 3):
        rids = driver.submit(PROMPT, n=n, max_tokens=4)
        driver.drain()
        told = [driver.seen[rid].events[0].num_cached for rid in rids]
        assert told == [12] + [None] * (n - 1)
    stats = driver.scheduler.stats()
    assert stats.prompt_tokens_total == 3 * len(PROMPT) and stats.generation_tokens_total == 5 * 4
    assert stats.prefix_hits_total >= 24


def test_queue_time_is_told_with_the_first_event():
    driver = Driver(layout(64))
    rid = driver.submit(PROMPT)[0]
    driver.clock.advance(1.5)
    driver.drain()
    assert driver.seen[rid].events[0].queued_s == 1.5


def test_seeds_come_from_the_request_or_the_source():
    driver = Driver(layout(64))
    for seed, expected in ((7, 7), (-1, 2**64 - 1), (None, 123)):
        rid = driver.scheduler.add(_submit(seed), seed_source=lambda: 123)[0]
        assert driver.scheduler.get(rid).seed == expected
        driver.scheduler.abort("s")


def _submit(seed):
    from hexad.common.params import SamplingParams
    from hexad.engine.plan import TokenSegment
    from hexad.orchestration.messages import Submit

    return Submit(request_id="s", prompt=(TokenSegment((1,)),), params=SamplingParams(max_tokens=2, seed=seed))


# -- drafts


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_change_nothing_but_the_number_of_steps(depth):
    plain = Driver(layout(64), depth=depth, max_model_len=200)
    drafted = Driver(layout(64), depth=depth, max_model_len=200, drafts=3)
    expected = plain.run(PROMPT, max_tokens=60).tokens
    assert drafted.run(PROMPT, max_tokens=60).tokens == expected
    assert sum(row.num_drafts for plan in drafted.plans for row in plan.rows) > 10
    if depth == 1:
        assert len(drafted.plans) < len(plain.plans)


# -- a prefix that is being computed


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("groups", [(), (FULL, sliding(8))], ids=["full", "windowed"])
def test_prompts_that_come_together_share_a_prefix_that_is_being_computed(depth, budget, groups):
    driver = Driver(layout(128, 4, *groups), depth=depth, max_num_batched_tokens=budget)
    prefix = tuple(range(10, 50))
    rids = [driver.submit((*prefix, 60 + i, 61 + i), max_tokens=4)[0] for i in range(6)]
    driver.drain()
    computed = sum(row.num_tokens for plan in driver.plans for row in plan.rows if row.start < len(prefix) + 2)
    assert computed <= len(prefix) + 6 * 2 + 6 * 4, "the prefix was computed once"
    assert all(driver.seen[rid].finish_reason == "length" for rid in rids)
    assert driver.replayer.report().ok


def test_nobody_waits_for_a_few_blocks_or_where_nothing_is_cached():
    for prefix, caching in ((tuple(range(10, 20)), True), (tuple(range(10, 50)), False)):
        driver = Driver(layout(128), enable_prefix_caching=caching, max_num_batched_tokens=256)
        for i in range(3):
            driver.submit((*prefix, 60 + i, 61 + i), max_tokens=2)
        driver.launch()
        assert len(driver.plans[0].rows) == 3, "all start in the first step"


def test_who_waits_for_a_prefix_goes_on_when_its_owner_ends():
    driver = Driver(layout(128), depth=1, max_num_batched_tokens=16)
    prefix = tuple(range(10, 50))
    first = driver.submit((*prefix, 60), max_tokens=4)[0]
    second = driver.submit((*prefix, 70), max_tokens=4)[0]
    driver.launch()
    driver.collect()
    assert [row.rid for plan in driver.plans for row in plan.rows] == [first]
    driver.abort(first)
    driver.drain()
    assert driver.seen[second].finish_reason == "length"
    computed = sum(row.num_tokens for plan in driver.plans for row in plan.rows if row.rid == second and row.start < 41)
    assert computed == 41 - 16, "what the first had computed is shared"


def test_the_engines_seed_draws_those_of_requests_that_name_none():
    def drawn(seed):
        driver = Driver(layout(64), seed=seed)
        return [driver.scheduler.get(driver.submit(PROMPT, seed=None)[0]).seed for _ in range(3)]

    assert drawn(5) == drawn(5) != drawn(6)
    assert drawn(None) != drawn(None) and len(set(drawn(5))) == 3


@pytest.mark.parametrize("more", [{"enable_prefix_caching": False}, {"prompt_logprobs": 1}], ids=str)
def test_prompts_that_nobody_waits_for_are_forgotten(more):
    fields = {key: value for key, value in more.items() if key == "prompt_logprobs"}
    driver = Driver(layout(64), **{key: value for key, value in more.items() if key not in fields})
    for i in range(20):
        driver.run(range(i, i + 30), max_tokens=1, **fields)
    assert len(driver.scheduler._planner._filling) <= 1


def test_nobody_waits_for_a_prompt_that_is_served_after_it():
    """A better priority would wait as long as third parties keep the worse one waiting."""
    driver = Driver(layout(6_000), max_model_len=20_000, scheduling_policy="priority", max_num_batched_tokens=64)
    prefix = list(range(1, 90)) * 2
    driver.submit([*prefix, 5], priority=5, max_tokens=1)
    driver.step()
    driver.submit([7] * 4_000, priority=3, max_tokens=1)
    driver.step()
    first = driver.submit([*prefix, 6], priority=0, max_tokens=1)[0]
    for _ in range(12):
        driver.step()
    assert driver.seen[first].ended
    driver.drain()
