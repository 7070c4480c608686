"""Thousands of hostile requests at a real server process on the fake device: `scripts/hostile.py`, as much as a test run can bear."""

from __future__ import annotations

import asyncio
import json
import random
import time
from itertools import islice
from pathlib import Path

import pytest
from api_stub import fresh_seed
from firing import NOTHING, Bystander, Connection, Watched, generate, get, post
from hostile import attack, endless, volley
from hostile_corpus import Shot, bombs, corpus, every_field, judge, shot
from tiny_model import served

BOUND_S = 5.0  # of a normal request, on a machine that does other things at the same time


async def test_thousands_of_hostile_requests(server: Watched) -> None:
    seed = fresh_seed()
    figures = await attack(server, 6_000, seed, BOUND_S, may_be_refused=False)
    assert figures["complaints"] == [], json.dumps(figures, indent=1)
    assert figures["requests"] == 6_000
    rss = figures["rss_mib"]
    assert rss["after"]["api"] < rss["before"]["api"] + 150
    assert rss["after"]["engine"] < rss["before"]["engine"] + 50
    assert figures["descriptors"]["after"] < figures["descriptors"]["before"] + 30


async def test_no_single_bomb_holds_up_the_event_loop(server: Watched) -> None:
    """One bomb at a time, a probe beside it: the worst wait of the probe is the bomb's own doing."""
    waits_s: list[float] = []

    async def probe() -> None:
        connection = Connection(server.url)
        while True:
            start_s = time.monotonic()
            await connection.send([get("/health/live")])
            waits_s.append(time.monotonic() - start_s)
            await asyncio.sleep(0.003)

    probing, connection, blocked = asyncio.create_task(probe()), Connection(server.url), []
    for name, path, body in bombs():
        waits_s.clear()
        await connection.send([post(path, body)])
        await asyncio.sleep(0.005)
        if max(waits_s, default=0) > 1.0:
            waits_s.clear()  # a busy machine may be the reason: once more
            await connection.send([post(path, body)])
            await asyncio.sleep(0.005)
            if max(waits_s, default=0) > 1.0:
                blocked.append((name, round(max(waits_s), 2)))
    probing.cancel()
    await connection.close()
    assert blocked == []


def test_the_judge_can_object() -> None:
    """What the attack tests rely on."""
    from firing import Answer

    plain = shot("x", b"")
    error = json.dumps({"error": {"message": "no", "type": "t", "param": None, "code": "c"}}).encode()
    assert judge(plain, Answer(400, {}, error)) is None
    assert judge(plain, Answer(503, {"retry-after": "1"}, error)) is None
    stream = {"content-type": "text/event-stream"}
    assert judge(plain, Answer(200, stream, b'data: {"choices":[]}\n\ndata: [DONE]\n\n')) is None
    for bad in (
        NOTHING,
        Answer(500, {}, error),
        Answer(504, {}, error),
        Answer(503, {}, error),
        Answer(400, {}, b"Bad Request"),
        Answer(431, {}, error),
        Answer(302, {}, error),
        Answer(400, {}, error.replace(b"no", b"Traceback")),
        Answer(400, {}, error.replace(b"no", b"n" * 3_000)),
        Answer(200, stream, b"data: {}\n\n"),
        Answer(200, stream, b'data: {"error":{"code":"internal_error"}}\n\ndata: [DONE]\n\n'),
    ):
        assert judge(plain, bad), bad
    quoting = Answer(400, {}, error.replace(b"no", b"unknown value {% x"))
    assert judge(plain, quoting) and judge(shot("x", b"POST / {% x"), quoting) is None, "what was sent may be quoted"
    names = {attack.name for attack in (*corpus(), *every_field())}
    assert len(names) > 15_000
    assert len({attack.pieces for attack in islice(endless(random.Random(1)), 500)}) > 450


