"""The thread that computes: results are given away when the next computation begins, and never kept back."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from hexad.engine.executor.device_thread import DeviceThread
from hexad.engine.executor.steps import LocalPending
from hexad.engine.plan import StepResult
from hexad.operators.args import BestTokenArgs
from hexad.operators.best_token import bind_numpy


@pytest.fixture
def thread():
    made = DeviceThread("test", lambda: None)
    yield made
    made.close()


def queued(thread, *jobs):
    """Run jobs that are all queued before the first one begins."""
    gate = threading.Event()
    thread.submit(lambda: gate.wait(30))
    for job in jobs:
        thread.submit(job)
    gate.set()
    thread.run(lambda: None)


def test_what_is_held_is_given_when_the_next_job_says_so(thread):
    said = []

    def following():
        said.append("prepared")
        thread.give()
        said.append("computed")

    queued(thread, lambda: thread.hold(lambda: said.append("result")), following)
    assert said == ["prepared", "result", "computed"]


def test_what_is_held_is_given_at_the_latest_when_the_next_job_has_ended(thread):
    said = []
    queued(thread, lambda: thread.hold(lambda: said.append("result")), lambda: said.append("next"), lambda: said.append("third"))
    assert said == ["next", "result", "third"]


def test_results_that_follow_each_other_are_given_in_order(thread):
    said = []
    queued(thread, *(lambda number=number: thread.hold(lambda: said.append(number)) for number in range(5)))
    assert said == list(range(5))


def test_without_a_next_job_it_is_given_at_once(thread):
    given = threading.Event()
    thread.submit(lambda: thread.hold(given.set))
    assert given.wait(30)


def test_steps_run_in_inference_mode_and_what_is_made_for_others_does_not(thread):
    modes = []
    queued(thread, lambda: modes.append(torch.is_inference_mode_enabled()))
    assert modes == [True]
    assert not thread.run(torch.is_inference_mode_enabled) and not thread.run(lambda: torch.zeros(1)).is_inference()
    with pytest.raises(ValueError):
        thread.run(lambda: int("x"))
    assert not torch.is_inference_mode_enabled()


def test_a_pending_result_times_out_and_comes_more_than_once():
    pending = LocalPending(3)
    assert not pending.done()
    with pytest.raises(TimeoutError, match="step 3"):
        pending.wait(0.01)
    result = StepResult(step_id=3, rows=(), busy_s=0.0)
    threading.Timer(0.05, lambda: pending.resolve(result)).start()
    assert pending.wait(30) is result
    assert pending.done() and pending.wait() is result


@pytest.mark.parametrize("padded", [40, 64])
def test_the_best_on_a_cpu_is_the_best_elsewhere(padded):
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print(f"seed {seed}")
    logits = torch.randint(-3, 4, (200, padded), generator=torch.Generator().manual_seed(seed)).float()  # many equals
    logits[1] = float("-inf")
    logits[2, 7], logits[2, 3] = float("nan"), float("inf")
    logits[3, 5] = float("inf")
    logits[4, 40:] = 100.0
    best, token_ids = logits[:, :40].max(dim=-1)
    ids, codes = bind_numpy(BestTokenArgs(40, torch.float32, "cpu"))(logits.clone())
    assert codes.dtype == torch.uint8 and ids.dtype == torch.int64
    assert torch.equal(codes != 0, ~best.isfinite())
    assert torch.equal(logits[:, :40].nan_to_num(9.0).gather(1, ids[:, None])[:, 0], best.nan_to_num(9.0))
    assert torch.equal(ids[5:], token_ids[5:])


def test_what_the_last_job_held_is_given_when_the_thread_ends():
    """The order to end may be queued while the job still runs: then no later job gives what it held."""
    thread, go, given = DeviceThread("last", lambda: None), threading.Event(), threading.Event()

    def job() -> None:
        go.wait(10)
        thread.hold(given.set)

    thread.submit(job)
    closing = threading.Thread(target=thread.close)
    closing.start()
    while thread._jobs.empty():
        time.sleep(0.001)
    go.set()
    closing.join(10)
    assert given.wait(10)
