"""uvicorn's WebSocket protocol with the bounds that it lacks: peers that do not read, and peers that send too many small frames."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from hexad.application.api.patience import PerSecond, WriteWatch

MAX_SMALL_FRAMES_PER_S = 2_000
SMALL_BYTES = 1_024
PIECE_BYTES = 8_192  # read at once: a packet holds tens of thousands of empty frames, a second's work
TOO_MANY = 1008  # close code: policy violation


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
    - More than `MAX_SMALL_FRAMES_PER_S` small frames, of whatever kind, end the connection: the event loop is everybody's.
    """

    write_timeout_s = 60.0

    _watch: WriteWatch
    _small_frames: PerSecond

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._small_frames = PerSecond(MAX_SMALL_FRAMES_PER_S)
        self._watch = WriteWatch(self.loop, self.transport, self.write_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + PIECE_BYTES])

    def handle_text(self, event: Frame) -> None:
        self._count(event)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._count(event)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        self._count(event)
        super().handle_cont(event)

    def handle_pong(self, event: Frame) -> None:
        self._count(event)
        super().handle_pong(event)

    def handle_ping(self) -> None:
        self._count(None)
        super().handle_ping()

    def _count(self, frame: Frame | None) -> None:
        if frame is not None and len(frame.data) >= SMALL_BYTES:
            return
        if self._small_frames.too_many(self.loop.time()) and not self.close_sent:
            self.conn.send_close(TOO_MANY, "too many frames")
            self.handle_parser_exception()  # says so to the application, and closes

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
