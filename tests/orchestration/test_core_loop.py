"""The core loop with the fake executor: asynchrony, aborts, failures, and exactly one end for each choice."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict

import pytest

from hexad.common.clock import ManualClock
from hexad.common.errors import EngineDeadError
from hexad.common.params import SamplingParams
from hexad.engine.executor.fake import FakeExecutor, FakeScript, FakeSpeed, Fault, reference_tokens
from hexad.engine.plan import KVGroupSpec, KVLayout, StepPlan, StepResult, TokenSegment
from hexad.orchestration.core import CoreLoop
from hexad.orchestration.messages import Output, Submit
from hexad.orchestration.metrics import StepMetrics
from hexad.orchestration.scheduler import Scheduler
from hexad.orchestration.settings import SchedulerSettings

VOCAB = 1_000
EOS = (999,)


class Seen:
    """An observer that keeps the order of what happened."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def on_plan(self, plan: StepPlan) -> None:
        self.log.append(("plan", plan.step_id))

    def on_result(self, plan: StepPlan, result: StepResult, elapsed_s: float) -> None:
        assert plan.step_id == result.step_id and elapsed_s >= 0
        self.log.append(("result", plan.step_id))

    def stats(self) -> dict[str, float]:
        return {"seen": len(self.log)}


def make(
    *,
    async_scheduling: bool = True,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    observers: tuple = (),
    clock: ManualClock | None = None,
    step_timeout_s: float = 600.0,
    max_num_queued_reqs: int | None = None,
    **executor: object,
) -> CoreLoop:
    clock = clock or ManualClock()
    layout = KVLayout(num_blocks=num_blocks, block_size=4, groups=(KVGroupSpec(kind="full", num_layers=1),))
    settings = SchedulerSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=200,
        depth=2 if async_scheduling else 1,
        max_num_queued_reqs=max_num_queued_reqs,
    )
    fake = FakeExecutor(clock=clock, **executor)
    fake.allocate(layout)
    return CoreLoop(
        fake,
        Scheduler(settings, layout, clock),
        clock,
        vocab_size=VOCAB,
        async_scheduling=async_scheduling,
        observers=observers,
        step_timeout_s=step_timeout_s,
    )


def request(request_id: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 8, **params: object) -> Submit:
    return Submit(
        request_id=request_id,
        prompt=(TokenSegment(prompt),),
        params=SamplingParams(max_tokens=max_tokens, **params),
        eos_token_ids=EOS,
    )


def run(core: CoreLoop, steps: int = 100_000) -> list[Output]:
    """Turn the loop until it is idle; the news of the unnamed front end."""
    outputs = []
    while core.has_work():
        outputs += core.step().get(b"", [])
        core.scheduler.check_integrity()
        steps -= 1
        assert steps, "it never becomes idle"
    return outputs


def tokens(outputs: list[Output]) -> dict[tuple[str, int], list[int]]:
    joined: dict[tuple[str, int], list[int]] = defaultdict(list)
    for output in outputs:
        joined[output.request_id, output.choice] += output.token_ids
    return joined


def ends(outputs: list[Output]) -> Counter:
    return Counter((o.request_id, o.choice) for o in outputs if o.finish_reason is not None or o.error is not None)


def test_idle_core_does_nothing() -> None:
    core = make()
    assert not core.has_work() and core.step() == {}


def test_tokens_are_the_reference() -> None:
    core = make(script=FakeScript(vocab_size=VOCAB))
    core.submit(request("a", max_tokens=12, temperature=0.0))
    outputs = run(core)
    script, params = FakeScript(vocab_size=VOCAB), SamplingParams(max_tokens=12, temperature=0.0)
    expected, reason = reference_tokens((1, 2, 3), params, eos=EOS, script=script)
    assert tokens(outputs)["a", 0] == expected and outputs[-1].finish_reason == reason
    assert outputs[0].queued_s is not None and outputs[0].num_cached == 0


