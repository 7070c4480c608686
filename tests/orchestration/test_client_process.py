"""A real engine process over ZeroMQ, with the fake executor: what happens when either side misbehaves, leaves or dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from hexad.common.config import HexadConfig
from hexad.common.errors import ConfigError, EngineDeadError, HexadError, ModelError, StartupError
from hexad.common.params import SamplingParams
from hexad.engine.plan import TokenSegment
from hexad.orchestration.client import EngineClient
from hexad.orchestration.messages import PROTOCOL_VERSION, Abort, Call, Hello, Output, Submit, Welcome
from hexad.orchestration.spawn import Progress

CONFIG = HexadConfig.parse(
    {
        "model": {"model": "fake", "max_model_len": 4096},
        "device": {"device": "fake"},
        "scheduler": {"max_num_seqs": 64},
        "server": {"log_level": "error"},
    }
)
FOREVER = 3_000  # tokens: seconds of work, as far as these tests are concerned


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(CONFIG)
    yield client
    await client.close()


@pytest.fixture
async def slow_client() -> AsyncIterator[EngineClient]:
    """A millisecond a step, so that what is asked meanwhile finds the request running."""
    client = await EngineClient.start(CONFIG.with_values({"device.device": "fake:0.001"}))
    yield client
    await client.close()


def request(request_id: str, max_tokens: int = 5, prompt: tuple[int, ...] = (1, 2, 3), **params: object) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, **params)
    return Submit(request_id=request_id, prompt=(TokenSegment(prompt),), params=sampling)


async def collect(client: EngineClient, submit: Submit) -> list[Output]:
    return [output async for output in client.submit(submit)]


def ids(outputs: list[Output], choice: int = 0) -> list[int]:
    return [token for output in outputs if output.choice == choice for token in output.token_ids]


async def quiet(client: EngineClient, timeout_s: float = 5.0) -> dict[str, float | int | str | None]:
    """The engine's numbers once nothing runs."""
    deadline = time.monotonic() + timeout_s
    while True:
        stats = await client.call("stats")
        if not stats["live_requests"] and not stats["steps_in_flight"]:
            return stats
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.01)


def assert_empty(stats: dict[str, float | int | str | None]) -> None:
    assert stats["num_running"] == 0 and stats["num_waiting"] == 0
    assert stats["num_free_blocks"] + stats["num_cached_blocks"] == stats["num_blocks"]


