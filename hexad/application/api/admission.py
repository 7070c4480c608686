"""Who may come in: a bound on requests in flight, checked before any costly work, and the state of shutting down.

One event loop owns it. A `Ticket` is held from before the prompt is tokenised until the response has ended.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from types import TracebackType

from hexad.common.errors import OverloadedError

MAX_RETRY_S = 60.0
SMOOTHING = 0.1  # weight of the newest request in the mean duration


class Ticket:
    """One admitted request. Leaving its `with` block, or `release`, gives the place back."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.start_s = time.monotonic()
        self.started = False  # the engine has given its first output
        self.killed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done: the server ends now

    def release(self) -> None:
        """Idempotent."""
        self._admission._leave(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Admission:
    """Counts requests in flight.

    `max_running` is how many sequences the engine runs at once (None: unknown), `max_queued` how many may wait beyond
    (None: any number). The engine has bounds of its own; this one spares it, and us, the work on what cannot be served.
    """

    def __init__(self, max_running: int | None, max_queued: int | None) -> None:
        self.max_running = max_running
        self.max_queued = max_queued
        self.draining = False
        self._tickets: set[Ticket] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._mean_s = 1.0

    @property
    def in_flight(self) -> int:
        return len(self._tickets)

    @property
    def waiting(self) -> int:
        """Admitted requests without a first output."""
        return sum(not ticket.started for ticket in self._tickets)

    def enter(self) -> Ticket:
        """A ticket for one more request.

        Raises:
            OverloadedError: at capacity, or shutting down; with a time to wait.
        """
        if self.draining:
            raise shutting_down()
        if self.max_queued is not None:
            self._check(self.max_queued)
        ticket = Ticket(self)
        self._tickets.add(ticket)
        self._idle.clear()
        return ticket

    def _check(self, max_queued: int) -> None:
        if self.max_running is not None:
            count, limit = self.in_flight, self.max_running + max_queued
        else:
            count, limit = self.waiting, max(1, max_queued)
        if count >= limit:
            raise OverloadedError(
                f"{self.in_flight} requests are in flight and at most {max_queued} may wait (max_num_queued_reqs): try again later",
                retry_after_s=self._retry_after_s(),
            )

    def _retry_after_s(self) -> float:
        """About how long until a place is free, spread so that the refused do not come back together."""
        drain_s = self._mean_s * max(1, self.waiting) / max(1, self.max_running or self.in_flight)
        return min(MAX_RETRY_S, max(1.0, drain_s * random.uniform(0.8, 1.6)))

    def _leave(self, ticket: Ticket) -> None:
        if ticket not in self._tickets:
            return
        self._tickets.remove(ticket)
        ticket.killed.cancel()
        self._mean_s += SMOOTHING * (time.monotonic() - ticket.start_s - self._mean_s)
        if not self._tickets:
            self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Admit nobody and wait for those inside, at most `timeout_s`; True when all have left."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def kill(self) -> None:
        """Tell every request inside to end now."""
        self.draining = True
        for ticket in self._tickets:
            if not ticket.killed.done():
                ticket.killed.set_result(None)


def shutting_down() -> OverloadedError:
    """What a request gets that comes, or is still there, when the server ends."""
    return OverloadedError("the server is shutting down: send the request to another one", code="shutting_down", retry_after_s=5.0)


def retry_after_header(seconds: float) -> str:
    """Whole seconds, rounded up, 1 to 60."""
    return str(min(int(MAX_RETRY_S), max(1, math.ceil(seconds))))
