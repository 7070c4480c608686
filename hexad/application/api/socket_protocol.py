"""uvicorn's WebSocket protocol with the bounds that it lacks: a peer that does not read is not read from, and in the end disconnected."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from hexad.application.api.patience import WriteWatch


def guarded_socket(write_timeout_s: float) -> Callable[..., GuardedSocket]:
    """A factory of protocols, as uvicorn calls it."""

    def make(*args: Any, **kwargs: Any) -> GuardedSocket:
        protocol = GuardedSocket(*args, **kwargs)
        protocol.write_timeout_s = write_timeout_s
        return protocol

    return make


class GuardedSocket(WebSocketsSansIOProtocol):
    """One WebSocket.

    - While our answers wait to be sent, nothing is read: each ping is owed a pong, and a peer that sends without reading would fill
      the memory with them.
    - A reader that takes nothing for `write_timeout_s` is disconnected, which aborts its request.
    """

    write_timeout_s = 60.0

    _watch: WriteWatch

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._watch = WriteWatch(self.loop, self.transport, self.write_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch.paused()
        self._stop_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch.resumed()
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    async def receive(self) -> Any:
        message = await super().receive()  # may start reading again
        if not self.writable.is_set():
            self._stop_reading()
        return message

    def _stop_reading(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is closing
            self.transport.pause_reading()
