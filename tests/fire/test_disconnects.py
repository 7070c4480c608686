"""B36 at volume, over HTTP: callers that leave in every window, and a server that is afterwards as it was before."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

from api_stub import fresh_seed
from firing import Connection, Watched, generate
from kill_engine import terminal_complaint
from tiny_model import served

NUM_REQUESTS, IN_FLIGHT = 500, 32
WINDOWS = ("before the first token", "mid-stream", "while a whole answer is made", "half-closed")


async def test_b36_a_third_of_500_requests_leave(tiny: Path) -> None:
    rng = random.Random(fresh_seed())
    with served(tiny, "--device", "fake:0.002", "--max-num-seqs", "16", "--log-level", "error") as process:
        server = Watched(process.url, process.process.pid)
        await _crowd(server, random.Random(0), 60)  # warm
        before = await server.settle()
        descriptors, memory = server.descriptors(), server.rss_mib()
        left = await _crowd(server, rng, NUM_REQUESTS)
        after = await server.settle(5)
        assert sum(left.values()) > NUM_REQUESTS / 5
        assert set(left) == set(WINDOWS)
        assert after["kv_usage"] == before["kv_usage"] == 0
        assert server.descriptors() <= descriptors + 2
        grown = {name: size - memory[name] for name, size in server.rss_mib().items()}
        assert max(grown.values()) < 40, grown
        text = (await server.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).body.decode()
        aborted = next(line for line in text.splitlines() if line.startswith("hexad:request_success_total") and '"abort"' in line)
        assert float(aborted.split()[-1]) > 0


async def _crowd(server: Watched, rng: random.Random, count: int) -> Counter[str]:
    """Run `count` requests; how many left in each window. The others must end well and equal the same request asked alone."""
    left: Counter[str] = Counter()
    expected: dict[int, str] = {}
    for i in range(4):
        expected[i] = json.loads((await server.ask(_request(i))).body)["choices"][0]["text"]
    numbers = iter(range(count))

    async def work() -> None:
        connection = Connection(server.url)
        for number in numbers:
            if number % 3 == 0:
                window = rng.choice(WINDOWS)
                left[window] += 1
                await _leave(server, window, rng)
            else:
                kind, stream = number % 4, number % 2 == 0
                answer = await connection.send([_request(kind, stream=stream)])
                assert terminal_complaint(answer, stream, 1) is None
                if not stream:
                    assert json.loads(answer.body)["choices"][0]["text"] == expected[kind]
        await connection.close()

    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    return left


def _request(kind: int, *, stream: bool = False) -> bytes:
    return generate(prompt=f"a normal question {kind} " * 5, max_tokens=12 + kind, stream=stream, ignore_eos=True)


async def _leave(server: Watched, window: str, rng: random.Random) -> None:
    connection = Connection(server.url)
    reader, writer = await connection.open()
    n = rng.choice((1, 1, 4))
    writer.write(generate(prompt="x" * rng.randrange(1, 400), max_tokens=600, n=n, stream=window in WINDOWS[:2], ignore_eos=True))
    if window == "mid-stream":
        await reader.readuntil(b"data: ")
    await asyncio.sleep(rng.uniform(0, 0.02))
    if window == "half-closed":
        writer.write_eof()
        await reader.read()
        await connection.close()
    else:
        connection.abort()
