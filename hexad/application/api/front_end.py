"""One of several API processes over one engine: `python -m hexad.application.api.front_end`, started by `front_ends.py`.

Its first line on stdin says what it is; later lines name a new engine; the end of stdin means that the parent is gone. It says `ready` on
stdout once it listens, and then gives a sign of life every second. Signals are those of `service.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from hexad.application.api.front_ends import FrontEndLaunch, NewEngine
from hexad.application.api.service import Service
from hexad.application.api.shared_metrics import SharedMetrics
from hexad.application.api.startup import Opened, in_daemon_thread, load_text, make_state
from hexad.application.api.strike_board import StrikeBoard
from hexad.application.api.supervisor import SupervisedEngine
from hexad.common import log
from hexad.common.config import HexadConfig
from hexad.common.errors import StartupError
from hexad.models import sources
from hexad.orchestration.client import EngineClient

FOREVER = 2**31
JOIN_PAUSE_S = 0.02
BEAT_S = 1.0


class Line:
    """The parent's line: which engine to use."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._changed = asyncio.Event()

    async def follow(self, reader: asyncio.StreamReader) -> None:
        """Until the parent closes it or dies; then so do we."""
        while data := await reader.readline():
            self.address = msgspec.json.decode(data, type=NewEngine).address
            self._changed.set()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(1.0)
        os._exit(0)

    async def join(self, config: HexadConfig, dead: str) -> EngineClient:
        """Connect to an engine other than the one at `dead`, when there is one."""
        while self.address == dead:
            self._changed.clear()
            await self._changed.wait()
        return await EngineClient.connect(self.address, config_hash=config.fingerprint())


async def open_joined(config: HexadConfig, launch: FrontEndLaunch, line: Line) -> Opened:
    """The server's state over an engine that somebody else started.

    Raises:
        StartupError: the engine does not answer, or the model's text files cannot be read.
    """
    files = await in_daemon_thread(lambda: sources.fetch(config.model.model, revision=config.model.revision))
    text = await in_daemon_thread(lambda: load_text(config, files))
    client = await line.join(config, "")
    current = client.address

    async def again() -> EngineClient:
        nonlocal current
        client = await line.join(config, current)
        current = client.address
        return client

    board = StrikeBoard(Path(launch.directory) / "strikes", launch.index)
    engine = SupervisedEngine(client, again, max_deaths=FOREVER, first_pause_s=JOIN_PAUSE_S, board=board)
    shared = SharedMetrics(Path(launch.directory), launch.index)
    return Opened(make_state(config, engine, text, shared=shared), engine, text, ())


async def beat() -> None:
    """Tell the parent that the event loop runs, until cancelled."""
    os.set_blocking(sys.stdout.fileno(), False)
    while True:
        await asyncio.sleep(BEAT_S)
        with contextlib.suppress(OSError):  # the parent is stopped, or gone: noticed elsewhere
            os.write(sys.stdout.fileno(), b"beat\n")


async def main() -> int:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    launch = msgspec.json.decode(await reader.readline(), type=FrontEndLaunch)
    config = HexadConfig.parse(launch.config).with_values({"server.api_server_count": 1})
    log.set_up(config.server.log_level, config.server.log_format, process=f"api-{launch.index}")
    line = Line(launch.address)
    following = asyncio.ensure_future(line.follow(reader))
    beating: list[asyncio.Future[None]] = []
    sock = socket.socket(fileno=launch.socket_fd)

    def ready(opened: Opened, url: str) -> None:
        print("ready", flush=True)
        beating.append(asyncio.ensure_future(beat()))

    try:
        return await Service(config, lambda: open_joined(config, launch, line), ready, sock).run()
    except StartupError as error:
        print(error.message, file=sys.stderr)
        return StartupError.exit_code
    finally:
        for task in (following, *beating):
            task.cancel()


if __name__ == "__main__":
    import uvloop

    sys.exit(uvloop.run(main()))
