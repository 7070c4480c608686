"""WebSockets and connections in bad hands: readers that stop, pings without end, messages that pile up, bodies that pile up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import uvloop
from firing import Bystander, Connection, Watched, generate, get, post, read_answer
from tiny_model import served

from hexad.application.api.patience import WriteWatch
from hexad.application.api.protocol import MAX_PIPELINED

HANDSHAKE = (
    b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
TEXT, PING, PONG = 1, 9, 10


def frame(opcode: int, data: bytes, *, fin: bool = True) -> bytes:
    """A client's frame, with a mask of zeros."""
    head = bytes([(0x80 if fin else 0) | opcode])
    if len(data) < 126:
        head += bytes([0x80 | len(data)])
    elif len(data) < 2**16:
        head += bytes([0x80 | 126]) + struct.pack("!H", len(data))
    else:
        head += bytes([0x80 | 127]) + struct.pack("!Q", len(data))
    return head + bytes(4) + data


def ask(**fields: Any) -> bytes:
    return frame(TEXT, json.dumps({"prompt": "x", "ignore_eos": True, **fields}).encode())


async def upgraded(url: str) -> tuple[Connection, asyncio.StreamReader, asyncio.StreamWriter]:
    connection = Connection(url)
    reader, writer = await connection.open()
    writer.write(HANDSHAKE)
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    return connection, reader, writer


async def pour(writer: asyncio.StreamWriter, data: bytes, most: int) -> int:
    """Send `data` again and again, until the other side stops taking it; bytes sent, `most` at most."""
    sent = 0
    while sent < most:
        try:
            writer.write(data)
            await asyncio.wait_for(writer.drain(), 3)
        except (TimeoutError, OSError):
            break
        sent += len(data)
    return sent


async def test_b36_a_socket_that_does_not_read_loses_its_place(tiny: Path) -> None:
    with served(tiny, "--write-timeout", "1", "--log-level", "error") as process:
        watched = Watched(process.url, process.process.pid)
        before = watched.descriptors()
        stuck, reader, writer = await upgraded(process.url)
        reader._transport.pause_reading()
        writer.write(ask(max_tokens=1_000, n=16, logprobs=20) * 3)  # several megabytes of answers
        await asyncio.sleep(0.5)
        assert (await watched.load())["server_load"] == 1
        await watched.settle(20)
        assert watched.descriptors() <= before + 2
        stuck.abort()


async def test_pings_without_end_cost_no_memory(tiny: Path) -> None:
    with served(tiny, "--write-timeout", "2", "--log-level", "error") as process:
        watched = Watched(process.url, process.process.pid)
        before = watched.rss_mib()["api"]
        connection, reader, writer = await upgraded(process.url)
        reader._transport.pause_reading()
        async with Bystander(process.url) as bystander:
            sent = await pour(writer, frame(PING, b"x" * 125) * 1_000, 128 * 2**20)
        assert sent < 64 * 2**20, "nobody stopped the pings"
        assert watched.rss_mib()["api"] < before + 40
        assert bystander.complaints == []
        connection.abort()
        await watched.settle()


@pytest.mark.parametrize("opcode", [TEXT, PING, PONG])
async def test_empty_frames_by_the_ten_thousand_end_the_connection(server: Watched, opcode: int) -> None:
    before = server.rss_mib()["api"]
    async with Bystander(server.url) as bystander:
        for _ in range(5):
            connection, reader, writer = await upgraded(server.url)
            await pour(writer, frame(opcode, b"") * 10_000, 2**20)
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 20)
            assert writer.is_closing() or reader.at_eof()
            connection.abort()
    assert bystander.complaints == []
    assert server.rss_mib()["api"] < before + 40
    await server.settle()


async def test_a_large_message_in_fragments_is_served(server: Watched) -> None:
    """Many frames, but large ones."""
    body = json.dumps({"prompt": "x", "max_tokens": 2, "metadata": {"filler": "y" * 4_000_000}}).encode()
    pieces = [body[i : i + 1_500] for i in range(0, len(body), 1_500)]
    connection, reader, writer = await upgraded(server.url)
    writer.write(frame(TEXT, pieces[0], fin=False))
    writer.write(b"".join(frame(0, piece, fin=False) for piece in pieces[1:-1]) + frame(0, pieces[-1]))
    assert b'"choices"' in await asyncio.wait_for(reader.readuntil(b"[DONE]"), 20)
    connection.abort()


async def test_messages_that_wait_are_bounded_in_bytes(tiny: Path) -> None:
    with served(tiny, "--device", "fake:0.02", "--max-body-bytes", "4MiB", "--log-level", "error") as process:
        watched = Watched(process.url, process.process.pid)
        connection, _, writer = await upgraded(process.url)
        writer.write(ask(max_tokens=900))
        before = watched.rss_mib()["api"]
        await pour(writer, frame(TEXT, b'"' + b"x" * (4 * 2**20 - 8) + b'"'), 15 * 4 * 2**20)
        await watched.settle(10)  # the connection is ended, and its request with it
        assert watched.rss_mib()["api"] < before + 40
        connection.abort()


async def test_a_message_in_many_fragments_is_bounded(tiny: Path) -> None:
    with served(tiny, "--max-body-bytes", "1MiB", "--log-level", "error") as process:
        watched = Watched(process.url, process.process.pid)
        connection, reader, writer = await upgraded(process.url)
        writer.write(frame(TEXT, b"{", fin=False))
        sent = await pour(writer, frame(0, b" " * 1_000, fin=False) * 100, 64 * 2**20)
        assert sent < 16 * 2**20
        connection.abort()
        async with asyncio.timeout(10):
            other, reader, writer = await upgraded(process.url)
            writer.write(frame(TEXT, b"{}"))
            assert b"error" in await reader.readuntil(b"}}")
            other.abort()
        await watched.settle()


