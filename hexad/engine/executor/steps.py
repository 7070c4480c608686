"""Steps of the local executor on their way: handles and pending results."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

import torch

from hexad.common.errors import EngineDeadError
from hexad.engine.executor.device_thread import DeviceThread
from hexad.engine.executor.seam import Masks
from hexad.engine.plan import StepResult
from hexad.engine.runner import Runner, Step, StepOutput

log = logging.getLogger(__name__)


class LocalStep:
    """A step in flight; implements `StepHandle`."""

    def __init__(self, runner: Runner, thread: DeviceThread | None, step: Step) -> None:
        self.step_id = step.host.step_id
        self._runner = runner
        self._thread = thread  # None: the caller's thread launches on a stream
        self._step = step
        self._busy_s = 0.0
        self._failure: BaseException | None = None
        self._started = _event() if self._thread is None else None

    def launch(self) -> None:
        if self._thread is not None:
            self._thread.submit(self._forward)
            return
        assert self._started is not None
        self._started.record()
        self._forward()

    def sample(self, masks: Masks | None = None) -> LocalPending | CudaPending:
        if self._thread is not None:
            pending = LocalPending(self.step_id)
            self._thread.submit(lambda: self._sample_into(pending, masks))
            return pending
        if self._failure is not None:
            raise EngineDeadError(f"step {self.step_id} failed: {self._failure}") from self._failure
        assert self._started is not None
        return CudaPending(self._runner, self._runner.sample(self._step, masks), self._started)

    def drafts(self) -> Mapping[int, tuple[int, ...]]:
        return {}

    def _forward(self) -> None:
        started = time.perf_counter()
        try:
            self._runner.forward(self._step, self._thread.give if self._thread is not None else None)
        except Exception as error:
            log.exception("step %d failed", self.step_id)
            self._failure = error
        self._busy_s = time.perf_counter() - started

    def _sample_into(self, pending: LocalPending, masks: Masks | None) -> None:
        started = time.perf_counter()
        try:
            if self._failure is not None:
                raise self._failure
            output = self._runner.sample(self._step, masks)
            result = self._runner.result(output, self._busy_s + time.perf_counter() - started)
            assert self._thread is not None
            self._thread.hold(lambda: pending.resolve(result))
        except Exception as error:
            log.exception("sampling of step %d failed", self.step_id)
            pending.fail(error)


class LocalPending:
    """A result that the worker thread delivers; implements `PendingResult`.

    A bare lock, because an Event costs several times as much each step: held from the start, let go once.
    """

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self._running = threading.Lock()
        self._running.acquire()
        self._result: StepResult | None = None
        self._failure: BaseException | None = None

    def done(self) -> bool:
        return not self._running.locked()

    def wait(self, timeout_s: float | None = None) -> StepResult:
        if not self._running.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise TimeoutError(f"step {self.step_id} did not finish in {timeout_s} s")
        self._running.release()
        if self._failure is not None:
            raise EngineDeadError(f"step {self.step_id} failed: {self._failure}") from self._failure
        assert self._result is not None
        return self._result

    def resolve(self, result: StepResult) -> None:
        self._result = result
        self._running.release()

    def fail(self, error: BaseException) -> None:
        self._failure = error
        self._running.release()


class CudaPending:
    """A result on its way through pinned memory; implements `PendingResult`."""

    def __init__(self, runner: Runner, output: StepOutput, started: torch.cuda.Event) -> None:
        self._runner = runner
        self._output = output.to_host()
        self._started = started
        self._finished = _event()
        self._finished.record()

    def done(self) -> bool:
        return _passed(self._finished)

    def wait(self, timeout_s: float | None = None) -> StepResult:
        if timeout_s is not None:
            deadline = time.monotonic() + timeout_s
            while not _passed(self._finished):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"step {self._output.host.step_id} did not finish in {timeout_s} s")
                time.sleep(1e-4)
        self._finished.synchronize()
        return self._runner.result(self._output, self._started.elapsed_time(self._finished) / 1e3)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
