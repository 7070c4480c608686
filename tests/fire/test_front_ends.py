"""Several API processes over one engine: one set of numbers, deaths of either kind, drain."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from api_stub import fresh_seed
from firing import Watched, generate, get
from kill_engine import FLAGS, terminal_complaint, torture
from tiny_model import ServerProcess, alive, served

from hexad.application.api.quarantine import Quarantine
from hexad.application.api.shared_metrics import SharedMetrics
from hexad.application.api.strike_board import StrikeBoard
from hexad.common.errors import RequestError
from hexad.common.metrics import MetricsRegistry, RequestRecord
from hexad.common.params import SamplingParams
from hexad.engine.plan import TokenSegment
from hexad.orchestration.messages import Output, Submit
from hexad.orchestration.stream import RequestStream

MANY = ("--api-server-count", "2", "--log-level", "error")


@pytest.fixture(scope="module")
def many(tiny: Path) -> Iterator[ServerProcess]:
    with served(tiny, *FLAGS, *MANY) as process:
        yield process


def front_ends(process: ServerProcess) -> list[int]:
    found = []
    for pid in process.children():
        with suppress(OSError):  # it may end between the two looks
            if b"hexad.application.api.front_end" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


async def counted(server: Watched, name: str) -> float:
    text = (await server.ask(get("/metrics"))).body.decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


async def test_requests_are_counted_once_whoever_is_asked(many: ServerProcess) -> None:
    server = Watched(many.url, many.process.pid)
    assert len(front_ends(many)) == 2
    before = await counted(server, "hexad:request_success_total")
    answers = await asyncio.gather(*(server.ask(generate(prompt=f"p{i}")) for i in range(60)))
    assert {answer.status for answer in answers} == {200}
    await asyncio.sleep(1.3)
    for _ in range(8):  # connections go to either
        assert await counted(server, "hexad:request_success_total") == before + 60
        assert await counted(server, "hexad:e2e_request_latency_seconds_count") == before + 60


async def test_engine_and_front_ends_may_die(many: ServerProcess) -> None:
    server = Watched(many.url, many.process.pid)
    total = await counted(server, "hexad:request_success_total")
    figures = await torture(server, ["kill"], random.Random(fresh_seed()))
    assert figures["complaints"] == [], figures
    victim, other = front_ends(many)
    os.kill(victim, signal.SIGKILL)
    for _ in range(600):
        if len(front_ends(many)) == 2 and victim not in front_ends(many):
            break
        await asyncio.sleep(0.05)
    assert other in front_ends(many)
    answers = await asyncio.gather(*(server.ask(generate(prompt=f"p{i}")) for i in range(30)))  # also those that waited for the new one
    assert {answer.status for answer in answers} == {200}
    await asyncio.sleep(1.3)
    assert await counted(server, "hexad:request_success_total") > total + 30


async def test_a_stopped_front_end_is_replaced(many: ServerProcess) -> None:
    """It goes on to get its share of the connections: those that waited are answered by its successor."""
    server = Watched(many.url, many.process.pid)
    victim, other = front_ends(many)
    os.kill(victim, signal.SIGSTOP)
    answers = await asyncio.gather(*(server.ask(generate(prompt=f"s{i}")) for i in range(30)))
    assert {answer.status for answer in answers} == {200}
    now = front_ends(many)
    assert other in now
    assert victim not in now
    assert len(now) == 2


def test_deaths_add_up_over_all_processes(tmp_path: Path) -> None:
    """A request that kills wherever it is sent is condemned by the third death; one that ended well anywhere is cleared everywhere."""
    places = [Quarantine(StrikeBoard(tmp_path / "strikes", i)) for i in range(3)]
    killer, innocent = (Submit(request_id=f"r{i}", prompt=(TokenSegment((i,)),), params=SamplingParams(max_tokens=3)) for i in range(2))
    for place in places[:2]:
        assert (place.check(killer) is None) == (place is places[0])
        place.strike([killer, innocent])
    stream = RequestStream("r", 1, lambda _: None)
    places[2].watch(places[2].check(innocent), stream)
    stream.feed(Output(request_id="r", choice=0, finish_reason="stop"))
    places[2].strike([killer])
    for place in places:
        with pytest.raises(RequestError, match="3 times"):
            place.check(killer)
    for _ in range(2):
        places[2].strike([innocent])
        assert places[2].check(innocent)  # suspected, not refused: what was before it ended well does not count


async def test_drain_of_all(tiny: Path) -> None:
    with served(tiny, "--device", "fake:0.05", *MANY, "--shutdown-timeout", "20") as process:
        server = Watched(process.url, process.process.pid)
        asking = [asyncio.create_task(server.ask(generate(max_tokens=30, stream=True, ignore_eos=True))) for _ in range(8)]
        await asyncio.sleep(0.8)
        children = process.children()
        process.process.send_signal(signal.SIGTERM)
        for answer in await asyncio.gather(*asking):
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert terminal_complaint(answer, True, 1) is None
        assert await asyncio.to_thread(process.process.wait, 10) == 0
        assert not any(map(alive, children))


def test_front_ends_go_with_their_parent(tiny: Path) -> None:
    with served(tiny, "--device", "fake", *MANY) as process:
        assert len(process.children()) >= 3
        process.process.kill()  # `served` then checks that none of the children is left


def test_a_shared_port_is_not_anybodys(tiny: Path, many: ServerProcess) -> None:
    port = many.url.rpartition(":")[2]
    command = [sys.executable, "-m", "hexad", "serve", str(tiny), "--device", "fake", "--port", port, "--api-server-count", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert port in done.stderr


def test_counts_of_those_that_ended_stay(tmp_path: Path) -> None:
    def registry(requests: int) -> MetricsRegistry:
        made = MetricsRegistry("m")
        for i in range(requests):
            reason = "stop" if i % 2 else "length"
            made.observe_request(
                RequestRecord(prompt_tokens=3, generation_tokens=2, finish_reason=reason, arrived_s=0, ended_s=i, first_token_s=0.1)
            )
        return made

    registries = [registry(count) for count in (1, 4, 5)]
    shared = [SharedMetrics(tmp_path, i) for i in range(3)]
    for place, own in zip(shared, registries, strict=True):
        place.write(own)
    for place, own in zip(shared[:2], registries, strict=False):
        place.read(own)
        lines = own.render().decode().splitlines()
        assert 'hexad:prompt_tokens_total{model_name="m"} 30.0' in lines
        assert 'vllm:request_success_total{finished_reason="length",model_name="m"} 6.0' in lines
        assert 'hexad:request_success_total{finished_reason="stop",model_name="m"} 4.0' in lines
        assert 'hexad:e2e_request_latency_seconds_count{model_name="m"} 10.0' in lines
        buckets = [float(line.split()[-1]) for line in lines if line.startswith("hexad:e2e_request_latency_seconds_bucket")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == 10
    (tmp_path / "9.json").write_text("not json")
    shared[0].read(registries[0])
