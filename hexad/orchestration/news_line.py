"""A line of its own for what the engine says each step: a Unix socket to each front end, beside ZeroMQ.

ZeroMQ hands every message to a thread of its own on either side. Where the cores that serve are those that compute, as on a CPU, each of
these wake-ups takes a computing thread off its core; here the front end's event loop is the only one that wakes. Requests and calls stay
with ZeroMQ, and so does everything where the address is not one of this machine's files.

Wire: the front end connects and says its identity (one byte of length first), then hello over ZeroMQ. From then on it only reads: four
bytes of length, little endian, then one encoded message, again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

log = logging.getLogger("hexad.engine")

HEAD_BYTES = 4
READ_BYTES = 65_536
LINGER_S = 0.5  # how long closing may wait for a front end that reads slowly
MAX_WAITING = 64  # front ends that connect at once


def line_path(address: str) -> str | None:
    """Where the line to the engine at this ZeroMQ address begins; None: it has none."""
    return f"{address.removeprefix('ipc://')}.news" if address.startswith("ipc://") else None


class Line:
    """The engine's end to one front end. Never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._waiting: deque[memoryview] = deque()  # what the socket had no room for

    @property
    def lags(self) -> int:
        """Messages that wait here."""
        return len(self._waiting)

    def send(self, message: bytes, max_waiting: int) -> bool:
        """Send, or keep for later; False, and nothing is kept, when `max_waiting` messages wait already.

        Raises:
            OSError: the front end is gone.
        """
        if len(self._waiting) >= max_waiting:
            return False
        self._waiting.append(memoryview(len(message).to_bytes(HEAD_BYTES, "little") + message))
        self.flush()
        return True

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it.

        Raises:
            OSError: the front end is gone.
        """
        waiting = self._waiting
        while waiting:
            try:
                sent = self.sock.send(waiting[0])
            except (BlockingIOError, InterruptedError):
                return
            if sent == len(waiting[0]):
                waiting.popleft()
            else:
                waiting[0] = waiting[0][sent:]

    def close(self, linger_s: float = 0.0) -> None:
        """Close, after sending what waits for at most `linger_s`. What the socket has taken still arrives."""
        deadline = time.monotonic() + linger_s
        with contextlib.suppress(OSError):
            while self._waiting and (left_s := deadline - time.monotonic()) > 0:
                select.select((), (self.sock,), (), left_s)
                self.flush()
        self.sock.close()

    @property
    def is_dead(self) -> bool:
        """The front end's end is closed; it never says anything after its name."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True


class LineListener:
    """Where front ends connect. `lines` has those that did, by identity."""

    def __init__(self, address: str) -> None:
        self.lines: dict[bytes, Line] = {}
        path = line_path(address)
        self._listener: socket.socket | None = None
        if path is not None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                Path(path).unlink(missing_ok=True)
                listener.bind(path)
                listener.listen(MAX_WAITING)
            except OSError as error:  # a path at the limit of its length, say: ZeroMQ carries everything
                log.warning("no line for news at %s (%s)", path, error)
                listener.close()
                return
            listener.setblocking(False)
            self._listener = listener

    def accept(self, known: Collection[bytes] = ()) -> None:
        """Take in those that have connected: call it when one says hello, which it does after it has connected.

        Those that have left without ever becoming `known` are let go.
        """
        for identity in [identity for identity, line in self.lines.items() if identity not in known and line.is_dead]:
            self.drop(identity)
        while self._listener is not None:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            sock.setblocking(False)
            try:
                said = sock.recv(256)
            except OSError:
                said = b""
            if not said or len(said) != 1 + said[0] or said[1:] in self.lines:
                sock.close()
            else:
                self.lines[said[1:]] = Line(sock)

    def drop(self, identity: bytes) -> None:
        """Close a front end's line, if it has one."""
        line = self.lines.pop(identity, None)
        if line is not None:
            line.close()

    def close(self) -> None:
        """What waits has `LINGER_S` to leave, for all lines together."""
        deadline = time.monotonic() + LINGER_S
        for line in self.lines.values():
            line.close(max(0.0, deadline - time.monotonic()))
        self.lines.clear()
        if self._listener is not None:
            self._listener.close()


class LineReader:
    """A front end's end. Event-loop bound; `handle` gets each message, as a view that is valid during the call."""

    def __init__(self, sock: socket.socket, handle: Callable[[memoryview], None]) -> None:
        self._sock = sock
        self._handle = handle
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._rest = bytearray()  # the beginning of a message that is not complete
        self._wanted = 0  # bytes without which it cannot be
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._read)

    def _read(self) -> None:
        try:
            count = self._sock.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if not count:
            self.close()
            return
        data = self._buffer[:count]
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            data = memoryview(self._rest)
        self._rest = bytearray(data[self._take(data) :])
        self._wanted = HEAD_BYTES
        if len(self._rest) >= HEAD_BYTES:
            self._wanted += int.from_bytes(self._rest[:HEAD_BYTES], "little")

    def _take(self, data: memoryview) -> int:
        """Handle the whole messages in `data`; returns where they end."""
        at = 0
        while len(data) - at >= HEAD_BYTES:
            begin = at + HEAD_BYTES
            end = begin + int.from_bytes(data[at:begin], "little")
            if end > len(data):
                break
            self._handle(data[begin:end])
            at = end
        return at

    def close(self) -> None:
        """Idempotent."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()


def connect_line(address: str, identity: bytes) -> socket.socket | None:
    """A connection to the engine at `address`, which knows it by `identity`; None: there is no line, all comes over ZeroMQ."""
    path = line_path(address)
    if path is None:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(path)
        sock.send(bytes([len(identity)]) + identity)
    except OSError:
        sock.close()
        return None
    return sock
