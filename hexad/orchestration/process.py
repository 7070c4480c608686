"""The engine process, from its launch line to its exit code. What it runs is built by a function that the roof injects.

Exit codes: 0 asked to end (or the parent is gone), 2 could not start, 1 died in service. Signals are ignored: the parent decides, and says
so by closing stdin. When the parent dies, by whatever means, stdin ends too and the engine follows within seconds, also in the middle of
a step or of loading.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hexad.common import log as logs
from hexad.common.clock import SystemClock
from hexad.common.config import HexadConfig
from hexad.common.errors import StartupError
from hexad.orchestration.core import CoreLoop
from hexad.orchestration.messages import Welcome
from hexad.orchestration.server import EngineServer
from hexad.orchestration.spawn import Beat, Failed, Launch, Progress, Ready, Status, decode_launch, encode_status

log = logging.getLogger("hexad.engine")

EXIT_ASKED, EXIT_DIED, EXIT_STARTUP = 0, 1, StartupError.exit_code
GRACE_S = 5.0  # between the end of stdin and a hard exit
Report = Callable[[str, str], None]  # (phase, detail)


@dataclass(frozen=True, slots=True)
class Built:
    """What a builder hands over: everything that serves."""

    core: CoreLoop
    welcome: Welcome
    config: HexadConfig  # resolved
    notes: tuple[str, ...]  # how "auto" was decided


Build = Callable[[HexadConfig, Report], Built]


def main(build: Build) -> int:
    """Run an engine process that `spawn.EngineProcess` started; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    launch = decode_launch(_read_line(sys.stdin.fileno()))
    os.set_inheritable(launch.status_fd, False)
    parent = ParentWatch(launch)
    config = HexadConfig.parse(launch.config)
    logs.set_up(config.server.log_level, config.server.log_format, process="engine")
    try:
        built = build(config, parent.report)
        server = EngineServer(built.core, built.welcome, launch.address, SystemClock(), stop_fd=sys.stdin.fileno())
    except StartupError as error:
        parent.tell(Failed(kind=type(error).__name__, message=error.message, code=error.code))
        return EXIT_STARTUP
    except Exception as error:
        log.exception("the engine could not start")
        parent.tell(
            Failed(kind="StartupError", message=f"the engine could not start: {type(error).__name__}: {error}", code="startup_failed")
        )
        return EXIT_STARTUP
    return _serve(server, built, parent)


def _serve(server: EngineServer, built: Built, parent: ParentWatch) -> int:
    parent.on_end = server.stop.set
    # What exists now lives as long as the process: the collector need not walk it in the middle of a step.
    gc.collect()
    gc.freeze()
    parent.report("ready", "")
    parent.tell(Ready(config=built.config.model_dump(mode="json"), notes=built.notes))
    try:
        asked = server.run()
    except Exception:
        log.exception("the engine process failed")
        asked = False
    server.close()
    with contextlib.suppress(Exception):
        built.core.close()
    parent.remove_sockets()
    return EXIT_ASKED if asked else EXIT_DIED


class ParentWatch:
    """The line to the parent: tells it how the start goes, and ends this process when it is gone."""

    def __init__(self, launch: Launch) -> None:
        self.on_end: Callable[[], None] | None = None  # asked to stop in an orderly way; None: still starting, exit at once
        self._status_fd = launch.status_fd
        self._directory = Path(launch.address.removeprefix("ipc://")).parent
        self._parent = os.getppid()
        self._clock = SystemClock()
        self._started_s = self._clock.now()
        threading.Thread(target=self._watch, name="parent-watch", daemon=True).start()

    def report(self, phase: str, detail: str) -> None:
        """Start-up has come to `phase`."""
        self.tell(Progress(phase, detail, round(self._clock.now() - self._started_s, 3)))

    def tell(self, status: Status) -> None:
        """Send one status line; a parent that is gone is noticed elsewhere."""
        with contextlib.suppress(OSError):
            os.write(self._status_fd, encode_status(status))

    def remove_sockets(self) -> None:
        """The parent does it too, but it may be gone."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _watch(self) -> None:
        stdin = sys.stdin.fileno()
        # Nothing but the launch line is ever written: readable means ended. The parent's id is a second look, for the case that
        # another process inherited the pipe's other side.
        while not select.select([stdin], [], [], 1.0)[0] and os.getppid() == self._parent:
            self.tell(Beat())  # a stopped process is silent; a long step is not
        if self.on_end is not None:
            self.on_end()
            threading.Event().wait(GRACE_S)
        self.remove_sockets()
        os._exit(EXIT_ASKED)


def _read_line(fd: int) -> bytes:
    """Read up to the first newline without reading ahead of what the watcher must see."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 65_536)
        if not byte:
            break
        line += byte
    return line
