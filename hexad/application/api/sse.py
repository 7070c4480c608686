"""Answers that a vanished caller must stop: an event stream, and a wait for a whole result.

A disconnect is noticed in three windows (before the first token, mid-stream, while a whole answer is computed): each time the work is
cancelled, which closes its generator, which aborts the request in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hexad.application.api import wire
from hexad.application.api.admission import Ticket, shutting_down
from hexad.application.api.direct import DirectBody, direct_body
from hexad.application.api.errors import as_hexad_error
from hexad.common.errors import HexadError

T = TypeVar("T")
HOLD_S = 1.0  # how long the status line waits for the first output, so that a refusal by the engine is a plain HTTP error
CLOSE_S = 5.0  # how long the last event of a killed stream may take to be written


class ClientGoneError(Exception):
    """The caller closed the connection before the answer was complete."""


async def disconnected(receive: Receive) -> None:
    """Returns when the caller has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def finish(work: Coroutine[Any, Any, T], receive: Receive, ticket: Ticket) -> T:
    """The result of `work`, which is cancelled when the caller goes away or the server ends.

    Raises:
        ClientGoneError: the caller has gone.
        OverloadedError: the server ends.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        ends: set[asyncio.Future[Any]] = {task, gone, ticket.killed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError
        raise shutting_down()
    finally:
        await _stop(task, gone)


async def _stop(*tasks: asyncio.Future[Any]) -> None:
    """Cancel and wait: afterwards their `finally` blocks have run."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Lane(Protocol):
    """Where a source of frames may write by itself, while it owes its generator none."""

    @property
    def is_open(self) -> bool:
        """`write` may be called now."""
        ...

    def write(self, data: bytes) -> None: ...


class EventStream(Response):
    """Server-sent events from a generator of frames, with comment lines in the gaps. Releases the ticket at the end.

    `attach` is called once, after the first frame, with a lane by which the source may go past its generator, if the server has one.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        ticket: Ticket,
        *,
        heartbeat_s: float,
        headers: Mapping[str, str] | None = None,
        error_frame: Callable[[HexadError], bytes] = wire.error_frame,
        attach: Callable[[Lane], None] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self.frames = frames
        self.ticket = ticket
        self.heartbeat_s = heartbeat_s
        self.error_frame = error_frame
        self.attach = attach

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._direct, self._time = direct_body(scope), asyncio.get_running_loop().time
        gone = asyncio.ensure_future(disconnected(receive))
        first = asyncio.ensure_future(anext(self.frames))
        pump: asyncio.Task[None] | None = None
        try:
            ends: set[asyncio.Future[Any]] = {gone, self.ticket.killed}
            await asyncio.wait({first, *ends}, timeout=min(HOLD_S, self.heartbeat_s), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return
            if self.ticket.killed.done() and not first.done():
                raise shutting_down()
            if first.done():
                first.result()  # a refusal is raised here, while it can still be a plain HTTP error
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._sent_s = asyncio.get_running_loop().time()
            if not first.done():
                await self._write(send, wire.HEARTBEAT)
            pump = asyncio.create_task(self._pump(send, first))
            await self._watch(send, pump, ends)
        finally:
            await _stop(gone, first, *([pump] if pump is not None else []))
            await self.frames.aclose()
            self.ticket.release()

    async def _watch(self, send: Send, pump: asyncio.Task[None], ends: set[asyncio.Future[Any]]) -> None:
        """Send heartbeats until the pump is through, the caller gone, or the server ends."""
        loop = asyncio.get_running_loop()
        while not pump.done():
            left_s = self._sent_s + self.heartbeat_s - loop.time()
            done, _ = await asyncio.wait({pump, *ends}, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
            if done:
                break
            if loop.time() >= self._sent_s + self.heartbeat_s and not self._writing:
                await self._write(send, wire.HEARTBEAT)
        error: BaseException | None = None
        if pump.done():
            error = pump.exception()
        elif self.ticket.killed.done():
            await _stop(pump)
            error = shutting_down()
        else:
            return
        last = self.error_frame(as_hexad_error(error)) if error is not None else b""
        message = {"type": "http.response.body", "body": last, "more_body": False}
        await asyncio.wait_for(send(message), CLOSE_S)

    async def _pump(self, send: Send, first: asyncio.Future[bytes]) -> None:
        await self._write(send, await first)
        if self.attach is not None and self._direct is not None:
            self.attach(self)
        async for frame in self.frames:
            await self._write(send, frame)

    # A lane for the source.

    @property
    def is_open(self) -> bool:
        return self._direct is not None and self._direct.is_open and not self._writing

    def write(self, data: bytes) -> None:
        assert self._direct is not None
        self._direct.write(data)
        self._sent_s = self._time()

    _direct: DirectBody | None = None
    _writing = False  # a write that waits for a slow reader must not be joined by heartbeats
    _sent_s = 0.0

    async def _write(self, send: Send, data: bytes) -> None:
        self._writing = True
        try:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self._writing = False
            self._sent_s = asyncio.get_running_loop().time()
