"""Rendering in processes of their own: whatever a template does, it costs a bounded time and memory, and can be killed. No torch.

Thread-safe. Processes start when first needed, stay for the next request, and end with this one (their stdin closes).
"""

from __future__ import annotations

import atexit
import json
import math
import queue
import select
import subprocess
import sys
import threading
import time
from typing import Any

from hexad.common.errors import HexadError
from hexad.models.templating.worker import write_frame

CPU_LIMIT_S = 0.5  # of one rendering; a long conversation takes some milliseconds
WALL_LIMIT_S = 10.0  # on a machine that is busy with other things
START_LIMIT_S = 60.0
MAX_PROCESSES = 4
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from hexad.models.templating.worker import main; main(float(sys.argv[2]))"
)


class RenderError(Exception):
    """`kind` is one of worker.py's errors."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class _Process:
    """One rendering process. Not thread-safe."""

    def __init__(self, cpu_limit_s: float) -> None:
        command = [sys.executable, "-I", "-c", _START, json.dumps(sys.path), str(cpu_limit_s)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, bufsize=0
        )
        self._readable = select.poll()  # `select.select` fails where many connections make the descriptor's number large
        assert self._process.stdout is not None
        self._readable.register(self._process.stdout, select.POLLIN)
        self._started = False

    def render(self, source: str, variables: dict[str, Any] | None) -> str:
        """Raises RenderError; afterwards the process may be gone (`alive`)."""
        limit_s = WALL_LIMIT_S if self._started else START_LIMIT_S
        try:
            assert self._process.stdin is not None
            write_frame(self._process.stdin, {"source": source, "variables": variables})
            answer = json.loads(self._read(time.monotonic() + limit_s))
        except (EOFError, BrokenPipeError, TimeoutError):
            self.close()
            if not self._started:
                raise HexadError("the process that renders chat templates cannot start: is the Python installation complete?") from None
            raise RenderError("limit", "it takes too long or needs too much memory") from None
        self._started = True
        if "error" in answer:
            raise RenderError(answer["error"], answer["message"])
        text: str = answer["text"]
        return text

    def start(self) -> None:
        """Wait until it answers, so that limits apply to templates alone."""
        self.render("", None)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self, deadline_s: float) -> bytes:
        length = int.from_bytes(self._read_exactly(4, deadline_s), "little")
        return self._read_exactly(length, deadline_s)

    def _read_exactly(self, count: int, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        pieces: list[bytes] = []
        while count:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._readable.poll(math.ceil(left_s * 1e3)):
                raise TimeoutError
            piece = self._process.stdout.read(count)
            if not piece:
                raise EOFError
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)


class Renderers:
    """Up to `MAX_PROCESSES` rendering processes."""

    def __init__(self, cpu_limit_s: float = CPU_LIMIT_S) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._slots = threading.BoundedSemaphore(MAX_PROCESSES)

    def render(self, source: str, variables: dict[str, Any] | None) -> str:
        """The template's text; with None as variables, only check that it compiles.

        Raises:
            RenderError: the template refuses, fails, or exceeds a limit.
        """
        with self._slots:
            process = self._take()
            try:
                return process.render(source, variables)
            finally:
                if process.alive:
                    self._idle.put(process)

    def _take(self) -> _Process:
        while True:
            try:
                process = self._idle.get_nowait()
            except queue.Empty:
                process = _Process(self._cpu_limit_s)
                process.start()
                return process
            if process.alive:
                return process

    def close(self) -> None:
        """End the idle processes; new ones start when needed."""
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                return


RENDERERS = Renderers()
atexit.register(RENDERERS.close)
