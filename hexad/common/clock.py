"""Time as a dependency: everything that waits or measures takes a `Clock`, so that tests own time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds. `now` is monotonic (intervals); `wall` is Unix time (timestamps for people)."""

    def now(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to. Not thread-safe."""

    def __init__(self, start_s: float = 0.0, wall_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s
        self._offset_s = wall_s - start_s

    def now(self) -> float:
        return self._now_s

    def wall(self) -> float:
        return self._now_s + self._offset_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not go back"
        self._now_s += seconds
