"""The server around the core loop: a front end that stops reading, an engine that dies in service, a parent killed while it loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from core_here import CONFIG, impatient_core, request, until

from hexad.common.errors import EngineDeadError, StartupError
from hexad.orchestration.client import EngineClient
from hexad.orchestration.messages import PROTOCOL_VERSION, Hello, Output, Outputs, ToClient


def test_a_front_end_that_stops_reading_loses_its_requests_but_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with impatient_core(tmp_path, monkeypatch) as (core, address):
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.LINGER, 0)  # a failure must not hold up whoever collects the context
        socket.connect(address)
        for message in (Hello(protocol=PROTOCOL_VERSION), request("a", 30_000), request("b", 30_000)):
            socket.send(msgspec.msgpack.encode(message))
        until(lambda: core.stats()["generation_tokens_total"] > 0)
        until(lambda: core.live_requests() == 0, 30.0)  # nobody reads
        stats = core.stats()
        assert stats["generation_tokens_total"] < 60_000, "it was given up long before the end"

        items: list[Output] = []
        decoder = msgspec.msgpack.Decoder(ToClient)
        while sum(item.finish_reason is not None for item in items) < 2:
            assert socket.poll(5_000), "the ends are missing"
            message = decoder.decode(socket.recv())
            items += message.items if isinstance(message, Outputs) else ()
        for name in ("a", "b"):
            mine = [item for item in items if item.request_id == name]
            assert [item.finish_reason for item in mine if item.finish_reason is not None] == ["abort"]
            assert mine[-1].finish_reason == "abort"
        tokens = sum(len(item.token_ids) for item in items)
        assert tokens == stats["generation_tokens_total"], "no token was lost on the way"

        socket.send(msgspec.msgpack.encode(request("again", 5)))  # it may go on
        end = None
        while end is None:
            assert socket.poll(5_000)
            message = decoder.decode(socket.recv())
            end = next((item.finish_reason for item in getattr(message, "items", ()) if item.finish_reason), None)
        assert end == "length"
    context.destroy(linger=0)


DYING = """
import sys
from hexad import compose
from hexad.engine.executor.fake import FakeExecutor, Fault
init = FakeExecutor.__init__
FakeExecutor.__init__ = lambda self, **options: init(self, faults=(Fault(kind="die", step=30),), **options)
sys.exit(compose.serve())
"""


async def test_an_engine_that_dies_in_service_says_so_and_exits_with_1() -> None:
    deaths: list[EngineDeadError] = []
    client = await EngineClient.start(CONFIG, command=(sys.executable, "-c", DYING))
    client.on_death(deaths.append)
    streams = [client.submit(request(f"r{index}", 1000)) for index in range(5)]
    told = 0
    for stream in streams:
        errors = 0
        try:
            async for output in stream:
                assert errors == 0, "nothing comes after the end"
                errors += output.error is not None
                told += output.error_code == "engine_dead" and "injected" in (output.error or "")
        except EngineDeadError:  # it was on its way when the engine died
            errors += 1
        assert errors == 1
    assert told >= 1
    directory = Path(client.process.directory)
    assert await client.close() == 1
    assert not directory.exists()


LOADING = """
import sys, time
from hexad.orchestration.process import main
def build(config, report):
    report("read", "for a long time")
    {body}
sys.exit(main(build))
"""


async def test_an_unexpected_failure_while_loading_is_a_startup_error() -> None:
    seen = []
    with pytest.raises(StartupError, match="ZeroDivisionError"):
        await EngineClient.start(CONFIG, command=(sys.executable, "-c", LOADING.format(body="1 / 0")), on_progress=seen.append)
    assert [progress.phase for progress in seen] == ["read"]


PARENT = """
import asyncio, os, sys
from hexad.common.config import HexadConfig
from hexad.orchestration.client import EngineClient
child = (sys.executable, "-c", sys.argv[1])
asyncio.run(EngineClient.start(HexadConfig(), command=child, on_progress=lambda progress: print(progress.phase, flush=True)))
"""


def test_a_parent_killed_while_the_engine_loads_takes_it_along(tmp_path: Path) -> None:
    loading = LOADING.format(body="time.sleep(60)")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, loading], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None and parent.stdout.readline().strip() == "read"
    (child,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    until(lambda: list(tmp_path.iterdir()) == [])


async def test_starting_and_closing_leaks_nothing() -> None:
    process = psutil.Process()
    counts, before = [], set(process.children())
    for _ in range(3):
        client = await EngineClient.start(CONFIG)
        await client.close()
        counts.append((process.num_fds(), process.num_threads()))
    assert counts[2][0] <= counts[1][0] and counts[2][1] <= counts[1][1] and set(process.children()) <= before
