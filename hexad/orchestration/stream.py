"""One request's answers in a front end: an async iterator fed by the client's reader. No task and no queue object per request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from hexad.common import errors
from hexad.common.errors import HexadError
from hexad.orchestration.messages import Output, Submit

_BY_CODE: Final[dict[str, type[HexadError]]] = {
    kind.default_code: kind
    for kind in (
        errors.RequestError,
        errors.UnsupportedError,
        errors.ContextLengthError,
        errors.NeverFitsError,
        errors.NotFoundError,
        errors.RateLimitError,
        errors.OverloadedError,
        errors.EngineDeadError,
        errors.DeadlineError,
        errors.RequestFailedError,
    )
}


def output_error(output: Output) -> HexadError | None:
    """The exception that a failed choice stands for (not raised), or None when `output` is no failure."""
    if output.error is None:
        return None
    kind = _BY_CODE.get(output.error_code or "", errors.RequestFailedError)
    return kind(output.error, code=output.error_code)


class RequestStream:
    """Outputs of one request, all its choices mixed, in the order in which the engine made them.

    - Iteration ends after each of the `num_choices` choices has had its terminal output. A failed choice is an `Output` with `error`
      set (see `output_error`), not an exception: its siblings go on.
    - If the engine dies first, what had arrived is delivered, then `EngineDeadError` is raised exactly once, then the iteration ends.
    - `aclose()`, leaving `async with`, or a cancellation inside `async for` aborts the request in the engine, unless it has ended.
      `next_batch(timeout_s)` never aborts when the time runs out, so it is what heartbeats should use.
    - One consumer; not thread-safe: it belongs to its client's event loop.
    - `sink` (None: none) is offered each output while the consumer waits and nothing is before it in the queue. True: it has taken it, and
      the consumer goes on waiting; it must not take terminal outputs, must not raise, and is let go when the stream is cancelled.
    """

    __slots__ = ("_abort", "_error", "_failed", "_items", "_open", "_waiter", "finished", "request_id", "sink", "submit")

    def __init__(self, request_id: str, num_choices: int, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.submit: Submit | None = None  # what was asked, for those who want to know after a death
        self.finished = False  # the engine has ended every choice, none of them by an error
        self._failed = False
        self._open = num_choices  # choices without a terminal output yet (as received, not as consumed)
        self._items: deque[Output] = deque()
        self._error: HexadError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._abort = abort
        self.sink: Callable[[Output], bool] | None = None

    @property
    def ended(self) -> bool:
        """Everything has been received (it may still wait to be consumed)."""
        return self._open <= 0

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Output:
        while not self._items:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._open <= 0:
                raise StopAsyncIteration
            try:
                await self._wait(None)
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._items.popleft()

    async def next_batch(self, timeout_s: float | None = None) -> list[Output]:
        """All outputs that have arrived, at least one; an empty list when `timeout_s` passed first or the stream has `ended`."""
        if not self._items and self._open > 0:
            await self._wait(timeout_s)
        if not self._items and self._error is not None:
            error, self._error = self._error, None
            raise error
        batch = list(self._items)
        self._items.clear()
        return batch

    async def aclose(self) -> None:
        """Abort the request unless it has ended. Idempotent, does not block."""
        self.cancel()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """`aclose` without the coroutine, for callers that are not async."""
        if self._open > 0:
            self._open = 0
            self._abort(self.request_id)
        self._items.clear()
        self._error = None
        self.sink = None
        self._wake()

    # The client's side.

    def feed(self, output: Output) -> bool:
        """Add one output; True when it was the last one of the request."""
        waiter, sink = self._waiter, self.sink
        if sink is not None and not self._items and waiter is not None and not waiter.done() and sink(output):
            return False
        self._items.append(output)
        if output.finish_reason is not None or output.error is not None:
            self._open -= 1
            self._failed = self._failed or output.error is not None
            self.finished = self._open == 0 and not self._failed
        self._wake()
        return self._open <= 0

    def fail(self, error: HexadError) -> None:
        """End the stream with an exception."""
        if self._open > 0:
            self._open = 0
            self._error = error
            self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self, timeout_s: float | None) -> None:
        assert self._waiter is None, f"stream {self.request_id} has two consumers"
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self._wake) if timeout_s is not None else None
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
