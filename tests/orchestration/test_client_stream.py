"""A request's stream by itself: order, ends, time-outs, cancellation."""

from __future__ import annotations

import asyncio

import pytest

from hexad.common.errors import EngineDeadError, NeverFitsError, RequestFailedError
from hexad.orchestration.messages import Output
from hexad.orchestration.stream import RequestStream, output_error


def make(choices: int = 1) -> tuple[RequestStream, list[str]]:
    aborted: list[str] = []
    return RequestStream("r", choices, aborted.append), aborted


def token(token_id: int, choice: int = 0, finish: str | None = None) -> Output:
    return Output(request_id="r", choice=choice, token_ids=(token_id,), finish_reason=finish)


async def test_ends_when_every_choice_has_ended() -> None:
    stream, aborted = make(2)
    assert not stream.feed(token(1))
    assert not stream.feed(token(2, 1, "stop"))
    assert stream.feed(token(3, 0, "length"))
    assert [o.token_ids[0] async for o in stream] == [1, 2, 3]
    await stream.aclose()
    assert aborted == []


async def test_waits_for_outputs_that_come_later() -> None:
    stream, _ = make()
    loop = asyncio.get_running_loop()
    loop.call_later(0.01, stream.feed, token(1))
    loop.call_later(0.02, stream.feed, token(2, finish="stop"))
    assert [o.token_ids[0] async for o in stream] == [1, 2]


async def test_time_out_of_next_batch_does_not_abort() -> None:
    stream, aborted = make()
    assert await stream.next_batch(0.01) == []
    assert not stream.ended and aborted == []
    stream.feed(token(1))
    stream.feed(token(2))
    assert [o.token_ids[0] for o in await stream.next_batch(1)] == [1, 2]
    stream.feed(token(3, finish="stop"))
    assert len(await stream.next_batch()) == 1
    assert stream.ended and await stream.next_batch() == []


async def test_death_delivers_what_came_then_raises_once() -> None:
    stream, _ = make()
    stream.feed(token(1))
    stream.fail(EngineDeadError("gone"))
    stream.fail(EngineDeadError("again"))
    assert (await anext(stream)).token_ids == (1,)
    with pytest.raises(EngineDeadError, match="gone"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_death_after_the_last_output_is_no_error() -> None:
    stream, _ = make()
    stream.feed(token(1, finish="stop"))
    stream.fail(EngineDeadError("gone"))
    assert len([o async for o in stream]) == 1


async def test_cancelling_the_consumer_aborts_once() -> None:
    stream, aborted = make()

    async def consume() -> None:
        async with stream:
            async for _ in stream:
                pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert aborted == ["r"]


async def test_leaving_early_aborts() -> None:
    stream, aborted = make()
    stream.feed(token(1))
    async with stream:
        async for _ in stream:
            break
    assert aborted == ["r"]


def test_output_error_maps_codes() -> None:
    failed = Output(request_id="r", choice=0, error="too big", error_code="kv_cache_exceeded")
    assert isinstance(output_error(failed), NeverFitsError)
    unknown = Output(request_id="r", choice=0, error="odd", error_code="odd_code")
    error = output_error(unknown)
    assert isinstance(error, RequestFailedError) and error.code == "odd_code"
    assert output_error(token(1)) is None
