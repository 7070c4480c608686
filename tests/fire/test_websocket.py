"""The WebSocket face: the chunks of SSE, refusals, leaving, keys, origins, drain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from firing import Watched, generate, get
from tiny_model import served
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from hexad.application.api.websocket import MAX_WAITING

VARYING = ("id", "created")


def address(url: str, path: str = "/v1/completions") -> str:
    return url.replace("http", "ws", 1) + path


async def ask(socket: ClientConnection, body: Any) -> list[dict[str, Any]]:
    """Chunks of one request; an error object is the last one."""
    await socket.send(body if isinstance(body, str | bytes) else json.dumps(body))
    chunks: list[dict[str, Any]] = []
    while (text := await asyncio.wait_for(socket.recv(), 20)) != "[DONE]":
        chunks.append(json.loads(text))
        if "error" in chunks[-1]:
            break
    return chunks


def told(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in chunk.items() if k not in VARYING} for chunk in chunks]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice.get("text", choice.get("delta", {}).get("content", "")) for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_same_chunks_as_over_sse(server: Watched, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "stream_options": {"include_usage": True}}
    body |= {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    request = {**body, "stream": True}
    await server.ask(generate(path, **request))  # afterwards the prompt is cached for both
    sse = (await server.ask(generate(path, **request))).body.decode().removesuffix("data: [DONE]\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in sse.split("\n\n") if event]
    async with connect(address(server.url, path)) as socket:
        first, again = await ask(socket, body), await ask(socket, request)
    assert text_of(first) == text_of(again) == text_of(events)
    assert told(first)[-1]["usage"] == told(events)[-1]["usage"]
    assert {frozenset(chunk) for chunk in told(first)} == {frozenset(chunk) for chunk in told(events)}
    assert first[0]["id"] != again[0]["id"]
    assert len({chunk["id"] for chunk in first}) == 1


async def test_bad_messages_harm_only_themselves(server: Watched) -> None:
    async with connect(address(server.url)) as socket:
        for bad, code in [
            ("", "malformed_body"),
            ("{", "malformed_body"),
            ("[]", "malformed_body"),
            (b"\xff\xfe", "malformed_body"),
            ('{"prompt": "\\ud800"}', "malformed_body"),
            ({"prompt": "x", "max_tokens": -1}, "invalid_value"),
            ({"prompt": "x", "stream": False}, "invalid_value"),
            ({"prompt": "x", "model": "none"}, "model_not_found"),
            ({"prompt": "x" * 5_000}, "context_length_exceeded"),
        ]:
            (answer,) = await ask(socket, bad)
            assert answer["error"]["code"] == code, bad
        assert len(await ask(socket, {"prompt": "x", "max_tokens": 3})) >= 1
    await server.settle()


async def test_b36_closing_aborts(tiny: Path) -> None:
    with served(tiny, "--device", "fake:0.02", "--log-level", "error") as process:
        watched = Watched(process.url, process.process.pid)
        for how in ("close", "abort"):
            socket = await connect(address(process.url))
            await socket.send(json.dumps({"prompt": "x", "max_tokens": 900, "n": 2, "ignore_eos": True}))
            await socket.recv()
            assert (await watched.load())["server_load"] == 1
            if how == "close":
                await socket.close()
            else:
                socket.transport.abort()
            await watched.settle(3)


async def test_the_engine_dies_and_the_connection_lives(tiny: Path) -> None:
    """One error ends the request; the same connection goes on with the next engine."""
    with served(tiny, "--device", "fake:0.02", "--log-level", "error") as process:
        watched = Watched(process.url, process.process.pid)
        async with connect(address(process.url)) as socket:
            asking = asyncio.create_task(ask(socket, {"prompt": "x", "max_tokens": 900, "n": 2, "ignore_eos": True}))
            async with asyncio.timeout(20):
                while not (await watched.load())["num_running"]:
                    await asyncio.sleep(0.02)
            pid = watched.engine_pid()
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            chunks = await asking
            assert chunks[-1]["error"]["code"] == "engine_dead"
            assert sum("error" in chunk for chunk in chunks) == 1
            await watched.wait_status("/health/ready", 200, 60)
            again = await ask(socket, {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
            assert again[-1]["choices"][0]["finish_reason"] == "length"
        await watched.settle()


async def flood(socket: ClientConnection) -> None:
    for _ in range(MAX_WAITING * 20):
        await socket.send(json.dumps({"prompt": "x", "max_tokens": 500, "ignore_eos": True}))
        await asyncio.sleep(0)
    while True:
        await asyncio.wait_for(socket.recv(), 10)


async def test_a_flood_of_messages_ends_the_connection(tiny: Path) -> None:
    with served(tiny, "--device", "fake:0.02", "--log-level", "error") as process:
        async with connect(address(process.url)) as socket:
            with pytest.raises(ConnectionClosed) as closed:
                await flood(socket)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008
        await Watched(process.url, process.process.pid).settle(5)


async def test_b54_b60_keys_origins_and_drain(tiny: Path) -> None:
    with served(tiny, "--device", "fake:0.05", "--api-key", "k", "--shutdown-timeout", "0.5", "--log-level", "error") as process:
        url = address(process.url)
        right = {"Authorization": "Bearer k"}
        for headers, path, status in [
            ({}, "", 401),
            ({"Authorization": "Bearer x"}, "", 401),
            ({}, "?api_key=k", 401),
            ({}, "/../../health", 401),
            ({**right, "Origin": "https://evil.example"}, "", 403),
            (right, "/nowhere", 404),
        ]:
            with pytest.raises(InvalidStatus) as refused:
                async with connect(url + path, additional_headers=headers):
                    pass
            assert refused.value.response.status_code == status, (headers, path)
            assert json.loads(refused.value.response.body)["error"]["message"]
        async with connect(url, additional_headers={**right, "Origin": process.url}) as socket:
            await socket.send(json.dumps({"prompt": "x", "max_tokens": 900, "ignore_eos": True}))
            await socket.recv()
            process.process.send_signal(signal.SIGTERM)
            messages = [json.loads(message) async for message in socket]
            assert messages[-1]["error"]["code"] == "shutting_down"
        assert await asyncio.to_thread(process.process.wait, 10) == 0


async def test_plain_requests_to_the_same_paths_still_work(server: Watched) -> None:
    assert (await server.ask(get("/v1/completions", "Connection: close"))).status == 405
    assert (await server.ask(generate())).status == 200
