"""A progress bar for downloads, shown only while something is fetched, on a terminal; plain lines elsewhere. Thread-safe."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from hexad.cli.sizes import show_bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 5.0


class FetchBar:
    """Hears (what, done bytes, total bytes or None) and shows it on stderr."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()
        self._last_s = 0.0

    def __enter__(self) -> FetchBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, what: str, done_bytes: int, total_bytes: int | None) -> None:
        done, total = done_bytes, total_bytes
        with self._lock:
            if sys.stderr.isatty():
                self._draw(what, done, total)
            elif done == total or time.monotonic() - self._last_s > LINE_EVERY_S:
                self._last_s = time.monotonic()
                of = f" of {show_bytes(total)}" if total else ""
                print(f"fetching {what}: {show_bytes(done)}{of}", file=sys.stderr, flush=True)

    def _draw(self, what: str, done: int, total: int | None) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done, total=total)
        if all(task.finished for task in self._bar.tasks):
            self._bar.stop()
            self._bar, self._tasks = None, {}
