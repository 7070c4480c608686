"""Kill (-9) and stop (SIGSTOP) the engine process at random moments under load: `python scripts/kill_engine.py --kills 50 --stops 10`.

What must hold: each accepted request gets exactly one terminal event (the end of its answer, or one error); readiness falls and returns;
afterwards nothing runs or waits, no block is held, no process, socket directory, descriptor or memory is left behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from firing import Answer, Connection, Watched, generate, post
from own_server import options, own_server, tell

BLOWS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
READY, NOT_READY = 200, 503
ENGINE_TIMEOUT_S = 2.0
FLAGS = ("--device", "fake:0.005", "--engine-timeout", str(ENGINE_TIMEOUT_S))


def terminal_complaint(answer: Answer, streamed: bool, n: int) -> str | None:
    """What is wrong with the end of an answer, or None: there is exactly one."""
    if answer.status == NOT_READY:
        return None if "retry-after" in answer.headers else "503 without Retry-After"
    if answer.status != 200:
        return f"status {answer.status}: {answer.body[-200:]!r}"
    if not streamed:
        ends = sum(choice["finish_reason"] is not None for choice in json.loads(answer.body)["choices"])
        return None if ends == n else f"{ends} ends for {n} choices"
    events = [event for event in answer.body.split(b"\n\n") if event.startswith(b"data: ")]
    done = sum(event == b"data: [DONE]" for event in events)
    parsed = [json.loads(event[6:]) for event in events if event != b"data: [DONE]"]
    errors = sum("error" in event for event in parsed)
    if done + errors != 1:
        return f"{done} [DONE] and {errors} errors in one stream"
    if errors and "error" not in parsed[-1]:
        return "events after the error"
    ends = Counter(c["index"] for event in parsed if "choices" in event for c in event["choices"] if c["finish_reason"])
    if done and ends != Counter(range(n)):
        return f"choices ended {dict(ends)}"
    return None


@dataclass
class Load:
    """Callers that stream, wait, or leave, until `stop` is set."""

    url: str
    seed: int
    callers: int = 16
    outcomes: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    share_leaving: float = 0.1
    max_tokens: int = 80

    async def run(self) -> None:
        await asyncio.gather(*(self._caller(random.Random(f"{self.seed} {i}")) for i in range(self.callers)))

    async def _caller(self, rng: random.Random) -> None:
        connection = Connection(self.url)
        while not self.stop.is_set():
            streamed, n = rng.random() < 0.6, rng.choice((1, 1, 1, 3))
            prompt = "".join(rng.choices("abcdefgh ", k=rng.randrange(1, 200)))
            options = {
                "prompt": prompt,
                "max_tokens": rng.randrange(1, self.max_tokens),
                "n": n,
                "seed": rng.randrange(9),
            }
            request = generate(**options, temperature=1, stream=streamed)
            if rng.random() < self.share_leaving:
                await self._leave(connection, request, rng.uniform(0, 0.3))
                continue
            refused = False
            try:
                answer = await asyncio.wait_for(connection.send([request]), 60)
                refused = answer.status == NOT_READY
                complaint = terminal_complaint(answer, streamed, n)
                self.outcomes[_outcome(answer)] += 1
            except TimeoutError:
                complaint = "no end within 60 s"
                connection.abort()
            except (OSError, ValueError) as error:
                complaint = f"not an answer: {error!r}"
                connection.abort()
            if complaint:
                self.complaints.append(complaint)
            if refused:
                await asyncio.sleep(rng.uniform(0.02, 0.1))
        await connection.close()

    async def _leave(self, connection: Connection, request: bytes, after_s: float) -> None:
        self.outcomes["left"] += 1
        try:
            _, writer = await connection.open()
            writer.write(request)
            await asyncio.sleep(after_s)
        except OSError as error:
            self.complaints.append(f"no connection: {error!r}")
        connection.abort()


def _outcome(answer: Answer) -> str:
    if answer.status == NOT_READY:
        return "refused"
    return "failed" if b'{"error":' in answer.body else "served"


async def strike(server: Watched, blow: str, after_s: float) -> tuple[float, float]:
    """Hit the engine; seconds until readiness fell, and until it was back."""
    await asyncio.sleep(after_s)
    pid = server.engine_pid()
    assert pid is not None
    os.kill(pid, BLOWS[blow])
    fell_s = await server.wait_status("/health/ready", NOT_READY, ENGINE_TIMEOUT_S + 10)
    assert await server.status("/health/live") == 200
    back_s = await server.wait_status("/health/ready", READY, 60)
    assert server.engine_pid() not in (None, pid), "readiness came back without a new engine"
    return fell_s, back_s


async def torture(server: Watched, blows: list[str], rng: random.Random) -> dict[str, Any]:
    """Strike once per entry of `blows` under load; the figures, with `complaints` empty when all went well."""
    directories: set[Path] = set()
    await server.ask(post("/v1/completions", b'{"prompt": "warm", "max_tokens": 2}'))
    descriptors, memory = server.descriptors(), server.rss_mib()["api"]
    load = Load(server.url, rng.randrange(2**32))
    running = asyncio.create_task(load.run())
    try:
        times = []
        for blow in blows:
            directories |= socket_directories(server)
            times.append((blow, *await strike(server, blow, rng.uniform(0.1, 2.0))))
    finally:
        load.stop.set()
        await running
    complaints = list(load.complaints)
    await server.settle()
    await asyncio.sleep(0.2)
    if server.descriptors() > descriptors + 4:
        complaints.append(f"descriptors went from {descriptors} to {server.descriptors()}")
    assert directories or not blows, "the engine's sockets were not found"
    if left := [str(path) for path in directories if path.exists()]:
        complaints.append(f"socket directories are left behind: {left}")
    if len([child for child in server.process.children() if child.status() == "zombie"]):
        complaints.append("zombies are left behind")
    return {
        "blows": Counter(blows),
        "outcomes": dict(load.outcomes),
        "readiness_fell_s_max": round(max((fell for _, fell, _ in times), default=0.0), 3),
        "readiness_back_s_max": round(max((back for _, _, back in times), default=0.0), 3),
        "rss_mib": [round(memory, 1), round(server.rss_mib()["api"], 1)],
        "complaints": complaints,
    }


def socket_directories(server: Watched) -> set[Path]:
    """Where the engine of this moment has its sockets."""
    engine = server.engine_pid()
    if engine is None:
        return set()
    paths = [str(connection.laddr) for connection in psutil.Process(engine).net_connections("unix")]
    return {Path(path).parent for path in paths if path.endswith("/core")}


async def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--per-server", type=int, default=4, help="blows before a fresh server: its pauses double with each death")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    blows = ["kill"] * args.kills + ["stop"] * args.stops
    rng.shuffle(blows)
    rounds, start_s = [], time.monotonic()
    for i in range(0, len(blows), args.per_server):
        with own_server(args.model, *FLAGS) as server:
            rounds.append(await torture(server, blows[i : i + args.per_server], rng))
        print(json.dumps(rounds[-1]), flush=True)
    outcomes: Counter[str] = sum((Counter(r["outcomes"]) for r in rounds), Counter())
    complaints = [complaint for r in rounds for complaint in r["complaints"]]
    figures = {
        "kills": args.kills,
        "stops": args.stops,
        "seed": args.seed,
        "seconds": round(time.monotonic() - start_s, 1),
        "outcomes": dict(outcomes),
        "readiness_fell_s_max": max(r["readiness_fell_s_max"] for r in rounds),
        "readiness_back_s_max": max(r["readiness_back_s_max"] for r in rounds),
        "num_complaints": len(complaints),
        "complaints": complaints[:50],
    }
    return tell(figures, args.out)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
