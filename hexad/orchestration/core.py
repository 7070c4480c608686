"""The core loop: schedule -> execute -> sample -> update, asynchronous up to the executor's depth. No sockets, no threads, no torch.

One thread calls it. `submit` and `abort` change the scheduler at once; `step` does one turn and hands back all news, by front end. With
depth 2, plan n+1 is made and launched while step n runs, and only then is n's result awaited: the device is never idle for the host's
sake. With `async_scheduling` off the depth is 1; tokens are the same.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from hexad.common.clock import Clock
from hexad.common.errors import EngineDeadError, HexadError, OverloadedError, RequestError
from hexad.engine.executor.seam import Executor, PendingResult
from hexad.engine.plan import StepPlan, StepResult
from hexad.orchestration.messages import Output, Submit
from hexad.orchestration.request import TokenEvent
from hexad.orchestration.scheduler import Scheduler

log = logging.getLogger("hexad.core")

News = dict[bytes, list[Output]]  # front end -> its outputs, in order
MAX_REQUEST_ID_CHARS = 256
STEP_TIMEOUT_S = 600.0  # a step that takes longer is stuck: the executor is given up


class StepObserver(Protocol):
    """Sees every step: the recorder, the metrics. Must not block and must not raise."""

    def on_plan(self, plan: StepPlan) -> None: ...

    def on_result(self, plan: StepPlan, result: StepResult, elapsed_s: float) -> None:
        """`elapsed_s`: from launch to result, waiting behind the step before included."""
        ...

    def stats(self) -> Mapping[str, float]:
        """What it adds to the core's `stats`."""
        ...


class _Flight(NamedTuple):
    plan: StepPlan
    pending: PendingResult
    launched_s: float


