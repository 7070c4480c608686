"""Many callers at once against a server in a process of its own; some go away at random moments."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
from tiny_model import ServerProcess

PAGE_BYTES = 4096


@dataclass
class Outcome:
    """What came of a load: complete answers by (prompt, options), and how many left."""

    answers: dict[str, set[str]] = field(default_factory=dict)
    num_complete: int = 0
    num_gone: int = 0


async def _ask(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """The text of one answer."""
    if not body["stream"]:
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return "".join(choice["text"] for choice in answer.json()["choices"])
    text, last = "", ""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():  # splits at U+2028 and its like, which a made-up text may have
            if line.startswith("data: {"):
                for choice in httpx.Response(200, content=line[6:]).json()["choices"]:
                    text += choice["text"]
            last = line or last
    assert last == "data: [DONE]", last
    return text


async def _load(url: str, rng: random.Random, prompts: list[str], count: int, in_flight: int, patience_s: float, tokens: int) -> Outcome:
    outcome = Outcome()
    gate = asyncio.Semaphore(in_flight)

    async def one(index: int) -> None:
        prompt = rng.choice(prompts)
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": rng.random() < 0.5}
        async with gate:
            if index % 3 == 0:
                body |= {"max_tokens": 20 * tokens, "n": rng.choice([1, 1, 3])}
                try:
                    await asyncio.wait_for(_ask(http, body), rng.random() * patience_s)
                except TimeoutError:
                    outcome.num_gone += 1
                return
            outcome.answers.setdefault(prompt, set()).add(await _ask(http, body))
            outcome.num_complete += 1

    limits = httpx.Limits(max_connections=in_flight + 1, max_keepalive_connections=in_flight)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http, asyncio.TaskGroup() as group:
        for index in range(count):
            group.create_task(one(index))
    return outcome


def load(
    server: ServerProcess, rng: random.Random, prompts: list[str], *, count: int, in_flight: int, patience_s: float, tokens: int
) -> Outcome:
    """`count` completions, a third of whose callers leave within `patience_s`."""
    return asyncio.run(_load(server.url, rng, prompts, count, in_flight, patience_s, tokens))


def wait_idle(server: ServerProcess, timeout_s: float = 10.0) -> dict[str, Any]:
    """What /load says once nothing runs or waits (or at the end of the time)."""
    end_s = time.monotonic() + timeout_s
    while True:
        state = httpx.get(server.url + "/load", timeout=30).json()
        if not (state["server_load"] or state["num_running"] or state["num_waiting"]) or time.monotonic() > end_s:
            return state
        time.sleep(0.05)


def resident_bytes(server: ServerProcess) -> int:
    """Memory of the server and the processes that it started."""
    pids = [server.process.pid, *server.children()]
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES for pid in pids)
