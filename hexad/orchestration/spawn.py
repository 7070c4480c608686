"""The parent's side of an engine process: start it, hear how it starts, know when it is gone, take it down with all it left.

Three channels join the two: the child's stdin carries one JSON line (config, address) and then stays open, so that its end tells the
child that the parent closed or died; a status pipe carries JSON lines back (progress, then ready or failed), and its end tells the parent
that the child is gone; the ZeroMQ socket of `messages.py` carries the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hexad.common import errors
from hexad.common.config import HexadConfig
from hexad.common.errors import StartupError

DEFAULT_COMMAND = (sys.executable, "-m", "hexad.compose")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The one line on the child's stdin."""

    config: dict[str, Any]
    address: str
    status_fd: int


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Start-up has come to `phase`: import, read, prepare, allocate, warm up, ready."""

    phase: str
    detail: str = ""
    elapsed_s: float = 0.0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine serves; `config` is the resolved tree and `notes` say how "auto" was decided."""

    config: dict[str, Any]
    notes: tuple[str, ...]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine cannot start."""

    kind: str  # class name in common/errors.py
    message: str
    code: str


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The process is scheduled and its interpreter runs, whatever the core loop is busy with. Once a second."""


Status = Progress | Ready | Failed | Beat
_decoder: msgspec.json.Decoder[Status] = msgspec.json.Decoder(Status)


class EngineProcess:
    """A child process that runs `hexad.orchestration.process`. Belongs to the event loop that started it."""

    def __init__(self, config: HexadConfig, command: Sequence[str] = DEFAULT_COMMAND) -> None:
        self.directory = tempfile.mkdtemp(prefix="hexad-")  # mkdtemp makes it 0700
        self.address = f"ipc://{self.directory}/core"
        self.ready: asyncio.Future[Ready] | None = None
        self._on_progress: Callable[[Progress], None] | None = None
        self._on_exit: Callable[[], None] | None = None
        self.heard_s = time.monotonic()  # the latest sign of life
        self._rest = b""
        self._status_fd, child_fd = os.pipe()
        os.set_blocking(self._status_fd, False)
        try:
            # A session of its own: Ctrl-C in the terminal reaches the parent, which decides how to end.
            self._process = subprocess.Popen(list(command), stdin=subprocess.PIPE, pass_fds=(child_fd,), start_new_session=True)
        except OSError as error:
            os.close(self._status_fd)
            shutil.rmtree(self.directory, ignore_errors=True)
            raise StartupError(f"cannot start the engine process {command[0]!r}: {error}") from None
        finally:
            os.close(child_fd)
        launch = Launch(config=config.model_dump(mode="json"), address=self.address, status_fd=child_fd)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a child that died at once is reported by the end of the status pipe
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal number when one killed it."""
        return self._process.poll()

    async def wait_ready(self, on_progress: Callable[[Progress], None] | None, on_exit: Callable[[], None]) -> Ready:
        """Wait until the engine serves. `on_exit` is called once when it is gone later.

        Raises:
            StartupError (or the subclass that the engine raised): it could not start.
        """
        loop = asyncio.get_running_loop()
        self.ready = loop.create_future()
        self._on_progress, self._on_exit = on_progress, on_exit
        loop.add_reader(self._status_fd, self._read_status)
        return await self.ready

    def _read_status(self) -> None:
        try:
            data = os.read(self._status_fd, 65_536)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._status_fd)
            self._gone()
            return
        self.heard_s = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._handle(_decoder.decode(line))

    def _handle(self, status: Status) -> None:
        assert self.ready is not None
        if isinstance(status, Beat):
            return
        if isinstance(status, Progress):
            if self._on_progress is not None:
                self._on_progress(status)
        elif self.ready.done():
            return
        elif isinstance(status, Ready):
            self.ready.set_result(status)
        else:
            self.ready.set_exception(_startup_error(status))

    def _gone(self) -> None:
        assert self.ready is not None
        if not self.ready.done():
            code = self._reap(5.0)
            self.ready.set_exception(StartupError(f"the engine process ended with exit code {code} before it was ready: see its log above"))
        if self._on_exit is not None:
            self._on_exit()

    def _reap(self, timeout_s: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    async def close(self, timeout_s: float) -> int:
        """Ask it to end, kill it when `timeout_s` has passed, remove its socket directory; returns the exit code. Idempotent."""
        if self._status_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._status_fd)
            os.close(self._status_fd)
            self._status_fd = -1
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._process.poll() is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
        return int(self._process.returncode)


def _startup_error(failed: Failed) -> StartupError:
    kind = getattr(errors, failed.kind, StartupError)
    if not (isinstance(kind, type) and issubclass(kind, StartupError)):
        kind = StartupError
    return kind(failed.message, code=failed.code)


def encode_status(status: Status) -> bytes:
    """One line of the status pipe."""
    return msgspec.json.encode(status) + b"\n"


def decode_launch(line: bytes) -> Launch:
    """The line on stdin; raises msgspec.DecodeError for anything else."""
    return msgspec.json.decode(line, type=Launch)