class CoreLoop:
    """Composes one scheduler and one executor. Every accepted request gets exactly one terminal output for each of its choices."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        clock: Clock,
        *,
        vocab_size: int,
        async_scheduling: bool = True,
        observers: Sequence[StepObserver] = (),
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.death: EngineDeadError | None = None  # set once; nothing runs any more
        self.draining = False  # refuse new requests, finish the others
        self._clock = clock
        self._vocab_size = vocab_size
        self._depth = max(1, executor.depth) if async_scheduling else 1
        self._observers = tuple(observers)
        self._step_timeout_s = step_timeout_s
        self._in_flight: deque[_Flight] = deque()
        self._news: News = {}
        self._live: dict[bytes, dict[str, set[int]]] = {}  # front end -> request id -> choices without a terminal output
        self._tokens = 0
        self._busy_s = 0.0

    # Requests in.

    def submit(self, submit: Submit, front_end: bytes = b"") -> None:
        """Accept a request. A refusal, whatever the reason, is a terminal output of each choice and harms nobody else."""
        if submit.request_id in self._live.get(front_end, ()):
            log.warning("request id %r is already running: the second request is ignored", submit.request_id[:MAX_REQUEST_ID_CHARS])
            return
        choices = set(range(min(max(submit.params.n, 1), 1024)))
        self._live.setdefault(front_end, {})[submit.request_id] = choices
        try:
            self.check(submit)
            self.scheduler.add(submit, front_end=front_end)
        except HexadError as error:
            self._fail(front_end, submit.request_id, error.message, error.code)
        except Exception as error:
            log.exception("request %r could not be added", submit.request_id[:MAX_REQUEST_ID_CHARS])
            self._fail(front_end, submit.request_id, f"the engine could not accept this request: {error}", "internal_error")

    def check(self, submit: Submit) -> None:
        """Refuse what must not reach the scheduler. Front ends validate too; this keeps a faulty one from harming the others' requests.

        Raises:
            RequestError: the request is wrong.
            OverloadedError, EngineDeadError: nothing is accepted any more.
        """
        if self.death is not None:
            raise EngineDeadError(self.death.message)
        if self.draining:
            raise OverloadedError("the engine is shutting down and takes no new requests: send it again in a moment", retry_after_s=5.0)
        if not 1 <= len(submit.request_id) <= MAX_REQUEST_ID_CHARS:
            raise RequestError(
                f"request_id has {len(submit.request_id)} characters: 1 to {MAX_REQUEST_ID_CHARS} are allowed", param="request_id"
            )
        submit.params.validate(self._vocab_size)
        if not any(segment.ids for segment in submit.prompt):
            raise RequestError("the prompt is empty: send at least one token", param="prompt")
        for segment in submit.prompt:
            if segment.ids and not (min(segment.ids) >= 0 and max(segment.ids) < self._vocab_size):
                bad = next(i for i in segment.ids if not 0 <= i < self._vocab_size)
                raise RequestError(f"the prompt has token {bad}: ids of this model are 0 to {self._vocab_size - 1}", param="prompt")

    def abort(self, request_id: str, front_end: bytes = b"", choice: int | None = None) -> None:
        """Stop a request, or one choice of it: finish_reason is "abort", the next plan drops it. Unknown ids are ignored."""
        if request_id in self._live.get(front_end, ()):
            self._publish(self.scheduler.abort(request_id, front_end, choice))

    def abort_front_end(self, front_end: bytes) -> list[Output]:
        """Stop all that a front end had; returns its last news, which `step` will not give again."""
        for request_id in tuple(self._live.get(front_end, ())):
            self.abort(request_id, front_end)
        return self._news.pop(front_end, [])

    # Steps.

    def has_work(self) -> bool:
        """True while `step` would do something; otherwise wait for a request."""
        return bool(self._news or self._in_flight) or (self.death is None and self.scheduler.has_work())

    def step(self, wait_s: float | None = None) -> News:
        """One turn: launch the next plan if there is room, then take in the oldest result if nothing more can be launched before it.

        Waits for a result at most `wait_s` (None: as long as it takes); when that passes, the news is just smaller. An executor that
        fails, or a broken invariant, ends the core: each live choice gets one error, and `death` is set.
        """
        if self.death is None:
            try:
                self._turn(wait_s)
            except EngineDeadError as error:
                self._die(error)
            except Exception as error:
                log.exception("the core loop failed")
                self._die(EngineDeadError(f"the engine failed: {type(error).__name__}: {error}"))
        news, self._news = self._news, {}
        return news

    def _turn(self, wait_s: float | None) -> None:
        self._publish(self.scheduler.expire())
        launched = len(self._in_flight) < self._depth and self._launch()
        if self._in_flight and (not launched or len(self._in_flight) >= self._depth):
            self._collect(wait_s)

    def _launch(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        for observer in self._observers:
            observer.on_plan(plan)
        started_s = self._clock.now()
        pending = self.executor.execute(plan).sample()
        self._in_flight.append(_Flight(plan, pending, started_s))
        return True

    def _collect(self, wait_s: float | None) -> None:
        plan, pending, launched_s = self._in_flight[0]
        try:
            result = pending.wait(wait_s)
        except TimeoutError:
            elapsed_s = self._clock.now() - launched_s
            if elapsed_s > self._step_timeout_s:
                raise EngineDeadError(f"step {plan.step_id} has run for {elapsed_s:.0f} s (limit {self._step_timeout_s:g} s)") from None
            return
        self._in_flight.popleft()
        elapsed_s = self._clock.now() - launched_s
        self._publish(self.scheduler.update(plan, result))
        self._tokens += plan.num_tokens
        self._busy_s += result.busy_s
        for observer in self._observers:
            observer.on_result(plan, result, elapsed_s)

    # News out.

    def _publish(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self._say(event.front_end, _output(event))

    def _say(self, front_end: bytes, output: Output) -> None:
        if output.finish_reason is not None or output.error is not None:
            requests = self._live.get(front_end)
            choices = requests.get(output.request_id) if requests else None
            if requests is None or choices is None:
                return  # its front end went away
            assert output.choice in choices, f"second terminal output of {output.request_id}, choice {output.choice}"
            choices.remove(output.choice)
            if not choices:
                del requests[output.request_id]
                if not requests:
                    del self._live[front_end]
        self._news.setdefault(front_end, []).append(output)

    def _fail(self, front_end: bytes, request_id: str, message: str, code: str) -> None:
        for choice in sorted(self._live[front_end][request_id]):
            self._say(front_end, Output(request_id=request_id, choice=choice, error=message, error_code=code))

    def _die(self, error: EngineDeadError) -> None:
        log.error("%s; %d requests fail", error.message, sum(map(len, self._live.values())))
        self.death = error
        self._in_flight.clear()
        for front_end, requests in list(self._live.items()):
            for request_id in list(requests):
                self._fail(front_end, request_id, error.message, error.code)

    # For people.

    def live_requests(self, front_end: bytes | None = None) -> int:
        """Requests that still owe a terminal output, of one front end or of all."""
        if front_end is not None:
            return len(self._live.get(front_end, ()))
        return sum(map(len, self._live.values()))

    def drain(self) -> None:
        """Take no new requests from now on."""
        self.draining = True

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that nobody uses."""
        self.scheduler.reset_prefix_cache()

    def stats(self) -> dict[str, float | int | str | None]:
        """The scheduler's numbers and the loop's own: counters since start, gauges of now."""
        observed = {key: value for observer in self._observers for key, value in observer.stats().items()}
        return {
            **msgspec.structs.asdict(self.scheduler.stats()),
            **observed,
            "step_tokens": self._tokens,
            "device_busy_s": self._busy_s,
            "steps_in_flight": len(self._in_flight),
            "depth": self._depth,
            "live_requests": self.live_requests(),
            "draining": int(self.draining),
        }

    def close(self) -> None:
        """Release the machines; the loop is dead afterwards."""
        if self.death is None:
            self.death = EngineDeadError("the engine is closed")
        self._in_flight.clear()
        self.executor.close()


def _output(event: TokenEvent) -> Output:
    """The scheduler's event as it crosses the socket: without the address."""
    if (
        event.queued_s is None and not event.prompt_logprobs and event.num_cached is None and not event.terminal
    ):  # the common case, every decode step
        return Output(request_id=event.request_id, choice=event.choice, token_ids=event.token_ids, logprobs=event.logprobs)
    return Output(
        request_id=event.request_id,
        choice=event.choice,
        token_ids=event.token_ids,
        logprobs=event.logprobs,
        prompt_logprobs=event.prompt_logprobs,
        finish_reason=event.finish_reason,
        stop_token_id=event.stop_token_id,
        num_cached=event.num_cached,
        error=event.error,
        error_code=event.error_code,
        queued_s=event.queued_s,
        num_preemptions=event.num_preemptions,
    )
