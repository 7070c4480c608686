"""The fake executor keeps the seam's contract, and catches mistakes of whoever drives it."""

from __future__ import annotations

import time

import msgspec
import pytest
from sched_driver import FULL, Driver, layout, sliding

from hexad.common.clock import ManualClock
from hexad.common.errors import EngineDeadError, ModelError
from hexad.common.params import SamplingParams
from hexad.engine.executor.fake import FakeExecutor, FakeScript, FakeSpeed, Fault, KVMismatchError, reference_tokens
from hexad.engine.executor.seam import Executor
from hexad.engine.plan import NewRequest, Row, StepPlan, TokenSegment


def plan_of(step: int, *rows: Row, new=(), **more) -> StepPlan:
    return StepPlan(step_id=step, rows=rows, new=tuple(new), num_tokens=sum(row.num_tokens for row in rows), **more)


def new_request(rid: int, ids, blocks, params=None, **more) -> NewRequest:
    params = params or SamplingParams(seed=1)
    return NewRequest(rid=rid, prompt=(TokenSegment(tuple(ids)),), prompt_len=len(ids), params=params, block_ids=blocks, **more)


def make(**options) -> FakeExecutor:
    executor = FakeExecutor(**{"clock": ManualClock(), **options})
    executor.load()
    executor.allocate(layout(8, 4))
    return executor


def first_plan(**params) -> StepPlan:
    new = new_request(0, (1, 2, 3), ((0,),), SamplingParams(seed=1, **params))
    return plan_of(0, Row(rid=0, start=0, num_tokens=3, samples=True), new=[new])


def test_it_is_an_executor():
    executor: Executor = make()
    assert executor.kv_bytes().page_bytes > 0 and executor.depth == 2
    executor.close()
    executor.close()


def test_tokens_depend_on_ids_seed_choice_and_nothing_else():
    def tokens(ids=(1, 2, 3), **more):
        return reference_tokens(ids, SamplingParams(max_tokens=20), **more)[0]

    assert tokens() == tokens()
    assert len({tuple(t) for t in (tokens(), tokens(seed=1), tokens(choice=1), tokens((1, 2, 4)))}) == 4
    greedy = SamplingParams(max_tokens=20, temperature=0.0)
    assert reference_tokens((1, 2), greedy, seed=1)[0] == reference_tokens((1, 2), greedy, seed=2, choice=3)[0]


def test_scripts_then_eos():
    script = FakeScript(outputs={(1, 2): (5, 6)})
    assert reference_tokens((1, 2), SamplingParams(max_tokens=9), eos=(7,), script=script) == ([5, 6, 7], "stop")
    assert reference_tokens((1, 2), SamplingParams(max_tokens=9, ignore_eos=True), script=script)[0][:2] == [5, 6]


def test_min_tokens_and_allowed_ids():
    script = FakeScript(vocab_size=5, eos_every=1)
    tokens, _ = reference_tokens((1,), SamplingParams(max_tokens=9, min_tokens=4), eos=(2,), script=script)
    assert len(tokens) == 5 and 2 not in tokens[:4]
    tokens, _ = reference_tokens((1,), SamplingParams(max_tokens=30, allowed_token_ids=(3, 4)), script=FakeScript())
    assert set(tokens) == {3, 4}


def test_masked_rows_draw_allowed_tokens_only():
    executor = make()
    plan = first_plan()
    plan = msgspec.structs.replace(plan, rows=(msgspec.structs.replace(plan.rows[0], masked=True),))
    mask = (1 << 77 | 1 << 400).to_bytes(125, "little")
    assert executor.execute(plan).sample({0: mask}).wait().rows[0].tokens[0] in (77, 400)


def test_speed_moves_a_manual_clock():
    clock = ManualClock()
    executor = make(clock=clock, speed=FakeSpeed(step_s=1.0, token_s=0.5))
    pending = executor.execute(first_plan()).sample()
    assert not pending.done()
    with pytest.raises(TimeoutError):
        pending.wait(1.0)
    assert clock.now() == 1.0
    assert pending.wait().busy_s == 2.5 and clock.now() == 2.5 and pending.done()


def test_steps_follow_each_other_on_the_device():
    clock = ManualClock()
    executor = make(clock=clock, speed=FakeSpeed(step_s=1.0))
    first = executor.execute(first_plan()).sample()
    second = executor.execute(plan_of(1, Row(rid=0, start=3, num_tokens=1, samples=True))).sample()
    first.wait()
    assert clock.now() == 1.0 and not second.done()
    second.wait()
    assert clock.now() == 2.0


def test_real_time_sleeps():
    executor = FakeExecutor(speed=FakeSpeed(step_s=0.05))
    executor.allocate(layout(8, 4))
    begin = time.monotonic()
    executor.execute(first_plan()).sample().wait()
    assert time.monotonic() - begin >= 0.045


def test_faults():
    with pytest.raises(ModelError):
        make(faults=[Fault(kind="load")])
    dead = make(faults=[Fault(kind="die", step=0)]).execute(first_plan()).sample()
    assert dead.done()
    with pytest.raises(EngineDeadError, match="step 0"):
        dead.wait()
    hung = make(faults=[Fault(kind="hang", step=0)]).execute(first_plan()).sample()
    assert not hung.done()
    with pytest.raises(TimeoutError):
        hung.wait(5.0)
    nan = make(faults=[Fault(kind="nan", step=0)]).execute(first_plan()).sample().wait().rows[0]
    assert "NaN" in nan.error and nan.tokens == ()


def test_logprobs_are_pure_functions_too():
    row = make().execute(first_plan(logprobs=3)).sample().wait().rows[0]
    again = make().execute(first_plan(logprobs=3)).sample().wait().rows[0]
    assert row == again and len(row.logprobs[0].top) == 3 and row.logprobs[0].token_id == row.tokens[0] == row.logprobs[0].top[0][0]


def test_wrong_kv_is_noticed():
    executor = make()
    executor.execute(first_plan()).sample()
    cached = new_request(1, (1, 2, 9, 4, 5), ((0, 1),), num_cached=3)
    with pytest.raises(KVMismatchError, match="position 2"):
        executor.execute(plan_of(1, Row(rid=1, start=3, num_tokens=2, samples=True), new=[cached])).sample()


def test_a_missing_block_is_noticed():
    executor = make()
    executor.allocate(layout(8, 4, FULL, sliding(3)))
    new = new_request(0, (1, 2, 3), ((0,), (-1,)))
    with pytest.raises(KVMismatchError, match="group 1"):
        executor.execute(plan_of(0, Row(rid=0, start=0, num_tokens=3, samples=True), new=[new])).sample()


def test_steps_out_of_order_and_gaps_are_noticed():
    executor = make()
    with pytest.raises(AssertionError, match="was due"):
        executor.execute(msgspec.structs.replace(first_plan(), step_id=3))
    executor.execute(first_plan()).sample()
    with pytest.raises(AssertionError, match="starts at"):
        executor.execute(plan_of(1, Row(rid=0, start=2, num_tokens=1, samples=True))).sample()


@pytest.mark.parametrize("check_kv", ["all", "last", "off"])
def test_checking_does_not_change_tokens(check_kv):
    executor = FakeExecutor(script=FakeScript(vocab_size=100), check_kv=check_kv)
    Driver(layout(64), executor=executor).run(range(20), max_tokens=20)
