"""The core loop behind a ZeroMQ ROUTER: one thread that takes in frames, turns the loop, and sends each front end its news of the step
(over its `news_line`, where it has one).

One thread, because decoding a step's frames and encoding its news costs less than handing the interpreter lock to a second one
(measure: `python -m hexad.bench.core_loop`).
"""

from __future__ import annotations

import errno
import logging
import threading

import msgspec
import zmq

from hexad.common.clock import Clock
from hexad.common.wire import Codec
from hexad.orchestration.core import CoreLoop, News
from hexad.orchestration.messages import (
    PROTOCOL_VERSION,
    Abort,
    Call,
    CallResult,
    Hello,
    Output,
    Outputs,
    Submit,
    ToClient,
    ToCore,
    Welcome,
)
from hexad.orchestration.news_line import Line, LineListener

log = logging.getLogger("hexad.engine")

HEARTBEAT_S = 1.0
MAX_FRAMES_PER_STEP = 256  # a flood of requests must not hold up the running ones
STEP_WAIT_S = 0.5  # how long a step may keep the loop from its sockets, where the executor can wait with a limit
SEND_QUEUE_FRAMES = 10_000  # news a stopped front end may lag behind before its requests are given up


class EngineServer:
    """Serves one core loop at one address until `stop` is set or the core dies."""

    def __init__(self, core: CoreLoop, welcome: Welcome, address: str, clock: Clock, *, stop_fd: int | None = None) -> None:
        """Binds `address`. `stop_fd` becoming readable wakes an idle server, so that it sees `stop`."""
        self.stop = threading.Event()
        self._core = core
        self._welcome = welcome
        self._clock = clock
        self._codec_in: Codec[ToCore] = Codec(ToCore)
        self._codec_out: Codec[ToClient] = Codec(ToClient)
        self._front_ends: set[bytes] = set()  # those that said hello
        self._undelivered: dict[bytes, list[Output]] = {}  # of front ends that lag too far behind
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a front end that is gone fails, and that is how we know
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._listener = LineListener(address)  # before anybody can connect to the other
        self._socket.bind(address)
        self._lagging: set[bytes] = set()  # front ends whose line is full
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if stop_fd is not None:
            self._poller.register(stop_fd, zmq.POLLIN)
        self._next_beat_s = 0.0

    def run(self) -> bool:
        """Serve. True when it was asked to stop, False when the core died."""
        while not self.stop.is_set():
            self._beat()
            if not self._core.has_work():
                self._poller.poll(int(HEARTBEAT_S * 1000))
            self._receive()
            if self._lagging:
                self._catch_up()
            if self._core.has_work():
                self._send_news(self._core.step(STEP_WAIT_S))
            if self._core.death is not None:
                return False
        return True

    def close(self) -> None:
        """Send what is queued (up to the linger time) and release the sockets."""
        self._listener.close()
        self._socket.close()
        self._context.term()

    # In.

    def _receive(self) -> None:
        events: int = self._socket.getsockopt(zmq.EVENTS)  # type: ignore[assignment]
        if not events & zmq.POLLIN:  # the common case: an exception would cost several times as much
            return
        for _ in range(MAX_FRAMES_PER_STEP):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(parts)

    def _handle(self, parts: list[bytes]) -> None:
        """Whatever a client sends, the core goes on."""
        front_end = parts[0]
        try:
            if len(parts) != 2:
                raise msgspec.DecodeError(f"{len(parts)} frames in place of 2")
            message = self._codec_in.decode(parts[1])
            if isinstance(message, Hello):
                self._greet(front_end, message)
            elif front_end not in self._front_ends:
                # Its goodbye may also come after we noticed by ourselves that it is gone.
                log.debug("%s from a front end that did not say hello, or is forgotten: ignored", type(message).__name__)
            elif isinstance(message, Submit):
                self._core.submit(message, front_end)
            elif isinstance(message, Abort):
                for request_id in message.request_ids:
                    self._core.abort(request_id, front_end, message.choice)
            else:
                self._call(front_end, message)
        except (msgspec.DecodeError, RecursionError) as error:
            log.warning("a frame of %d bytes from front end %s is ignored: %s", sum(map(len, parts)), front_end.hex(), error)
        except Exception:
            log.exception("a message from front end %s could not be handled", front_end.hex())

    def _greet(self, front_end: bytes, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:  # the answer names our version: the front end refuses by itself
            log.warning("front end %s speaks protocol %d, this engine %d", front_end.hex(), hello.protocol, PROTOCOL_VERSION)
        else:
            self._listener.accept(self._front_ends)
            self._front_ends.add(front_end)
        self._send(front_end, self._welcome)

    def _call(self, front_end: bytes, call: Call) -> None:
        value: dict[str, float | int | str | None] = {}
        error: str | None = None
        match call.method:
            case "stats":
                value = {**self._core.stats(), "front_ends": len(self._front_ends)}
            case "reset_prefix_cache":
                self._core.reset_prefix_cache()
            case "ping":
                pass
            case "drain":
                self._core.drain()
                value = {"live_requests": self._core.live_requests()}
            case "goodbye":
                self._forget(front_end, "said goodbye")
                return
            case _:
                error = f"there is no call {call.method!r}: known are stats, reset_prefix_cache, ping, drain, goodbye"
        self._send(front_end, CallResult(call.call_id, value, error))

    # Out.

    def _send_news(self, news: News) -> None:
        for front_end, outputs in news.items():
            if front_end in self._undelivered:
                self._undelivered[front_end].extend(outputs)
            elif not self._send(front_end, Outputs(tuple(outputs))):
                self._fell_behind(front_end, outputs)

    def _send(self, front_end: bytes, message: ToClient) -> bool:
        """False when the front end's queue is full. One that is gone is forgotten, with all its requests."""
        if isinstance(message, Outputs) and (line := self._listener.lines.get(front_end)) is not None:
            return self._tell(front_end, line, self._codec_out.encode(message))
        try:
            self._socket.send_multipart((front_end, self._codec_out.encode(message)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._forget(front_end, "is gone")
        return True

    def _tell(self, front_end: bytes, line: Line, message: bytes) -> bool:
        """`_send` over a line."""
        try:
            taken = line.send(message, SEND_QUEUE_FRAMES)
        except OSError:
            self._forget(front_end, "is gone")
            return True
        if line.lags and front_end not in self._lagging:
            self._lagging.add(front_end)
            self._poller.register(line.sock.fileno(), zmq.POLLOUT)
        return taken

    def _catch_up(self) -> None:
        """Send what could not be sent before."""
        for front_end in tuple(self._lagging):
            line = self._listener.lines[front_end]
            try:
                line.flush()
            except OSError:
                self._forget(front_end, "is gone")
                continue
            if not line.lags:
                self._no_longer_lags(front_end)

    def _no_longer_lags(self, front_end: bytes) -> None:
        if front_end in self._lagging:
            self._lagging.remove(front_end)
            self._poller.unregister(self._listener.lines[front_end].sock.fileno())

    def _fell_behind(self, front_end: bytes, outputs: list[Output]) -> None:
        """Give up its requests, but keep the news, so that each stream still gets its one end when the front end wakes."""
        kept = self._undelivered[front_end] = list(outputs)
        log.error("front end %s is %d messages behind: its requests are aborted", front_end.hex(), SEND_QUEUE_FRAMES)
        kept.extend(self._core.abort_front_end(front_end))

    def _forget(self, front_end: bytes, why: str) -> None:
        self._front_ends.discard(front_end)
        self._undelivered.pop(front_end, None)
        self._no_longer_lags(front_end)
        self._listener.drop(front_end)
        aborted = self._core.live_requests(front_end)
        self._core.abort_front_end(front_end)
        log.info("front end %s %s; %d of its requests are aborted", front_end.hex()[:8], why, aborted)

    def _beat(self) -> None:
        """Once a second tell every front end that we live, which also finds those that do not."""
        now_s = self._clock.now()
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + HEARTBEAT_S
        for front_end in tuple(self._front_ends):
            kept = self._undelivered.get(front_end, [])
            if self._send(front_end, Outputs(tuple(kept))):
                self._undelivered.pop(front_end, None)
