"""The line for news: messages arrive whole and in order however the socket cuts them, and a front end that does not read is given up."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from pathlib import Path

import msgspec
import pytest
import zmq
from core_here import CONFIG, impatient_core, request, until

from hexad.orchestration.client import EngineClient
from hexad.orchestration.messages import PROTOCOL_VERSION, Hello, Output, Outputs, ToClient
from hexad.orchestration.news_line import Line, LineListener, LineReader, connect_line, line_path


def pair() -> tuple[Line, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_608)
    ours.setblocking(False)
    theirs.setblocking(False)
    return Line(ours), theirs


async def test_messages_arrive_whole_and_in_order() -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    messages = [rng.randbytes(rng.choice((0, 1, 3, 50, 700, 70_000, 300_000))) for _ in range(120)]
    line, theirs = pair()
    heard: list[bytes] = []
    reader = LineReader(theirs, lambda message: heard.append(bytes(message)))
    for message in messages:
        assert line.send(message, 1_000)
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    while line.lags:
        line.flush()
        await asyncio.sleep(0)
    for _ in range(1_000):
        if len(heard) == len(messages):
            break
        await asyncio.sleep(0.01)
    assert heard == messages
    line.close()
    await asyncio.sleep(0.05)
    assert theirs.fileno() < 0, "the reader has seen the end"
    reader.close()


async def test_more_than_the_limit_is_refused_and_not_kept() -> None:
    line, theirs = pair()
    sent = 0
    while line.send(bytes(1_000), 5):
        sent += 1
    assert line.lags == 5 and not line.send(b"x", 5)
    heard: list[int] = []
    LineReader(theirs, lambda message: heard.append(len(message)))
    while line.lags:
        line.flush()
        await asyncio.sleep(0)
    line.close()
    for _ in range(500):
        if theirs.fileno() < 0:
            break
        await asyncio.sleep(0.01)
    assert heard == [1_000] * sent


def test_who_leaves_is_noticed() -> None:
    line, theirs = pair()
    theirs.close()
    with pytest.raises(OSError):
        line.send(b"anybody?", 5)


def test_what_connects_and_says_nonsense_is_shut_out(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core"
    listener = LineListener(address)
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for stranger, said in zip(strangers, (b"", b"\x05abc", b"\x02abc"), strict=True):
        stranger.connect(line_path(address) or "")
        stranger.send(said)
    good = connect_line(address, b"one")
    twice = connect_line(address, b"one")
    listener.accept()
    assert list(listener.lines) == [b"one"]
    for stranger in (*strangers, twice):
        assert stranger is not None
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
    listener.close()
    assert good is not None and good.recv(1) == b""


def test_who_left_before_its_hello_is_let_go(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core"
    listener = LineListener(address)
    ends = [connect_line(address, bytes([65 + i])) for i in range(3)]
    listener.accept()
    for end in ends[:2]:
        assert end is not None
        end.close()
    listener.accept({b"A"})  # that one is the server's to forget
    assert list(listener.lines) == [b"A", b"C"]
    listener.close()


def test_dropping_one_that_does_not_read_takes_no_time() -> None:
    """The core loop does it between two steps."""
    line, theirs = pair()
    while line.send(bytes(10_000), 400):
        pass
    begin = time.monotonic()
    line.close()
    assert time.monotonic() - begin < 5 and line.sock.fileno() < 0
    theirs.close()


def test_a_path_that_is_taken_leaves_zeromq(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = f"ipc://{tmp_path}/core"
    Path(line_path(address) or "").mkdir()
    LineListener(address).close()
    assert "no line" in caplog.text


def test_where_there_is_no_line_zeromq_carries_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert line_path("tcp://127.0.0.1:1") is None and connect_line("tcp://127.0.0.1:1", b"x") is None
    assert connect_line(f"ipc://{tmp_path}/core", b"x") is None
    LineListener(f"ipc://{tmp_path}/{'long' * 30}").close()
    assert "no line" in caplog.text


async def test_a_client_without_a_line_gets_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    client = await EngineClient.start(CONFIG)
    monkeypatch.setattr("hexad.orchestration.client.connect_line", lambda *_: None)
    other = await EngineClient.connect(client.address)
    assert client._line is not None and other._line is None

    async def ids(via: EngineClient, name: str) -> list[int]:
        return [token async for output in via.submit(request(name, 50)) for token in output.token_ids]

    assert await ids(client, "a") == await ids(other, "a")
    await other.close()
    assert await client.close() == 0


def test_a_front_end_that_does_not_read_its_line_loses_its_requests_but_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with impatient_core(tmp_path, monkeypatch) as (core, address):
        context, identity = zmq.Context(), os.urandom(16)
        control = context.socket(zmq.DEALER)
        control.setsockopt(zmq.IDENTITY, identity)
        control.setsockopt(zmq.LINGER, 0)
        control.connect(address)
        line = connect_line(address, identity)
        assert line is not None
        for message in (Hello(protocol=PROTOCOL_VERSION), request("a", 30_000), request("b", 30_000)):
            control.send(msgspec.msgpack.encode(message))
        until(lambda: core.stats()["generation_tokens_total"] > 0)
        until(lambda: core.live_requests() == 0, 30.0)  # nobody reads
        tokens = core.stats()["generation_tokens_total"]
        assert tokens < 60_000, "it was given up long before the end"

        line.settimeout(10)
        decoder, stream, items = msgspec.msgpack.Decoder(ToClient), line.makefile("rb"), list[Output]()

        def read(ends: int) -> None:
            while sum(item.finish_reason is not None for item in items) < ends:
                message = decoder.decode(stream.read(int.from_bytes(stream.read(4), "little")))
                assert isinstance(message, Outputs)
                items.extend(message.items)

        read(2)
        for name in ("a", "b"):
            assert [item.finish_reason for item in items if item.request_id == name and item.finish_reason is not None] == ["abort"]
        assert sum(len(item.token_ids) for item in items) == tokens, "no token was lost on the way"
        control.send(msgspec.msgpack.encode(request("again", 5)))  # it may go on
        read(3)
        assert items[-1].finish_reason == "length"
        control.send(msgspec.msgpack.encode(request("more", 30_000)))
        line.shutdown(socket.SHUT_RDWR)  # and is gone
        until(lambda: core.live_requests() == 0)
    context.destroy(linger=0)
