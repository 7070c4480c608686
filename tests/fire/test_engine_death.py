"""Engines that are killed or stopped under a server: one end for each request, readiness, backoff, quarantine, exit codes, nothing left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

import httpx2 as httpx
import pytest
from api_stub import fresh_seed
from firing import Answer, Watched, generate
from kill_engine import FLAGS, terminal_complaint, torture
from tiny_model import ServerProcess, alive, served

from hexad.application.api.supervisor import SupervisedEngine
from hexad.common.config import HexadConfig
from hexad.common.errors import EngineDeadError, HexadError, RequestError, StartupError
from hexad.common.params import SamplingParams
from hexad.engine.plan import TokenSegment
from hexad.orchestration.client import EngineClient
from hexad.orchestration.messages import Output, Submit
from hexad.orchestration.stream import RequestStream

SLOW = ("--device", "fake:0.05", "--log-level", "error")
KILLER_TOKEN = 666


def watched(process: ServerProcess) -> Watched:
    return Watched(process.url, process.process.pid)


async def test_kills_and_stops_under_load(tiny: Path) -> None:
    rng = random.Random(fresh_seed())
    blows = ["kill", "stop"]
    rng.shuffle(blows)
    with served(tiny, *FLAGS, "--log-level", "error") as process:
        figures = await torture(watched(process), blows, rng)
        assert process.end() == 0
    assert figures["complaints"] == [], figures
    assert figures["outcomes"]["served"] > 20
    assert figures["outcomes"]["failed"] + figures["outcomes"].get("refused", 0) > 0


def test_the_rule_of_one_end_can_object() -> None:
    end, done = b'data: {"choices":[{"index":0,"finish_reason":"stop"}]}\n\n', b"data: [DONE]\n\n"
    error = b'data: {"error":{"code":"engine_dead"}}\n\n'
    for body, fine in [
        (end + done, True),
        (b": heartbeat\n\n" + error, True),
        (end + error, True),
        (end, False),
        (done, False),
        (end + done + done, False),
        (error + error, False),
        (error + done, False),
        (error + end, False),
        (end + end + done, False),
        (b"", False),
    ]:
        assert (terminal_complaint(Answer(200, {}, body), True, 1) is None) == fine, body
    assert terminal_complaint(Answer(503), False, 1)
    assert terminal_complaint(Answer(503, {"retry-after": "2"}), False, 1) is None


async def test_a_server_that_gives_up_says_so(tiny: Path) -> None:
    with served(tiny, *SLOW, "--max-engine-restarts", "0") as process:
        server = watched(process)
        asking = [asyncio.create_task(server.ask(generate(max_tokens=900, stream=stream, ignore_eos=True))) for stream in (True, False)]
        await asyncio.sleep(0.5)
        pid = server.engine_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        streamed, whole = await asyncio.gather(*asking)
        assert terminal_complaint(streamed, True, 1) is None
        assert b"engine_dead" in streamed.body
        assert whole.status == 503
        assert whole.headers["retry-after"]
        assert await asyncio.to_thread(process.process.wait, 10) == 1


async def test_signals_while_there_is_no_engine(tiny: Path) -> None:
    """SIGTERM during the pause before a restart ends the server at once, and well."""
    with served(tiny, *SLOW) as process:
        server = watched(process)
        pid = server.engine_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await server.wait_status("/health/ready", 503, 5)
        refused = await server.ask(generate())
        assert (refused.status, refused.error()["code"]) == (503, "engine_dead")
        assert refused.headers["retry-after"]
        start_s = time.monotonic()
        assert await asyncio.to_thread(process.end, 10) == 0
        assert time.monotonic() - start_s < 5


async def test_a_stopped_engine_does_not_hold_up_the_end(tiny: Path) -> None:
    with served(tiny, *SLOW, "--shutdown-timeout", "1") as process:
        server = watched(process)
        asking = asyncio.create_task(server.ask(generate(max_tokens=900, stream=True, ignore_eos=True)))
        await asyncio.sleep(0.5)
        pid = server.engine_pid()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        start_s = time.monotonic()
        code = await asyncio.to_thread(process.end, 25)
        assert code == 0
        assert time.monotonic() - start_s < 16
        assert terminal_complaint(await asking, True, 1) is None
        assert not alive(pid)


def test_a_killed_server_takes_its_engine_along(tiny: Path) -> None:
    with served(tiny, *SLOW) as process:
        engine = watched(process).engine_pid()
        assert engine is not None
        with httpx.stream("POST", process.url + "/v1/completions", json={"prompt": "x", "max_tokens": 900, "stream": True}) as response:
            next(response.iter_raw())
            process.process.kill()
        end_s = time.monotonic() + 10
        while alive(engine) and time.monotonic() < end_s:
            time.sleep(0.05)
        assert not alive(engine)


# The supervisor by itself.

CONFIG = HexadConfig.parse(
    {
        "model": {"model": "fake", "max_model_len": 4096},
        "device": {"device": "fake"},
        "server": {"log_level": "error", "engine_timeout_s": 5},
    }
)
DEADLY_ENGINE = f"""
import os, sys
from hexad import compose
from hexad.engine.executor.fake import FakeExecutor
whole = FakeExecutor.execute
def execute(self, plan):
    for new in plan.new:
        if any({KILLER_TOKEN} in segment.ids for segment in new.prompt):
            os._exit(9)
    return whole(self, plan)
