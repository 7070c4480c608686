"""One thread that runs device work in order, for devices that do not queue by themselves (a CPU).

All parallel work must come from this one thread, loading included: OpenMP keeps a team of threads for each thread that ever started one,
and once the teams together exceed the processors it makes every parallel region sleep and wake (measured on 2 cores: a decode step of
SmolLM2-135M takes 37 ms instead of 25).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class DeviceThread:
    """Runs jobs one after the other, in the order they came. Jobs must not raise; `close` waits for the ones already queued."""

    def __init__(self, name: str, initialise: Callable[[], None]) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._initialise = initialise
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def run(self, job: Callable[[], T]) -> T:
        """Run a job and wait for what it returns or raises."""
        future: Future[T] = Future()

        def settle() -> None:
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

        self.submit(settle)
        return future.result()

    def close(self) -> None:
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _loop(self) -> None:
        self._initialise()
        while (job := self._jobs.get()) is not None:
            job()
            del job  # a job holds tensors: let go before waiting for the next one
