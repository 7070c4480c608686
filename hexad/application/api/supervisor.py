"""Keeps an engine process running: when it dies, its requests get one error each, and a new one is started, with pauses in between."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from hexad.application.api.quarantine import Quarantine
from hexad.application.api.strike_board import StrikeBoard
from hexad.common.errors import EngineDeadError, StartupError
from hexad.orchestration.client import EngineClient, Stats
from hexad.orchestration.messages import Submit, Welcome
from hexad.orchestration.stream import RequestStream

log = logging.getLogger("hexad.server")
MAX_DEATHS = 5  # within WINDOW_S; one more, and it is given up
WINDOW_S = 600.0
MAX_PAUSE_S = 30.0
CLOSE_S = 6.0  # at the end: a moment longer than the engine itself gives its last step, then it is killed
FIRST_PAUSE_S = 0.5  # doubles with each death in the window


class SupervisedEngine:
    """An `Engine` that outlives its process. `gave_up` is set when it has died too often. Event-loop bound."""

    def __init__(
        self,
        client: EngineClient,
        start: Callable[[], Awaitable[EngineClient]],
        *,
        max_deaths: int = MAX_DEATHS,
        first_pause_s: float = FIRST_PAUSE_S,
        board: StrikeBoard | None = None,
    ) -> None:
        self.gave_up = asyncio.Event()
        self.num_deaths = 0
        self.on_restart: Callable[[EngineClient], Awaitable[None]] | None = None  # told each new connection
        self._start = start
        self._max_deaths = max_deaths
        self._first_pause_s = first_pause_s
        self._quarantine = Quarantine(board)
        self._deaths: deque[float] = deque()
        self._restart: asyncio.Task[None] | None = None
        self._closed = False
        self._use(client)

    def _use(self, client: EngineClient) -> None:
        self._client = client
        self.welcome: Welcome = client.welcome
        client.on_death(self._on_death)

    @property
    def address(self) -> str:
        return self._client.address

    @property
    def is_alive(self) -> bool:
        return self._client.is_alive

    def submit(self, submit: Submit) -> RequestStream:
        """Send a request.

        Raises:
            EngineDeadError: there is no engine at the moment.
            RequestError: this very request has been there whenever the engine died.
        """
        suspect = self._quarantine.check(submit)
        stream = self._client.submit(submit)
        self._quarantine.watch(suspect, stream)
        return stream

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self._client.abort(request_id, choice)

    async def call(self, method: str, timeout_s: float = 30.0) -> Stats:
        return await self._client.call(method, timeout_s)

    def _on_death(self, error: EngineDeadError) -> None:
        self.num_deaths += 1
        self._quarantine.strike(self._client.lost)
        if not self._closed and self._restart is None:
            self._restart = asyncio.get_running_loop().create_task(self._revive())

    async def _revive(self) -> None:
        try:
            while not self._closed:
                now_s = time.monotonic()
                self._deaths.append(now_s)
                while now_s - self._deaths[0] > WINDOW_S:
                    self._deaths.popleft()
                if len(self._deaths) > self._max_deaths:
                    log.error("the engine process died %d times in %g s: giving up", len(self._deaths), WINDOW_S)
                    self.gave_up.set()
                    return
                await asyncio.sleep(min(MAX_PAUSE_S, self._first_pause_s * 2 ** (len(self._deaths) - 1)))
                await self._client.close(1.0)
                try:
                    self._use(await self._start())
                except StartupError as error:
                    log.error("the engine process could not be started again: %s", error.message)
                    continue
                except Exception:  # whatever it is, a server without an engine must go on trying, or give up aloud
                    log.exception("the engine process could not be started again")
                    continue
                log.warning("the engine is there again")
                if self.on_restart is not None:
                    await self.on_restart(self._client)
                return
        finally:
            self._restart = None

    async def close(self) -> None:
        """End the engine; nothing is started again."""
        self._closed = True
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        await self._client.close(CLOSE_S)
