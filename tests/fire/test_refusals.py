"""What the protocol refuses while something is still being sent: one answer that arrives, and an end on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import firing
import pytest
import uvicorn
import uvloop
from firing import Answer, Bystander, Connection, read_answer
from starlette.types import Receive, Scope, Send

from hexad.application.api import protocol
from hexad.application.api.protocol import MAX_HEADERS, MAX_PIPELINED, MAX_SMALL_PIECES_PER_S, guarded

HEAD = b"POST /%s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
TINY = b"1\r\n \r\n" * (2 * MAX_SMALL_PIECES_PER_S)  # refused, wherever it is read


@pytest.fixture(scope="module")
def event_loop_policy() -> uvloop.EventLoopPolicy:
    return uvloop.EventLoopPolicy()  # the server's


class Application:
    """Each path answers in its own way; `ended` has those whose caller is gone, or that are through."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"][1:]
        if path == "whole":  # reads it all, then answers
            while (message := await receive())["type"] == "http.request" and message["more_body"]:
                pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-path", path.encode())]})
        if path == "stream":  # answers a part, then waits
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            gone = asyncio.ensure_future(self._gone(receive))
            await asyncio.wait({gone, asyncio.ensure_future(self.go_on.wait())}, return_when=asyncio.FIRST_COMPLETED)
        await send({"type": "http.response.body", "body": path.encode()})
        self.ended.append(path)

    @staticmethod
    async def _gone(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


@contextlib.asynccontextmanager
async def serving(**flags: Any) -> AsyncIterator[tuple[Application, str]]:
    application = Application()
    config = uvicorn.Config(
        application, port=0, http=guarded(30, 30), ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1, **flags
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield application, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        async with asyncio.timeout(20):
            while server.server_state.connections:
                await asyncio.sleep(0.02)
    finally:
        await server.shutdown()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server ends its side."""
    async with asyncio.timeout(20):
        return await reader.read()


async def send_until_reset(writer: asyncio.StreamWriter) -> None:
    """Raises TimeoutError: somebody takes it all."""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(TINY)
                await writer.drain()


async def test_a_caller_that_still_sends_gets_the_answer() -> None:
    """All of the body can be sent, without a reset, and the answer is there, once."""
    async with serving() as (application, url):
        connection = Connection(url)
        reader, writer = await connection.open()
        writer.write(HEAD % b"whole" + TINY)
        for _ in range(20):
            writer.write(TINY)
            await writer.drain()
            await asyncio.sleep(0.01)
        answer = await read_answer(reader)
        assert (answer.status, answer.error()["code"]) == (400, "chunks_too_small")
        assert answer.closes
        assert await rest(reader) == b""
        await connection.close()
    assert application.ended == ["whole"]  # it was told that the caller is gone


async def test_a_refused_caller_that_never_stops_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_LINGER_BYTES", 2**22)
    monkeypatch.setattr(protocol, "LINGER_S", 600.0)  # so that the bytes end it
    async with serving() as (_, url):
        _, writer = await Connection(url).open()
        writer.write(HEAD % b"whole" + TINY)
        await send_until_reset(writer)


async def test_a_refused_caller_that_stays_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.1)
    async with serving() as (_, url):  # which waits for the connections to end
        reader, writer = await Connection(url).open()
        writer.write(HEAD % b"whole" + TINY)
        assert (await read_answer(reader)).status == 400
        assert await rest(reader) == b""
        await send_until_reset(writer)


async def test_nothing_is_put_into_an_answer_that_has_begun() -> None:
    """Also where other requests wait between the one that is answered and the one that is refused."""
    for between in (b"", HEAD % b"whole" + b"0\r\n\r\n"):
        async with serving() as (application, url):
            connection = Connection(url)
            reader, writer = await connection.open()
            writer.write(HEAD % b"stream" + b"0\r\n\r\n")
            seen = await reader.readuntil(b"begun")
            writer.write(between + HEAD % b"whole" + TINY)
            with contextlib.suppress(ConnectionError):
                seen += await rest(reader)
            assert seen.count(b"HTTP/1.1") == 1
            assert seen.endswith((b"begun", b"begun\r\n"))
            connection.abort()
            async with asyncio.timeout(20):
                while application.ended != ["stream"]:  # it was told that the caller is gone
                    await asyncio.sleep(0.01)


async def test_the_rest_of_an_answered_body_is_not_answered_again() -> None:
    async with serving() as (_, url):
        connection = Connection(url)
        reader, writer = await connection.open()
        writer.write(HEAD % b"early")
        assert (await read_answer(reader)).status == 200
        writer.write(TINY)
        assert await rest(reader) == b""
        await connection.close()


async def test_a_body_that_ends_after_its_answer_leaves_a_connection_that_can_be_used_and_ends() -> None:
    async with serving(timeout_keep_alive=1) as (_, url):  # which waits for the connections to end
        connection = Connection(url)
        reader, writer = await connection.open()
        for _ in range(2):
            writer.write(HEAD % b"early")
            assert (await read_answer(reader)).status == 200
            writer.write(b"1\r\n \r\n0\r\n\r\n")
        assert await rest(reader) == b""


async def test_a_body_behind_another_request_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the one before it has its answer is no answer to it."""
    monkeypatch.setattr(protocol, "LINGER_S", 0.1)
    async with serving() as (application, url):
        connection = Connection(url)
        reader, writer = await connection.open()
        writer.write(HEAD % b"stream" + b"0\r\n\r\n")
        await reader.readuntil(b"begun")
        writer.write(HEAD % b"whole" + b"1\r\n \r\n")
        await asyncio.sleep(0.1)
        application.go_on.set()
        await reader.readuntil(b"0\r\n\r\n")
        await asyncio.sleep(0.5)
        writer.write(b"1\r\n \r\n0\r\n\r\n")
        assert (await read_answer(reader)).headers["x-path"] == "whole"
        await connection.close()


async def test_a_refused_request_does_not_continue() -> None:
    """No `100 Continue` behind the answer."""
    async with serving() as (_, url):
        connection = Connection(url)
        reader, writer = await connection.open()
        writer.write(b"POST /whole HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n" + TINY)
        assert (await read_answer(reader)).status == 400
        assert await rest(reader) == b""
        await connection.close()


MALFORMED: dict[str, Callable[[], bytes]] = {
    "malformed_request": lambda: b"nonsense\r\n\r\n",
    "headers_too_large": lambda: b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
    "too_many_pipelined": lambda: (HEAD % b"whole" + b"0\r\n\r\n") * (MAX_PIPELINED + 2),
}


@pytest.mark.parametrize("code", MALFORMED)
async def test_refused_heads(code: str) -> None:
    """The same ends for what is refused before a body: as the first of a connection, and after another one."""
    for first in (False, True):
        async with serving() as (_, url):
            connection = Connection(url)
            reader, writer = await connection.open()
            if first:
                writer.write(HEAD % b"early" + b"0\r\n\r\n")
                assert (await read_answer(reader)).status == 200
            writer.write(MALFORMED[code]())
            await asyncio.sleep(0.1)
            writer.write(TINY)
            answer = await read_answer(reader)
            assert answer.error()["code"] == code
            assert await rest(reader) == b""
            await connection.close()


async def test_a_bystander_can_leave_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its answer comes at the same moment: a cancellation that is lost there would be waited for without end."""
    for num_steps in range(8):
        arrived = asyncio.Event()

        async def send(self: Connection, pieces: Any, arrived: asyncio.Event = arrived) -> Answer:
            await arrived.wait()
            return Answer(200, body=json.dumps({"choices": [{"text": "x"}]}).encode())

        monkeypatch.setattr(firing.Connection, "send", send)
        bystander = await Bystander("http://127.0.0.1:1").__aenter__()
        for _ in range(3):
            await asyncio.sleep(0)
        arrived.set()
        for _ in range(num_steps):
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await bystander.__aexit__()
        assert bystander.complaints == []