FakeExecutor.execute = execute
sys.exit(compose.serve())
"""


def request(name: str, ids: tuple[int, ...], max_tokens: int = 3, seed: int | None = None) -> Submit:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed)
    return Submit(request_id=name, prompt=(TokenSegment(ids),), params=params)


async def drain(stream: RequestStream) -> list[Output]:
    return [output async for output in stream]


async def alive_again(engine: SupervisedEngine) -> None:
    for _ in range(2_000):
        if engine.is_alive:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engine was not started again")


async def test_a_request_that_kills_three_times_is_quarantined() -> None:
    async def start() -> EngineClient:
        return await EngineClient.start(CONFIG, command=(sys.executable, "-c", DEADLY_ENGINE))

    engine = SupervisedEngine(await start(), start, first_pause_s=0.01)
    innocent, killer = (1, 2, 3), (4, KILLER_TOKEN)
    for round_ in range(3):
        running = engine.submit(request(f"i{round_}", innocent, 4_000))
        await running.next_batch()
        with pytest.raises(EngineDeadError):
            await drain(engine.submit(request(f"k{round_}", killer, seed=round_)))
        with pytest.raises(EngineDeadError):
            await drain(running)
        await alive_again(engine)
        assert (await drain(engine.submit(request(f"j{round_}", innocent, 4_000))))[-1].finish_reason == "length"
    with pytest.raises(RequestError, match="3 times") as refused:
        engine.submit(request("k", killer))
    assert refused.value.code == "quarantined"
    assert refused.value.status == 400
    assert (await drain(engine.submit(request("i", innocent, 4_000))))[-1].finish_reason == "length"
    assert (await drain(engine.submit(request("other", (4, 5)))))[-1].finish_reason == "length"
    assert engine.num_deaths == 3
    await engine.close()


class StubClient:
    """An engine connection that dies when told to."""

    welcome = None
    lost: tuple[Submit, ...] = ()
    is_alive = True

    def on_death(self, callback: object) -> None:
        self.die = lambda: callback(EngineDeadError("dead"))  # type: ignore[operator]

    async def close(self, timeout_s: float = 0.0) -> None:
        self.is_alive = False


async def test_pauses_double_and_it_gives_up() -> None:
    starts: list[float] = []
    clients = [StubClient()]

    async def start() -> StubClient:
        starts.append(time.monotonic())
        clients.append(StubClient())
        return clients[-1]

    engine = SupervisedEngine(clients[0], start, max_deaths=4, first_pause_s=0.05)  # type: ignore[arg-type]
    pauses = []
    for number in range(4):
        died_s = time.monotonic()
        clients[-1].die()
        while len(starts) == number:
            await asyncio.sleep(0.001)
        pauses.append(starts[-1] - died_s)
        await asyncio.sleep(0.01)
    assert not engine.gave_up.is_set()
    for number, pause_s in enumerate(pauses):
        assert pause_s >= 0.05 * 2**number - 0.005, pauses
    clients[-1].die()
    await asyncio.wait_for(engine.gave_up.wait(), 1)
    assert len(starts) == 4
    await engine.close()


@pytest.mark.parametrize("error", [StartupError("no memory"), OSError("no descriptors"), EngineDeadError("died while it started")])
async def test_starts_that_fail_count_as_deaths(error: Exception) -> None:
    async def start() -> StubClient:
        raise error

    client = StubClient()
    engine = SupervisedEngine(client, start, max_deaths=3, first_pause_s=0.001)  # type: ignore[arg-type]
    client.die()
    await asyncio.wait_for(engine.gave_up.wait(), 5)
    await engine.close()


async def test_a_long_pause_of_the_server_is_not_the_engines_silence() -> None:
    """After the server itself was stopped, what the engine said meanwhile is read before anybody is declared dead."""
    config = CONFIG.with_values({"server.engine_timeout_s": 1.5})
    client = await EngineClient.start(config)
    try:
        for _ in range(3):
            time.sleep(2.5)  # the event loop stands still
            await asyncio.sleep(0.2)
            assert client.is_alive
        assert await client.call("ping") == {}
    except HexadError as error:
        raise AssertionError(error.message) from None
    finally:
        await client.close()
