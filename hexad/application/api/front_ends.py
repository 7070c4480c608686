"""Several API processes over one engine (`--api-server-count`): this process owns the engine and the port, the others serve.

Each front end has a listening socket of its own on the one port (SO_REUSEPORT: the kernel spreads connections); this process keeps them
open, so that a front end that dies loses what it was doing, but no connection that waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from typing import Any

import msgspec

from hexad.common.config import HexadConfig
from hexad.common.errors import StartupError

log = logging.getLogger("hexad.server")
MAX_DEATHS, WINDOW_S = 5, 600.0
PAUSE_S = 0.5
LAST_WORDS_S = 3.0  # after the second signal
GRACE_S = 1.0


class FrontEndLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The first line on stdin."""

    config: dict[str, Any]  # resolved
    address: str  # of the engine
    socket_fd: int  # bound, and listening
    directory: str  # shared with the siblings
    index: int


class NewEngine(msgspec.Struct, frozen=True):
    """The engine was started again, at another address."""

    address: str


class FrontEnds:
    """The processes, one per socket. `failed` is set when they die too often."""

    def __init__(self, config: HexadConfig, sockets: list[socket.socket], address: str) -> None:
        """`config` is the resolved one; `address` the engine's."""
        self.failed = asyncio.Event()
        self._config = config
        self._sockets = sockets
        self._address = address
        self._directory = tempfile.mkdtemp(prefix="hexad-api-")  # mkdtemp makes it 0700
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._deaths: deque[float] = deque()
        self._generation = 0
        self._ending = False

    async def start(self) -> bool:
        """Return once all of them serve (True).

        Raises:
            StartupError: one does not.
        """
        await asyncio.gather(*(self._spawn(number) for number in range(len(self._sockets))))
        self._watchers = [asyncio.create_task(self._watch(number)) for number in self._processes]
        return True

    async def _spawn(self, number: int) -> None:
        fd = self._sockets[number].fileno()
        command = (sys.executable, "-m", "hexad.application.api.front_end")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, pass_fds=(fd,), start_new_session=True)
        self._processes[number] = process
        self._generation += 1  # a successor must not overwrite what its predecessor counted
        launch = FrontEndLaunch(
            config=self._config.model_dump(mode="json"),
            address=self._address,
            socket_fd=fd,
            directory=self._directory,
            index=self._generation,
        )
        await _say(process, launch)
        assert process.stdout is not None
        if await process.stdout.readline() != b"ready\n":
            raise StartupError(f"an API process ended with exit code {await process.wait()} before it was ready: see its log above")

    async def _watch(self, number: int) -> None:
        """Start the front end again whenever it dies."""
        while not self._ending:
            code = await self._gone(self._processes[number])
            if self._ending:
                break
            now_s = time.monotonic()
            self._deaths.append(now_s)
            while now_s - self._deaths[0] > WINDOW_S:
                self._deaths.popleft()
            log.error("an API process ended (exit code %s)", code)
            if len(self._deaths) > MAX_DEATHS:
                self.failed.set()
                return
            await asyncio.sleep(PAUSE_S)
            try:
                await self._spawn(number)
            except StartupError as error:
                log.error("%s", error.message)
                continue
            if self._ending:
                self._signal(number)
        self._sockets[number].close()  # nobody accepts from it any more

    async def _gone(self, process: asyncio.subprocess.Process) -> int:
        """The exit code, once it has ended, or has been ended because it gave no sign of life.

        A stopped or hung process still gets its share of the connections.
        """
        assert process.stdout is not None
        patience_s, silent = self._config.server.engine_timeout_s, False
        while True:
            try:
                line = await asyncio.wait_for(process.stdout.readline(), GRACE_S if silent else patience_s)
            except TimeoutError:
                if silent:  # twice: if it was we who were stopped, what came meanwhile is read by now
                    log.error("an API process has given no sign of life for %g s: it is replaced", patience_s)
                    process.kill()
                    return await process.wait()
                silent = True
                continue
            silent = False
            if not line:
                return await process.wait()

    async def use(self, address: str) -> None:
        """The engine is at another address now."""
        self._address = address
        for process in self._processes.values():
            await _say(process, NewEngine(address))

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._processes[number].send_signal(signal.SIGTERM)

    async def end(self, timeout_s: float, forced: asyncio.Event) -> None:
        """Let all drain, at most `timeout_s`; `forced` set means now."""
        self._ending = True
        for number in self._processes:
            self._signal(number)
        waiting: asyncio.Future[Any] = asyncio.ensure_future(asyncio.gather(*self._watchers))
        hurry: asyncio.Future[Any] = asyncio.ensure_future(forced.wait())
        await asyncio.wait({waiting, hurry}, timeout=timeout_s + LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not waiting.done():
            for number in self._processes:
                self._signal(number)
            await asyncio.wait({waiting}, timeout=LAST_WORDS_S)
        await self.close(waiting)

    async def close(self, *waiting: asyncio.Future[Any]) -> None:
        """Kill what is left."""
        self._ending = True
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await asyncio.gather(*(process.wait() for process in self._processes.values()))
        for task in (*waiting, *self._watchers):
            task.cancel()
        await asyncio.gather(*waiting, *self._watchers, return_exceptions=True)
        for sock in self._sockets:
            sock.close()
        shutil.rmtree(self._directory, ignore_errors=True)


async def _say(process: asyncio.subprocess.Process, message: FrontEndLaunch | NewEngine) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # one that died is noticed elsewhere
        process.stdin.write(msgspec.json.encode(message) + b"\n")
        await process.stdin.drain()


def more_sockets(sock: socket.socket, count: int, backlog: int) -> list[socket.socket]:
    """`sock` and as many others on its address as make `count`, all listening. It must have SO_REUSEPORT set."""
    sockets = [sock]
    for _ in range(count - 1):
        another = socket.socket(sock.family, sock.type, sock.proto)
        another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        another.bind(sock.getsockname())
        sockets.append(another)
    for one in sockets:
        one.listen(backlog)
    return sockets