async def test_slow_and_silent_callers_are_sent_away(tiny: Path) -> None:
    """Half a head, half a body, a drip: 408 in time; a slow one that keeps up is served; nobody else notices."""
    with served(tiny, "--read-timeout", "1", "--log-level", "error") as process:
        watched = Watched(process.url, process.process.pid)
        request = generate(prompt="slow")
        head, _, body = request.partition(b"\r\n\r\n")
        attacks = {
            "half a head": ([head[:30]], 0.0, 408),
            "head, no body": ([head + b"\r\n\r\n"], 0.0, 408),
            "half a body": ([head + b"\r\n\r\n" + body[:5]], 0.0, 408),
            "nothing": ([], 0.0, 0),
            "a drip": ([request[i : i + 1] for i in range(len(request))], 0.1, 408),
            "slow but steady": ([request[i : i + 60] for i in range(0, len(request), 60)], 0.2, 200),
        }
        before = watched.descriptors()

        async def fire(pieces: list[bytes], pause_s: float) -> tuple[int, float]:
            connection, start_s = Connection(process.url), time.monotonic()
            answer = await connection.send(pieces, pause_s=pause_s)
            await connection.close()
            return answer.status, time.monotonic() - start_s

        async with Bystander(process.url) as bystander:
            results = await asyncio.gather(*(fire(pieces, pause_s) for pieces, pause_s, _ in attacks.values()))
        for (name, (_, pause_s, status)), (got, took_s) in zip(attacks.items(), results, strict=True):
            assert got in (status, 0 if name == "a drip" else status), name  # who still sends when it is closed may miss the answer
            assert took_s < 8 or pause_s, name
        assert bystander.complaints == []
        assert bystander.worst_s < BOUND_S
        await watched.settle()
        assert watched.descriptors() <= before + 2


async def test_a_caller_that_does_not_read_is_disconnected(tiny: Path) -> None:
    """Its buffers fill, its request is aborted, its place is free again."""
    with served(tiny, "--write-timeout", "1", "--log-level", "error") as process:
        watched = Watched(process.url, process.process.pid)
        stuck = Connection(process.url)
        reader, writer = await stuck.open()
        reader._transport.pause_reading()
        many = generate(stream=True, max_tokens=1_000, n=16, ignore_eos=True, logprobs=20)  # several megabytes
        writer.write(many * 3)
        await watched.settle(20)
        stuck.abort()


async def test_a_thousand_connections_that_say_nothing(server: Watched) -> None:
    connections = [Connection(server.url) for _ in range(1_000)]
    await asyncio.gather(*(connection.open() for connection in connections))
    start_s = time.monotonic()
    assert (await server.ask(generate())).status == 200
    assert time.monotonic() - start_s < BOUND_S
    for connection in connections:
        connection.abort()


@pytest.mark.parametrize("kind", ["header", "body"])
async def test_floods_are_cut_off(server: Watched, kind: str) -> None:
    """An endless header or chunked body is refused after a bounded number of bytes."""
    if kind == "header":
        start, piece = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: ", b"a" * 65_536
    else:
        start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        piece = b"10000\r\n" + b"a" * 65_536 + b"\r\n"
    connection = Connection(server.url)
    _, writer = await connection.open()
    writer.write(start)
    sent, limit = 0, 2**27
    while sent < limit:
        try:
            writer.write(piece)
            await writer.drain()
        except (ConnectionError, OSError):
            break
        sent += len(piece)
    connection.abort()
    assert sent < limit, "nobody stopped the flood"
    assert (await server.ask(generate())).status == 200


async def test_shots_of_one_worker_share_a_connection(server: Watched) -> None:
    """The volley itself: keep-alive works after refusals, so that what follows a bad request is judged too."""
    good = [Shot(f"good {i}", (generate(prompt=f"p{i}"),)) for i in range(20)]
    bad = [Shot(f"bad {i}", (post("/v1/completions", b"{"),)) for i in range(20)]
    mixed = [item for pair in zip(good, bad, strict=True) for item in pair]
    report = await volley(server.url, mixed, workers=1)
    assert report.statuses == {200: 20, 400: 20}
    assert report.complaints == []