async def test_start_reports_progress_and_limits() -> None:
    seen: list[Progress] = []
    client = await EngineClient.start(CONFIG, on_progress=seen.append)
    assert [progress.phase for progress in seen][-1] == "ready"
    assert client.welcome.max_len == 4096 and client.welcome.protocol == PROTOCOL_VERSION
    assert client.config is not None and client.welcome.config_hash == client.config.fingerprint()
    assert client.config.cache.block_size is not None
    directory = Path(client.process.directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    pid = client.process.pid
    assert await client.close() == 0
    assert not directory.exists() and not psutil.pid_exists(pid)
    assert await client.close() == 0
    with pytest.raises(EngineDeadError):
        client.submit(request("late"))


async def test_same_request_same_tokens(client: EngineClient) -> None:
    first = await collect(client, request("a", 20))
    second = await collect(client, request("b", 20))
    assert len(ids(first)) == 20 and ids(first) == ids(second)
    assert first[-1].finish_reason == "length" and first[0].queued_s is not None
    assert_empty(await quiet(client))


async def test_choices_end_one_by_one(client: EngineClient) -> None:
    outputs = await collect(client, request("n", 7, n=3))
    ends = [output.choice for output in outputs if output.finish_reason is not None]
    assert sorted(ends) == [0, 1, 2]
    assert all(len(ids(outputs, choice)) == 7 for choice in range(3))


async def test_one_choice_can_be_aborted(client: EngineClient) -> None:
    stream = client.submit(request("n", 400, n=2))
    await stream.next_batch()
    client.abort("n", 1)
    outputs = [output async for output in stream]
    ends = {output.choice: output.finish_reason for output in outputs if output.finish_reason is not None}
    assert ends == {0: "length", 1: "abort"}


async def test_b36_a_third_of_500_requests_leave_at_random(client: EngineClient) -> None:
    seed = time.time_ns()
    print("seed", seed)
    rng = random.Random(seed)
    process = psutil.Process(client.process.pid)
    gate = asyncio.Semaphore(32)

    async def one(name: str) -> str:
        async with gate:
            prompt = tuple(rng.randrange(1000) for _ in range(rng.choice((3, 40, 300))))
            tokens = rng.randrange(1, 60)
            how = rng.choice(("whole", "whole", "whole", "whole", "close", "abort"))
            stream = client.submit(request(name, tokens, prompt, n=rng.choice((1, 1, 1, 3))))
            outputs, leave_after = [], rng.randrange(0, 20)
            async with stream:
                if how == "close" and leave_after == 0:
                    return how
                async for output in stream:
                    outputs.append(output)
                    if how != "whole" and len(outputs) == leave_after:
                        if how == "close":
                            return how
                        client.abort(name)
            assert all(output.error is None for output in outputs), outputs
            ends = [output.choice for output in outputs if output.finish_reason is not None]
            assert sorted(ends) == list(range(max(ends) + 1)), "one terminal output a choice"
            return how

    resident = []
    for turn in range(3):
        await asyncio.gather(*(one(f"{turn}-{index}") for index in range(500)))
        stats = await quiet(client)
        assert_empty(stats)
        await client.call("reset_prefix_cache")
        stats = await client.call("stats")
        assert stats["num_free_blocks"] == stats["num_blocks"]
        resident.append(process.memory_info().rss)
    assert client.num_streams == 0
    assert resident[2] - resident[1] < 4 * 2**20, f"memory grows: {resident}"


async def test_closing_a_stream_stops_the_work(slow_client: EngineClient) -> None:
    client = slow_client
    streams = [client.submit(request(f"r{index}", FOREVER)) for index in range(4)]
    await streams[0].next_batch()
    for stream in streams:
        await stream.aclose()
    assert_empty(await quiet(client, 1.0))
    assert client.num_streams == 0


async def test_cancelling_the_consumer_stops_the_work(slow_client: EngineClient) -> None:
    client = slow_client
    task = asyncio.create_task(collect(client, request("r", FOREVER)))
    await asyncio.sleep(0.05)
    assert (await client.call("stats"))["live_requests"] == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_empty(await quiet(client, 1.0))


async def test_refusals_come_through_the_stream(client: EngineClient) -> None:
    (too_long,) = await collect(client, request("long", 5, tuple(range(5000))))
    assert too_long.error_code == "context_length_exceeded" and "4,096" in too_long.error
    (bad_token,) = await collect(client, request("token", 5, (1, 10**9)))
    assert bad_token.error_code == "invalid_value" and "1000000000" in bad_token.error
    (empty,) = await collect(client, request("empty", 5, ()))
    assert empty.error is not None
    (hot,) = await collect(client, request("hot", 5, min_p=float("nan")))
    assert hot.error is not None and "min_p" in hot.error
    assert len(ids(await collect(client, request("fine")))) == 5
    assert_empty(await quiet(client))


async def test_calls(slow_client: EngineClient) -> None:
    client = slow_client
    assert await client.call("ping") == {}
    with pytest.raises(HexadError, match="stats"):
        await client.call("statistics")
    stream = client.submit(request("old", 1_500))
    await stream.next_batch()
    assert (await client.call("drain"))["live_requests"] == 1
    (refused,) = await collect(client, request("new"))
    assert refused.error_code == "overloaded"
    assert [output async for output in stream][-1].finish_reason == "length"


async def test_killed_engine_gives_each_stream_one_error(client: EngineClient) -> None:
    deaths: list[EngineDeadError] = []
    client.on_death(deaths.append)
    streams = [client.submit(request(f"r{index}", FOREVER)) for index in range(20)]
    await streams[0].next_batch()
    os.kill(client.process.pid, signal.SIGKILL)

    async def errors(stream: AsyncIterator[Output]) -> int:
        count = 0
        while True:
            try:
                await anext(stream)
            except EngineDeadError as error:
                count += "-9" in error.message
            except StopAsyncIteration:
                return count

    assert await asyncio.wait_for(asyncio.gather(*map(errors, streams)), 5.0) == [1] * 20
    assert not client.is_alive and len(deaths) == 1
    with pytest.raises(EngineDeadError):
        client.submit(request("late"))
    with pytest.raises(EngineDeadError):
        await client.call("stats")
    directory = Path(client.process.directory)
    assert await client.close() == -9
    assert not directory.exists()


PARENT = """
import asyncio, sys
from hexad.common.config import HexadConfig
from hexad.orchestration.client import EngineClient
from hexad.common.params import SamplingParams
from hexad.engine.plan import TokenSegment
from hexad.orchestration.messages import Submit

async def main():
    client = await EngineClient.start(HexadConfig.model_validate_json(sys.argv[1]))
    stream = client.submit(Submit(request_id="r", prompt=(TokenSegment((1,)),), params=SamplingParams(max_tokens=4000, ignore_eos=True)))
    await stream.next_batch()
    print(client.process.pid, client.process.directory, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_killed_parent_takes_the_engine_with_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CONFIG.model_dump_json()], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid_text, directory = parent.stdout.readline().split()
    assert psutil.pid_exists(int(pid_text)) and Path(directory).exists()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 8.0
    while psutil.pid_exists(int(pid_text)) or Path(directory).exists():
        assert time.monotonic() < deadline, "the engine outlives its parent"
        time.sleep(0.02)


async def test_signals_are_the_parents_business(client: EngineClient) -> None:
    os.kill(client.process.pid, signal.SIGTERM)
    os.kill(client.process.pid, signal.SIGINT)
    assert len(ids(await collect(client, request("r")))) == 5
    assert await client.close() == 0


async def test_start_up_failures_keep_their_class() -> None:
    missing = CONFIG.with_values({"model.model": "/nowhere/at/all"})
    with pytest.raises(ModelError, match="nowhere"):
        await EngineClient.start(missing)
    with pytest.raises(ConfigError, match="max_model_len"):
        await EngineClient.start(CONFIG.with_values({"model.max_model_len": 10**6}))
    with pytest.raises(StartupError, match="exit code 3"):
        await EngineClient.start(CONFIG, command=(sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(StartupError, match="no-such-program"):
        await EngineClient.start(CONFIG, command=("no-such-program",))


async def test_cancelled_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(psutil.Process().children())
    task = asyncio.create_task(EngineClient.start(CONFIG, command=(sys.executable, "-c", "import time; time.sleep(60)")))
    await asyncio.sleep(0.2)
    (child,) = set(psutil.Process().children()) - before
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not child.is_running() and list(tmp_path.iterdir()) == []


class Raw:
    """A front end that can say anything."""

    def __init__(self, address: str) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(address)

    async def say(self, *frames: object) -> None:
        await self.socket.send_multipart([f if isinstance(f, bytes) else msgspec.msgpack.encode(f) for f in frames])

    async def hear(self, timeout_s: float = 2.0) -> bytes:
        return await asyncio.wait_for(self.socket.recv(), timeout_s)

    def vanish(self) -> None:
        self.context.destroy(linger=0)


async def test_bad_frames_harm_nobody(client: EngineClient) -> None:
    seed = time.time_ns()
    print("seed", seed)
    rng = random.Random(seed)
    stream = client.submit(request("victim", 1000))
    raw = Raw(client.address)
    good = msgspec.msgpack.encode(request("x"))
    half = msgspec.msgpack.encode({"type": "submit"})
    for frame in (b"", b"\xc1", b"{}", b"\x91" * 100_000, b"\xff" * 10, good[:-3], half, b"\xdd\xff\xff\xff\xff"):
        await raw.say(frame)
    for _ in range(300):
        broken = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        await raw.say(bytes(broken))
    await raw.say(b"two", b"frames")
    await raw.say(Submit(request_id="unasked", prompt=(TokenSegment((1,)),), params=SamplingParams()))  # no hello
    await raw.say(Hello(protocol=PROTOCOL_VERSION))
    for _ in range(300):  # the same from one that is known
        broken = bytearray(good)
        broken[rng.randrange(len(broken))] = rng.randrange(256)
        await raw.say(bytes(broken))
    await raw.say(Abort(("nobody",)))
    await raw.say(Call(1, "x" * 1000))
    outputs = [output async for output in stream]
    assert outputs[-1].finish_reason == "length" and len(ids(outputs)) == 1000
    raw.vanish()
    assert len(ids(await collect(client, request("after")))) == 5
    assert_empty(await quiet(client))


async def test_two_front_ends_do_not_mix(client: EngineClient) -> None:
    other = await EngineClient.connect(client.address, config_hash=client.welcome.config_hash)
    same = [collect(each, request("same-id", 50, (number, 5))) for number, each in ((1, client), (2, other))]
    first, second = await asyncio.gather(*same)
    assert len(ids(first)) == len(ids(second)) == 50 and ids(first) != ids(second)
    await other.close()
    assert client.is_alive


async def test_a_front_end_that_vanishes_is_cleaned_up(client: EngineClient) -> None:
    raw = Raw(client.address)
    await raw.say(Hello(protocol=PROTOCOL_VERSION))
    assert isinstance(msgspec.msgpack.decode(await raw.hear(), type=Welcome), Welcome)
    for index in range(3):
        await raw.say(request(f"r{index}", FOREVER))
    await raw.hear()
    raw.vanish()
    assert_empty(await quiet(client, 3.0))
    deadline = time.monotonic() + 3.0
    while (await client.call("stats"))["front_ends"] != 1:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_goodbye_of_a_joined_front_end_keeps_the_engine(client: EngineClient) -> None:
    other = await EngineClient.connect(client.address)
    stream = other.submit(request("r", FOREVER))
    await stream.next_batch()
    assert await other.close() is None
    with pytest.raises(EngineDeadError, match="closed"):
        async for _ in stream:
            pass
    assert_empty(await quiet(client, 2.0))


async def test_handshake_refusals(client: EngineClient) -> None:
    with pytest.raises(StartupError, match="config"):
        await EngineClient.connect(client.address, config_hash="0123456789abcdef")
    with pytest.raises(StartupError, match="did not answer"):
        await EngineClient.connect(client.address + "-not", timeout_s=0.2)
    raw = Raw(client.address)
    await raw.say(Hello(protocol=PROTOCOL_VERSION + 1))
    welcome = msgspec.msgpack.decode(await raw.hear(), type=Welcome)
    assert welcome.protocol == PROTOCOL_VERSION  # the newcomer sees it and leaves
    raw.vanish()


async def test_a_joined_front_end_sees_the_engine_die(client: EngineClient) -> None:
    other = await EngineClient.connect(client.address)
    stream = other.submit(request("r", FOREVER))
    await stream.next_batch()
    os.kill(client.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(collect_rest(stream), 5.0)
    assert not other.is_alive
    await other.close()


async def collect_rest(stream: AsyncIterator[Output]) -> list[Output]:
    return [output async for output in stream]


async def test_silence_is_death() -> None:
    client = await EngineClient.start(CONFIG, silence_timeout_s=2.5)
    stream = client.submit(request("r", FOREVER))
    await stream.next_batch()
    await asyncio.sleep(3.0)
    assert client.is_alive, "heartbeats keep it alive"
    os.kill(client.process.pid, signal.SIGSTOP)
    waiting = client.submit(request("s", FOREVER))
    with pytest.raises(EngineDeadError, match="silent"):
        await asyncio.wait_for(collect_rest(waiting), 8.0)
    assert await client.close(0.2) == -9
