"""The chunks of a stream as WebSocket messages: connect to `/v1/completions` or `/v1/chat/completions`, send a request body per message.

Each request is answered with the same JSON chunks as over SSE, one a text message, then `[DONE]`; or with one error object. Requests of a
connection run one after the other; closing the connection aborts the one that runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.websockets import WebSocket

from hexad.application.api import wire
from hexad.application.api.admission import shutting_down
from hexad.application.api.body import parse_object
from hexad.application.api.errors import as_hexad_error
from hexad.application.api.sse import EventStream
from hexad.application.api.state import ServerState
from hexad.common.errors import PermissionDeniedError, RequestError
from hexad.common.log import access

Body = dict[str, Any]
Answer = Callable[[ServerState, Any, Body], Awaitable[Response]]
MAX_WAITING = 16  # messages that may come while a request runs
DONE = "[DONE]"
TOO_MANY, GOING_AWAY = 1008, 1001  # close codes


class Inbox:
    """Messages of the caller, read all the while, so that its leaving is noticed at once."""

    def __init__(self, socket: WebSocket, max_bytes: int) -> None:
        """`max_bytes` of messages may wait beside the one that runs."""
        self.gone = asyncio.Event()
        self.flooded = False
        self._max_bytes = max_bytes
        self._waiting_bytes = 0
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_WAITING + 1)
        self._socket = socket
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while (message := await self._socket.receive())["type"] == "websocket.receive":
            text = message.get("text")
            data = text.encode("utf-8", "surrogatepass") if text is not None else message.get("bytes") or b""
            self._waiting_bytes += len(data)
            if self._messages.qsize() >= MAX_WAITING or self._waiting_bytes > self._max_bytes:
                self.flooded = True
                break
            self._messages.put_nowait(data)
            del message, text, data  # or the loop would hold the newest while it waits
        self.gone.set()
        self._messages.put_nowait(None)

    async def next(self) -> bytes | None:
        """The next message, None when there will be no more."""
        data = await self._messages.get()
        self._waiting_bytes -= len(data or b"")
        return data


def check_origin(socket: WebSocket, allowed: tuple[str, ...]) -> None:
    """Browsers send their page's origin and apply no rule of their own to WebSockets: a foreign page may not use this server.

    Raises:
        PermissionDeniedError: another site than this one, and not an allowed one.
    """
    origin = socket.headers.get("origin")
    if origin is None or "*" in allowed or origin in allowed:
        return
    if urlsplit(origin).netloc != socket.headers.get("host"):
        raise PermissionDeniedError("pages of this origin may not connect: allow it with --allowed-origins")


async def serve_socket(state: ServerState, socket: WebSocket, answer: Answer) -> None:
    """One connection, until the caller leaves, floods it, or the server ends."""
    check_origin(socket, state.config.server.allowed_origins)
    await socket.accept()
    inbox = Inbox(socket, state.config.server.max_body_bytes)
    first_id, number = socket.scope["state"]["request_id"], 0
    try:
        while (data := await inbox.next()) is not None and not inbox.flooded:
            number += 1
            socket.scope["state"].update(request_id=f"{first_id}-{number}", record={})
            await _one(state, socket, inbox, answer, data)
            if state.admission.draining:
                break
        if not inbox.gone.is_set() or inbox.flooded:
            await socket.close(TOO_MANY if inbox.flooded else GOING_AWAY)
    finally:
        inbox.task.cancel()
        await asyncio.gather(inbox.task, return_exceptions=True)


async def _one(state: ServerState, socket: WebSocket, inbox: Inbox, answer: Answer, data: bytes) -> None:
    """One request, with its access record."""
    scope, start_s, status = socket.scope, time.monotonic(), 499
    try:
        await _stream(state, socket, inbox, answer, data)
        status = 499 if inbox.gone.is_set() else 200
    except Exception as error:
        failure = as_hexad_error(error)
        status, scope["state"]["record"]["error"] = failure.status, failure.code
        if not inbox.gone.is_set():
            await socket.send_text(wire.encode(failure.body()).decode())
    finally:
        duration_s = time.monotonic() - start_s
        state.metrics.observe_http("WEBSOCKET", scope["path"], status, duration_s)
        access(
            request_id=scope["state"]["request_id"],
            method="WEBSOCKET",
            path=scope["path"],
            status=status,
            duration_s=duration_s,
            client=(scope.get("client") or ("",))[0],
            **scope["state"]["record"],
        )


async def _stream(state: ServerState, socket: WebSocket, inbox: Inbox, answer: Answer, data: bytes) -> None:
    """Raises HexadError: the request is refused, or failed."""
    if len(data) > state.config.server.max_body_bytes:
        raise RequestError(f"the message has {len(data):,} bytes, the limit is {state.config.server.max_body_bytes:,}: send less")
    body = parse_object(data)
    if body.setdefault("stream", True) is not True:
        raise RequestError("stream must be true, or be left out, on a WebSocket", param="stream")
    events = await answer(state, socket, body)
    assert isinstance(events, EventStream)
    ticket = events.ticket
    pump, gone = asyncio.ensure_future(_pump(socket, events)), asyncio.ensure_future(inbox.gone.wait())
    ends: set[asyncio.Future[Any]] = {pump, gone, ticket.killed}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if pump.done():
            pump.result()
        elif not gone.done():
            raise shutting_down()
    finally:
        for task in (pump, gone):
            task.cancel()
        await asyncio.gather(pump, gone, return_exceptions=True)
        await events.frames.aclose()
        ticket.release()


async def _pump(socket: WebSocket, events: EventStream) -> None:
    async for frames in events.frames:
        for event in frames.split(b"\n\n")[:-1]:
            await socket.send_text(event.removeprefix(b"data: ").decode())
