"""What the attack scripts and tests/fire share: a raw HTTP client that can misbehave, and a look at the server from outside.

No HTTP library: it would refuse to send most of what is sent here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil

READ_LIMIT = 2**24
NO_BODY = (204, 304)
CLOSE_TIMEOUT_S = 30.0  # what is still to be sent must be read, or refused


@dataclass(frozen=True)
class Answer:
    """What came back for one shot. Status 0: the connection was closed without an answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def closes(self) -> bool:
        return self.status == 0 or self.headers.get("connection", "").lower() == "close"

    def error(self) -> dict[str, Any]:
        """The `error` object of the body, or {}."""
        with contextlib.suppress(ValueError, AttributeError):
            found = json.loads(self.body).get("error")
            return found if isinstance(found, dict) else {}
        return {}


NOTHING = Answer(0)


class Connection:
    """One TCP connection that can be used for several shots."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection(*self._address, limit=READ_LIMIT)
        return self._reader, self._writer

    async def send(self, pieces: Sequence[bytes], *, pause_s: float = 0.0, half_close: bool = False, head: bool = False) -> Answer:
        """Send `pieces`, `pause_s` apart, and read one answer (`head`: one without a body). `half_close` ends our side first."""
        reader, writer = await self.open()
        try:
            for number, piece in enumerate(pieces):
                if number and pause_s:
                    await asyncio.sleep(pause_s)
                writer.write(piece)
                await writer.drain()
            if half_close:
                writer.write_eof()
        except (ConnectionError, OSError):
            pass  # the server may have answered and closed before it read all
        answer = NOTHING
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, OSError):
            answer = await read_answer(reader, head)
        if answer.closes or half_close:
            await self.close()
        return answer

    async def close(self) -> None:
        """End both sides.

        Raises:
            TimeoutError: the server neither takes the rest of what was sent nor ends the connection.
        """
        if self._writer is not None:
            self._writer.close()
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                with contextlib.suppress(OSError):
                    await self._writer.wait_closed()
        self._reader = self._writer = None

    def abort(self) -> None:
        """Leave with a reset, without a word."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                sock = self._writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            self._writer.transport.abort()
        self._reader = self._writer = None


async def read_answer(reader: asyncio.StreamReader, head: bool = False) -> Answer:
    """One response; a body without a length is read to the end of the connection."""
    status, headers = await read_head(reader)
    while status == 100:
        status, headers = await read_head(reader)
    if status == 0 or head or status in NO_BODY:
        return Answer(status, headers)
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = b"".join([chunk async for chunk in chunks(reader)])
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = await reader.read()
    return Answer(status, headers, body)


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """(status, headers by lower-case name); status 0 when the connection ended."""
    try:
        data = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return 0, {}
    first, *lines = data.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return int(first.split(" ")[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def chunks(reader: asyncio.StreamReader) -> Any:
    """The chunks of a chunked body."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A well-formed POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def get(path: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: x", *headers]).encode("latin-1") + b"\r\n\r\n"


def generate(path: str = "/v1/completions", **fields: Any) -> bytes:
    """A POST of a small valid completion request, with `fields`."""
    return post(path, json.dumps({"prompt": "hello", "max_tokens": 4, "temperature": 0, **fields}).encode())


class Watched:
    """A server process from outside: its engine, its memory, its descriptors."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.process = psutil.Process(pid)

    def engine_pid(self) -> int | None:
        """The engine process, None while there is none."""
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "hexad.compose" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    return child.pid
        return None

    def rss_mib(self) -> dict[str, float]:
        """Resident memory of the server ("api") and the engine."""
        sizes = {"api": self.process.memory_info().rss / 2**20}
        if (pid := self.engine_pid()) is not None:
            sizes["engine"] = psutil.Process(pid).memory_info().rss / 2**20
        return sizes

    def descriptors(self) -> int:
        return self.process.num_fds()

    async def ask(self, data: bytes) -> Answer:
        """One exchange on a connection of its own."""
        connection = Connection(self.url)
        try:
            return await connection.send([data])
        except (ConnectionError, OSError):
            return NOTHING
        finally:
            await connection.close()

    async def load(self) -> dict[str, Any]:
        return dict(json.loads((await self.ask(get("/load"))).body))

    async def status(self, path: str) -> int:
        return (await self.ask(get(path))).status

    async def wait_status(self, path: str, wanted: int, timeout_s: float) -> float:
        """Seconds until `path` answers `wanted`."""
        start_s = time.monotonic()
        while await self.status(path) != wanted:
            assert time.monotonic() - start_s < timeout_s, f"{path} did not become {wanted} within {timeout_s} s"
            await asyncio.sleep(0.02)
        return time.monotonic() - start_s

    async def settle(self, timeout_s: float = 15.0) -> dict[str, Any]:
        """Wait until nothing runs or waits; what /load then says.

        Raises:
            AssertionError: something still does, or holds blocks.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            load = await self.load()
            left = {name: load.get(name) for name in ("server_load", "num_running", "num_waiting", "kv_usage")}
            if not any(left.values()) and None not in left.values():
                return load
            assert time.monotonic() < end_s, f"left behind: {left}"
            await asyncio.sleep(0.05)


class Bystander:
    """A well-behaved caller that asks all the while; `worst_s` is its longest wait."""

    def __init__(self, url: str, *, every_s: float = 0.05, timeout_s: float = 30.0, may_be_refused: bool = False) -> None:
        self.waits_s: list[float] = []
        self.complaints: list[str] = []
        self._url = url
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._may_be_refused = may_be_refused
        self._expected: str | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def worst_s(self) -> float:
        return max(self.waits_s, default=0.0)

    def quantile_s(self, share: float) -> float:
        return sorted(self.waits_s)[int(share * (len(self.waits_s) - 1))] if self.waits_s else 0.0

    async def __aenter__(self) -> Bystander:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        connection = Connection(self._url)
        while True:
            start_s = time.monotonic()
            try:
                async with asyncio.timeout(self._timeout_s):  # `wait_for` of Python 3.11 loses a cancellation that comes with the answer
                    answer = await connection.send([generate(prompt="I stand by", max_tokens=3)])
            except (TimeoutError, OSError) as error:
                self.complaints.append(f"a normal request: {error!r}")
                await connection.close()
                continue
            self.waits_s.append(time.monotonic() - start_s)
            self._check(answer)
            await asyncio.sleep(self._every_s)

    def _check(self, answer: Answer) -> None:
        if answer.status == 503 and self._may_be_refused and "retry-after" in answer.headers:
            return
        if answer.status != 200:
            self.complaints.append(f"a normal request was answered {answer.status}: {answer.body[:200]!r}")
            return
        text = json.loads(answer.body)["choices"][0]["text"]
        self._expected = self._expected if self._expected is not None else text
        if text != self._expected:
            self.complaints.append(f"a normal request got {text!r} in place of {self._expected!r}")