def test_next_plan_is_launched_before_the_result_is_awaited() -> None:
    seen = Seen()
    core = make(observers=(seen,), speed=FakeSpeed(step_s=0.01))
    core.submit(request("a", max_tokens=6, ignore_eos=True))
    run(core)
    for step in range(5):
        assert seen.log.index(("plan", step + 1)) < seen.log.index(("result", step)), seen.log
    assert core.stats()["seen"] == len(seen.log)


def test_synchronous_loop_awaits_each_result_first() -> None:
    seen = Seen()
    core = make(observers=(seen,), async_scheduling=False)
    core.submit(request("a", max_tokens=4, ignore_eos=True))
    run(core)
    assert seen.log == [(what, step) for step in range(len(seen.log) // 2) for what in ("plan", "result")]


def workload(rng: random.Random, count: int) -> list[Submit]:
    prefixes = [tuple(rng.randrange(900) for _ in range(rng.randrange(1, 40))) for _ in range(4)]
    return [
        request(
            f"r{index}",
            rng.choice(prefixes)[: rng.randrange(1, 40)] + tuple(rng.randrange(900) for _ in range(rng.randrange(0, 20))),
            rng.randrange(0, 30),
            n=rng.choice((1, 1, 1, 2, 4)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(2**63),
            logprobs=rng.choice((None, None, 2)),
            ignore_eos=rng.random() < 0.5,
        )
        for index in range(count)
    ]


def test_asynchronous_on_and_off_give_the_same() -> None:
    seed = time.time_ns()
    print("seed", seed)
    work = workload(random.Random(seed), 60)
    results = []
    for async_scheduling in (True, False):
        core = make(async_scheduling=async_scheduling, script=FakeScript(vocab_size=VOCAB, eos_every=20), num_blocks=40)
        rng = random.Random(seed)
        outputs, waiting = [], list(work)
        while waiting or core.has_work():
            for _ in range(min(rng.randrange(3), len(waiting))):
                core.submit(waiting.pop(0))
            outputs += core.step().get(b"", [])
            core.scheduler.check_integrity()
        assert all(count == 1 for count in ends(outputs).values())
        logprobs = {key: [] for key in tokens(outputs)}
        for output in outputs:
            logprobs[output.request_id, output.choice] += output.logprobs
        reasons = {(o.request_id, o.choice): (o.finish_reason, o.error) for o in outputs if o.finish_reason or o.error}
        results.append((tokens(outputs), logprobs, reasons))
    assert results[0] == results[1]


def test_thousands_of_random_requests_each_end_once() -> None:
    seed = time.time_ns()
    print("seed", seed)
    rng = random.Random(seed)
    core = make(script=FakeScript(vocab_size=VOCAB, eos_every=15), num_blocks=60, speed=FakeSpeed(step_s=0.001), check_kv="last")
    front_ends = [b"a", b"b", b"c"]
    news: dict[bytes, list[Output]] = defaultdict(list)
    submitted: dict[tuple[bytes, str], Submit] = {}
    waiting = workload(rng, 2_000)
    while waiting or core.has_work():
        for _ in range(min(rng.choice((0, 0, 1, 4, 20)), len(waiting))):
            submit, front_end = waiting.pop(), rng.choice(front_ends)
            submitted[front_end, submit.request_id] = submit
            core.submit(submit, front_end)
        if submitted and rng.random() < 0.3:
            front_end, request_id = rng.choice(list(submitted))
            core.abort(request_id, front_end, rng.choice((None, None, 0, 1)))
        for front_end, outputs in core.step().items():
            news[front_end] += outputs
    for (front_end, request_id), submit in submitted.items():
        mine = [output for output in news[front_end] if output.request_id == request_id]
        count = ends(mine)
        assert count == {(request_id, choice): 1 for choice in range(submit.params.n)}, (request_id, count)
        for choice in range(submit.params.n):
            last = [output for output in mine if output.choice == choice][-1]
            assert last.finish_reason is not None or last.error is not None, "nothing after the end"
    core.scheduler.check_integrity()
    stats = core.stats()
    assert stats["num_running"] == stats["num_waiting"] == stats["live_requests"] == stats["steps_in_flight"] == 0
    assert stats["num_free_blocks"] + stats["num_cached_blocks"] == stats["num_blocks"]


def test_abort_takes_effect_within_one_step() -> None:
    core = make(speed=FakeSpeed(step_s=0.01))
    core.submit(request("a", max_tokens=100, ignore_eos=True))
    core.submit(request("b", max_tokens=100, ignore_eos=True))
    for _ in range(5):
        core.step()
    core.abort("a")
    (end,) = [output for output in core.step()[b""] if output.request_id == "a"]
    assert end.finish_reason == "abort"
    assert core.stats()["num_running"] == 1
    assert {output.request_id for output in run(core)} == {"b"}


def test_abort_before_the_first_step_and_of_unknown_ids() -> None:
    core = make()
    core.abort("nobody")
    core.submit(request("a", n=3))
    core.abort("a")
    core.abort("a")
    outputs = run(core)
    assert [output.finish_reason for output in outputs] == ["abort"] * 3


def test_abort_in_the_last_step_ends_once() -> None:
    core = make()
    core.submit(request("a", max_tokens=3, ignore_eos=True))
    outputs = []
    while core.has_work():
        outputs += core.step().get(b"", [])
        if len(tokens(outputs)["a", 0]) >= 2:
            core.abort("a")
    assert ends(outputs)["a", 0] == 1


def test_a_failed_row_fails_alone() -> None:
    core = make(faults=(Fault(kind="nan", step=3, rid=0),))
    core.submit(request("bad", max_tokens=50, ignore_eos=True))
    core.submit(request("good", (4, 5), max_tokens=50, ignore_eos=True))
    outputs = run(core)
    (bad,) = [output for output in outputs if output.error is not None]
    assert bad.request_id == "bad" and bad.error_code == "request_failed" and "NaN" in bad.error
    assert len(tokens(outputs)["good", 0]) == 50
    assert core.death is None


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_dead_executor_gives_every_live_choice_one_error(async_scheduling: bool) -> None:
    core = make(faults=(Fault(kind="die", step=4),), max_num_seqs=3, async_scheduling=async_scheduling)
    for index in range(6):
        core.submit(request(f"r{index}", max_tokens=50, ignore_eos=True, n=2))
    core.submit(request("short", max_tokens=1))
    outputs = run(core)
    count = ends(outputs)
    assert len(count) == 13 and set(count.values()) == {1}
    assert {output.error_code for output in outputs if output.error is not None} == {"engine_dead"}
    assert isinstance(core.death, EngineDeadError)
    core.submit(request("late"))
    assert core.has_work()
    (late,) = core.step()[b""]
    assert late.error_code == "engine_dead"
    assert not core.has_work() and core.step() == {}


def test_a_step_that_hangs_is_given_up() -> None:
    clock = ManualClock()
    core = make(faults=(Fault(kind="hang", step=2),), clock=clock, step_timeout_s=5.0)
    core.submit(request("a", max_tokens=50, ignore_eos=True))
    outputs, turns = [], 0
    while core.has_work():
        outputs += core.step(wait_s=0.5).get(b"", [])
        turns += 1
        assert turns < 100
    assert core.death is not None and "limit 5 s" in core.death.message
    assert outputs[-1].error_code == "engine_dead" and ends(outputs)["a", 0] == 1


def test_a_limited_wait_returns_and_goes_on_later() -> None:
    core = make(speed=FakeSpeed(step_s=1.0))
    core.submit(request("a", max_tokens=5, ignore_eos=True))
    empty = 0
    outputs = []
    while core.has_work():
        news = core.step(wait_s=0.25).get(b"", [])
        empty += not news
        outputs += news
    assert empty > 5 and len(tokens(outputs)["a", 0]) == 5


def test_a_broken_scheduler_ends_the_core_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make()
    core.submit(request("a", n=2))
    monkeypatch.setattr(core.scheduler, "update", lambda plan, result: 1 / 0)
    outputs = run_without_checks(core)
    assert ends(outputs) == {("a", 0): 1, ("a", 1): 1} and "ZeroDivisionError" in core.death.message


def run_without_checks(core: CoreLoop) -> list[Output]:
    outputs = []
    while core.has_work():
        outputs += core.step().get(b"", [])
    return outputs


def test_refusals_harm_nobody() -> None:
    core = make(max_num_queued_reqs=0, max_num_seqs=1)
    core.submit(request("first", max_tokens=20, ignore_eos=True))
    core.step()
    refused = {
        "long": request("long", tuple(range(300))),
        "empty": request("empty", ()),
        "token": request("token", (VOCAB,)),
        "negative": request("negative", (-1,)),
        "param": request("param", temperature=float("inf")),
        "many": request("many", n=10**9),
        "queue": request("queue"),
        "": request(""),
    }
    for submit in refused.values():
        core.submit(submit)
    outputs = run(core)
    codes = {output.request_id: output.error_code for output in outputs if output.error is not None}
    assert set(codes) == set(refused)
    assert codes["long"] == "context_length_exceeded" and codes["queue"] == "overloaded" and codes["many"] == "invalid_value"
    assert len(tokens(outputs)["first", 0]) == 20


def test_a_second_request_with_a_live_id_is_ignored() -> None:
    core = make()
    core.submit(request("a", max_tokens=5, ignore_eos=True))
    core.submit(request("a", max_tokens=50, ignore_eos=True))
    outputs = run(core)
    assert ends(outputs) == {("a", 0): 1} and len(tokens(outputs)["a", 0]) == 5
    core.submit(request("a", max_tokens=5, ignore_eos=True))
    assert len(tokens(run(core))["a", 0]) == 5


def test_front_ends_keep_their_own_ids_and_can_leave() -> None:
    core = make()
    for front_end in (b"x", b"y"):
        core.submit(request("same", max_tokens=30, ignore_eos=True), front_end)
    for _ in range(4):
        core.step()
    last = core.abort_front_end(b"x")
    assert [output.finish_reason for output in last if output.finish_reason] == ["abort"]
    assert core.live_requests(b"x") == 0 and core.live_requests() == 1
    rest: dict[bytes, list[Output]] = defaultdict(list)
    while core.has_work():
        for front_end, outputs in core.step().items():
            rest[front_end] += outputs
    assert set(rest) == {b"y"} and ends(rest[b"y"]) == {("same", 0): 1}


def test_draining_refuses_new_and_finishes_old() -> None:
    core = make()
    core.submit(request("old", max_tokens=10, ignore_eos=True))
    core.step()
    core.drain()
    core.submit(request("new"))
    outputs = run(core)
    assert {output.request_id: output.error_code for output in outputs if output.error} == {"new": "overloaded"}
    assert len(tokens(outputs)["old", 0]) == 10


def test_deadline_ends_a_request() -> None:
    clock = ManualClock()
    core = make(clock=clock, speed=FakeSpeed(step_s=0.1))
    submit = request("a", max_tokens=100, ignore_eos=True)
    core.submit(Submit(request_id="a", prompt=submit.prompt, params=submit.params, deadline_s=1.0))
    outputs = run(core)
    assert outputs[-1].error_code == "deadline_exceeded" and ends(outputs)["a", 0] == 1


def test_step_metrics_count_steps_and_tokens() -> None:
    core = make(observers=(StepMetrics(),), speed=FakeSpeed(step_s=0.01))
    core.submit(request("a", max_tokens=5, ignore_eos=True))
    run(core)
    stats = core.stats()
    assert stats["iteration_tokens_sum"] == 3 + 4
    assert sum(value for key, value in stats.items() if key.startswith("step_s_bucket_")) == stats["steps_total"]
    assert stats["device_busy_s"] == pytest.approx(0.01 * stats["steps_total"])


def test_close_is_final() -> None:
    core = make()
    core.close()
    core.close()
    core.submit(request("a"))
    assert core.step()[b""][0].error_code == "engine_dead"
