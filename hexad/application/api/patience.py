"""How long a connection waits for a peer that takes nothing of what is sent to it, and how many small things it takes from one."""

from __future__ import annotations

import asyncio


class PerSecond:
    """Counts what costs the event loop more than its bytes say."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._began_s = 0.0
        self._count = 0

    def too_many(self, now_s: float) -> bool:
        """Count one; True when more than the limit came within a second."""
        if now_s - self._began_s > 1.0:
            self._began_s, self._count = now_s, 0
        self._count += 1
        return self._count > self._limit


class WriteWatch:
    """Aborts a connection whose peer reads nothing for `patience_s`, whether it is open or already closed on our side.

    `close` of a transport waits until all has been sent, which is for ever when nobody reads: hence the look at closed ones.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, patience_s: float) -> None:
        self._loop = loop
        self._transport = transport
        self._patience_s = patience_s
        self._closing = False
        self._unsent_bytes = 0
        self._stalled: asyncio.TimerHandle | None = None
        self._linger = loop.call_later(patience_s, self._look)

    def paused(self) -> None:
        """The buffer is full: from now on something must move."""
        self.resumed()
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._stalled = self._loop.call_later(self._patience_s, self._check)

    def resumed(self) -> None:
        """The peer reads again."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def stop(self) -> None:
        """The connection is gone, or somebody else's."""
        self.resumed()
        self._linger.cancel()

    def _check(self) -> None:
        if self._transport.get_write_buffer_size() < self._unsent_bytes:
            self.paused()  # slow, but alive
        else:
            self._transport.abort()

    def _look(self) -> None:
        """Closed at two looks in a row: the rest is not wanted."""
        if self._closing:
            self._transport.abort()
            return
        self._closing = self._transport.is_closing()
        self._linger = self._loop.call_later(self._patience_s, self._look)