async def test_pipelined_requests_are_answered_in_order_and_bounded(tiny: Path) -> None:
    with served(tiny, "--log-level", "error") as process:
        watched = Watched(process.url, process.process.pid)
        before = watched.rss_mib()["api"]
        connection = Connection(process.url)
        reader, writer = await connection.open()
        prompts = [f"number {i} " for i in range(MAX_PIPELINED)]
        writer.write(b"".join(generate(prompt=prompt, echo=True, max_tokens=1) for prompt in prompts))
        for prompt in prompts:
            answer = await asyncio.wait_for(read_answer(reader), 20)
            assert json.loads(answer.body)["choices"][0]["text"].startswith(prompt)
        async with Bystander(process.url) as bystander:
            floods = [Connection(process.url) for _ in range(10)]
            for flood in floods:
                reader, writer = await flood.open()
                writer.write(get("/v1/models") * 20_000)
                seen = b""
                with contextlib.suppress(ConnectionError):
                    while piece := await asyncio.wait_for(reader.read(2**16), 20):
                        seen = (seen + piece)[-1_000:]
                assert not seen or b"too_many_pipelined" in seen
        assert watched.rss_mib()["api"] < before + 40
        assert bystander.complaints == []
        await watched.settle()
        await connection.close()


async def test_a_body_in_chunks_of_one_byte(server: Watched) -> None:
    """A few are served, an endless stream of them is cut off: each costs the event loop as much as a large one."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    answer = await server.ask(head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
    assert answer.status == 200
    async with Bystander(server.url) as bystander:
        for _ in range(5):
            connection = Connection(server.url)
            async with asyncio.timeout(20):
                answer = await connection.send([head, b"1\r\n \r\n" * 40_000 + b"0\r\n\r\n"])
            assert answer.status == 400
            if answer.error()["code"] != "chunks_too_small":  # a slow server is not hurried: it reads all of it
                assert "JSON" in answer.error()["message"]
            await connection.close()
    assert bystander.complaints == []
    await server.settle()


class Lost(asyncio.Protocol):
    """A connection of ours with a watch, and whether it has ended."""

    def __init__(self, patience_s: float) -> None:
        self.ended = asyncio.Event()
        self.patience_s = patience_s

    def connection_made(self, transport: Any) -> None:
        transport.set_write_buffer_limits(high=2**30)  # never full: `pause_writing` will not tell
        self.transport = transport
        self.watch = WriteWatch(asyncio.get_running_loop(), transport, self.patience_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.watch.stop()
        self.ended.set()


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_b36_a_closed_connection_that_nobody_reads_ends(runner: Any) -> None:
    """Also when less than a full buffer is left: closing alone would wait for ever for somebody to read it."""

    async def leave_it(patience_s: float) -> bool:
        ours, theirs = socket.socketpair()
        with theirs:
            _, lost = await asyncio.get_running_loop().create_connection(lambda: Lost(patience_s), sock=ours)
            lost.transport.write(bytes(2**24))
            lost.transport.close()
            try:
                await asyncio.wait_for(lost.ended.wait(), 3)
            except TimeoutError:
                lost.transport.abort()
                return False
            return True

    assert runner(leave_it(0.1))
    assert not runner(leave_it(60)), "it ends by itself: this test shows nothing"


async def test_bodies_that_arrive_together_are_bounded(tiny: Path) -> None:
    """Twelve callers send almost all of a large body and stop: some are refused, the memory is bounded, small ones are served."""
    size = 4 * 2**20
    with served(tiny, "--max-body-bytes", "4MiB", "--read-timeout", "3", "--log-level", "error") as process:
        watched = Watched(process.url, process.process.pid)
        before = watched.rss_mib()["api"]
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
        connections = [Connection(process.url) for _ in range(12)]
        answers = asyncio.gather(*(c.send([head + b" " * (size - 10)]) for c in connections))
        await asyncio.sleep(1.5)
        assert watched.rss_mib()["api"] < before + 80
        statuses = [answer.status for answer in await answers]
        assert statuses.count(503) >= 3, statuses
        assert set(statuses) <= {503, 408}, statuses
        assert (await watched.ask(generate())).status == 200
        for connection in connections:
            await connection.close()


async def test_a_renderer_that_starts_among_many_connections(server: Watched) -> None:
    """Its pipes get numbers beyond what `select` can watch."""
    chat = post("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}')
    assert (await server.ask(chat)).status == 200
    connections = [Connection(server.url) for _ in range(1_200)]
    try:
        for start in range(0, len(connections), 100):
            await asyncio.gather(*(connection.open() for connection in connections[start : start + 100]))
        async with asyncio.timeout(60):
            while server.descriptors() <= 1_200:  # it accepts them when it gets to it
                await asyncio.sleep(0.1)
        renderers = [child for child in server.process.children() if "templating" in " ".join(child.cmdline())]
        assert renderers
        for renderer in renderers:
            renderer.kill()
        assert [answer.status for answer in await asyncio.gather(*(server.ask(chat) for _ in range(4)))] == [200] * 4
    finally:
        for connection in connections:
            connection.abort()


async def test_the_limit_on_descriptors_is_raised(tiny: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with served(tiny, "--log-level", "error") as process:
            got = resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert got[0] == min(hard, 2**20)
