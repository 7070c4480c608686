"""uvicorn's HTTP protocol with the bounds that it lacks: the size of a request's head, the requests that wait on a connection, and the
patience with callers that do not send or do not read. What it refuses by itself is answered in the API's error format.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from hexad.application.api import wire
from hexad.application.api.direct import EXTENSION, DirectBody
from hexad.application.api.patience import PerSecond, WriteWatch
from hexad.common.errors import HexadError, PayloadTooLargeError, RequestError

MAX_HEAD_BYTES = 64 * 1024  # request line and headers
MAX_HEADERS = 128
MAX_PIPELINED = 16  # requests that wait behind the one that is served: a packet holds thousands, each costs kilobytes
MAX_SMALL_PIECES_PER_S = 5_000  # pieces of a body below SMALL_BYTES: in chunks of one byte it would occupy the event loop
SMALL_BYTES = 64
MIN_BODY_BYTES_PER_S = 16 * 1024  # after the first `read_timeout_s`
LINGER_S = 2.0  # how long the rest of a body is read after its request has been answered, so that the answer is not lost
MAX_LINGER_BYTES = 64 * 2**20


class HeadTooLargeError(PayloadTooLargeError):
    """Request line and headers are larger than the server accepts."""

    status = 431
    default_code = "headers_too_large"


class ReadTimeoutError(RequestError):
    """The request did not arrive in time."""

    status = 408
    default_code = "request_timeout"


def guarded(read_timeout_s: float, write_timeout_s: float) -> Callable[..., GuardedProtocol]:
    """A factory of protocols, as uvicorn calls it."""

    def make(*args: Any, **kwargs: Any) -> GuardedProtocol:
        protocol = GuardedProtocol(*args, **kwargs)
        protocol.read_timeout_s, protocol.write_timeout_s = read_timeout_s, write_timeout_s
        return protocol

    return make


class GuardedProtocol(HttpToolsProtocol):
    """One connection.

    - A head must be complete within `read_timeout_s` of the connection's, or its own, first byte, and keep within the bounds above.
    - A body must keep up `MIN_BODY_BYTES_PER_S` once `read_timeout_s` has passed. 408 otherwise.
    - What is refused is answered, unless an answer has begun; then both sides are closed, ours at once, theirs after `LINGER_S` at most.
    - A reader that takes nothing for `write_timeout_s` while something waits for it is disconnected, which aborts its request.
    """

    read_timeout_s = 30.0
    write_timeout_s = 60.0

    _reading: asyncio.TimerHandle | None = None  # the limit on what is being received
    _watch: WriteWatch
    _small_pieces: PerSecond
    _in_head = True
    _in_body = False
    _num_heads = 0  # complete ones
    _raw_head_bytes = 0  # of a head that is not complete
    _head_bytes = 0
    _num_headers = 0
    _body_bytes = 0
    _lingered_bytes = 0
    _began_s = 0.0
    _refusal: HexadError | None = None
    _served: RequestResponseCycle | None = None  # the one whose answer is sent now, or was sent last; `cycle` is the latest that arrived
    _answered_early = False  # before the end of its body
    _discards = False  # what still comes belongs to a refused request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._small_pieces = PerSecond(MAX_SMALL_PIECES_PER_S)
        self._watch = WriteWatch(self.loop, transport, self.write_timeout_s)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._reading)
        self._watch.stop()
        self._tell_gone()
        super().connection_lost(exc)

    # Receiving.

    def data_received(self, data: bytes) -> None:
        if self._discards:
            self._linger(len(data))
            return
        head = self._num_heads if self._in_head else None
        if head is not None and self._reading is None:
            self._expect()
        super().data_received(data)
        if self._in_head and self._num_heads == head and not self.transport.is_closing():  # all of `data` belongs to one head
            self._raw_head_bytes += len(data)
            if self._raw_head_bytes > MAX_HEAD_BYTES:
                self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        self._head_bytes = self._num_headers = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._head_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = self._too_large()
            raise self._refusal  # the parser stops, `send_400_response` answers
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = RequestError(
                f"more than {MAX_PIPELINED} requests wait on one connection: read the answers first, or open another one",
                code="too_many_pipelined",
            )
            raise self._refusal
        self._num_heads += 1
        self._expect()
        super().on_headers_complete()  # may raise: then no cycle was made for this head
        self.scope["extensions"] = {EXTENSION: DirectBody(self.cycle)}  # type: ignore[dict-item]
        self._in_head, self._in_body, self._body_bytes = False, True, 0

    def on_body(self, body: bytes) -> None:
        if len(body) < SMALL_BYTES and self._small_pieces.too_many(self.loop.time()):
            self._refusal = RequestError(
                f"the body came in more than {MAX_SMALL_PIECES_PER_S:,} chunks a second below {SMALL_BYTES} bytes: send larger ones",
                code="chunks_too_small",
            )
            raise self._refusal
        self._body_bytes += len(body)
        super().on_body(body)
        if self.cycle.response_complete:
            self._linger(len(body))

    def on_message_complete(self) -> None:
        self._in_head, self._in_body, self._raw_head_bytes = True, False, 0
        self._stop(self._reading)
        self._reading = None
        super().on_message_complete()
        if self._answered_early:  # from here the connection is idle
            self._answered_early = False
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if (
            self._in_body and self.cycle.response_complete and not self.transport.is_closing()
        ):  # answered early: do not read the rest for ever
            self._answered_early = True
            self._stop(self._reading)
            self._reading = self.loop.call_later(LINGER_S, self.transport.close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def _linger(self, num_bytes: int) -> None:
        """Count what nobody wants."""
        self._lingered_bytes += num_bytes
        if self._lingered_bytes > MAX_LINGER_BYTES:
            self.transport.close()

    def _expect(self) -> None:
        """Start the clock for a head or a body."""
        self._stop(self._reading)
        self._began_s = self.loop.time()
        self._reading = self.loop.call_later(self.read_timeout_s, self._late)

    def _late(self) -> None:
        busy = self.cycle is not None and not self.cycle.response_complete and not self._in_body
        if busy or self.pipeline:  # not the caller's fault: nothing is read while an earlier request is served
            self._reading = self.loop.call_later(min(5.0, self.read_timeout_s), self._late)
            return
        enough = (self.loop.time() - self._began_s) * MIN_BODY_BYTES_PER_S
        if self._in_body and (self._body_bytes >= enough or self.flow.read_paused):  # paused: the application does not take it
            self._body_bytes = 0  # it must go on like this: one that came fast and stops is late, too
            self._expect()
            return
        if self._in_head and not self._raw_head_bytes:
            self.transport.close()  # nothing was asked
            return
        what = "body" if self._in_body else "head"
        self._refuse(ReadTimeoutError(f"the request's {what} did not arrive within {self.read_timeout_s:g} s: send it faster"))

    # Answers that no application gives.

    def _too_large(self) -> HeadTooLargeError:
        return HeadTooLargeError(
            f"the request line and headers exceed {MAX_HEAD_BYTES:,} bytes or {MAX_HEADERS} headers: send fewer; text belongs in the body"
        )

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or RequestError("this is not a valid HTTP/1.1 request", code="malformed_request"))

    def _refuse(self, error: HexadError) -> None:
        """Answer, unless an answer has begun, and close."""
        if self.transport.is_closing() or self._discards:
            return
        served = self._served
        if served is not None and served.response_started and not served.response_complete:
            self.transport.close()
            return
        # In the rest of a body whose request has its answer, a second answer would be nobody's.
        if served is None or not served.response_complete or not self._in_body:
            body = wire.encode(error.body())
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self._discard()

    def _discard(self) -> None:
        """End our side, and read on for a while: closed at once, the caller would be reset while it sends, and might miss the answer."""
        self._discards = True
        self._tell_gone()
        self.flow.resume_reading()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        self._stop(self._reading)
        self._reading = self.loop.call_later(LINGER_S, self.transport.close)

    def _tell_gone(self) -> None:
        """Nobody waits for what is served now: uvicorn tells the latest request only, which may be another one."""
        served = self._served
        if served is not None and not served.response_complete:
            served.disconnected, served.waiting_for_100_continue = True, False
            served.message_event.set()
        self.pipeline.clear()

    # Sending.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch.paused()

    def resume_writing(self) -> None:
        self._watch.resumed()
        super().resume_writing()

    def handle_websocket_upgrade(self) -> None:
        self._stop(self._reading)
        self._watch.stop()
        super().handle_websocket_upgrade()

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
