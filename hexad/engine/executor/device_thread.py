"""One thread that runs device work in order, for devices that do not queue by themselves (a CPU).

All parallel work must come from this one thread, loading included: OpenMP keeps a team of threads for each thread that ever started one,
and once the teams together exceed the processors it makes every parallel region sleep and wake (measured on 2 cores: a decode step of
SmolLM2-135M takes 37 ms instead of 25).
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")
EXIT_PATIENCE_S = 30.0  # a job that takes longer than this no longer holds up the end of the process


def _stop(jobs: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread, timeout_s: float | None = EXIT_PATIENCE_S) -> None:
    if thread.is_alive():
        jobs.put(None)
        thread.join(timeout_s)


class DeviceThread:
    """Runs jobs one after the other, in the order they came. Jobs must not raise; `close` waits for the ones already queued.

    A job that has a result to give away leaves it with `hold`; it is given when the next job calls `give`, at the latest when that one
    has ended, and at once when no job waits. Whoever wakes by it wants the interpreter's lock, and this thread needs that lock to start
    the next computation: until then nothing computes.
    """

    def __init__(self, name: str, initialise: Callable[[], None]) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._initialise = initialise
        self._held: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()
        # A process that ends while this thread is inside torch aborts: torch cannot be unwound when the interpreter takes threads down.
        weakref.finalize(self, _stop, self._jobs, self._thread)

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def hold(self, gift: Callable[[], None]) -> None:
        """Call `gift` soon (see above). From a job."""
        self.give()
        self._held = gift

    def give(self) -> None:
        """Call what is held. From a job."""
        held, self._held = self._held, None
        if held is not None:
            held()

    def run(self, job: Callable[[], T]) -> T:
        """Run a job and wait for what it returns or raises."""
        future: Future[T] = Future()

        def settle() -> None:
            try:
                with torch.inference_mode(False):  # what it makes may be used on any thread
                    future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

        self.submit(settle)
        return future.result()

    def close(self) -> None:
        _stop(self._jobs, self._thread, None)

    def _loop(self) -> None:
        self._initialise()
        with torch.inference_mode():  # jobs of `submit` need not enter it each time
            self._serve()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            held = self._held
            job()
            del job  # a job holds tensors: let go before waiting for the next one
            if self._jobs.empty() or (held is not None and self._held is held):
                self.give()
        self.give()  # the job before the end may have held its result
