"""The short way of a stream's bytes gives what the long way gives, and leaves to it what may wait or end."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import pytest
from api_stub import ByteTokenizer, StubEngine, serving

from hexad.application.api import sse
from hexad.application.api.direct import DirectBody
from hexad.orchestration.messages import Output
from hexad.orchestration.stream import RequestStream

CHAT = "/v1/chat/completions"
TURN = [{"role": "user", "content": "hi"}]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "x"}),
    "usage": ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}),
    "continuous": ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "logprobs": ("/v1/completions", {"prompt": "x", "logprobs": 2}),
    "ids": ("/v1/completions", {"prompt": "x", "return_token_ids": True}),
    "echo": ("/v1/completions", {"prompt": "x", "echo": True}),
    "choices": ("/v1/completions", {"prompt": "x", "n": 3}),
    "prompts": ("/v1/completions", {"prompt": ["x", "y"]}),
    "stop": ("/v1/completions", {"prompt": "x", "stop": ["brown"]}),
    "stops of choices": ("/v1/completions", {"prompt": "x", "stop": ["1 says", "fox"], "n": 3}),
    "chat": (CHAT, {"messages": TURN}),
    "chat logprobs": (CHAT, {"messages": TURN, "logprobs": True, "top_logprobs": 1}),
    "chat choices": (CHAT, {"messages": TURN, "n": 2, "stream_options": {"include_usage": True}}),
    "messages": ("/v1/messages", {"messages": TURN}),
    "responses": ("/v1/responses", {"input": "hi"}),
}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Parts that went the short way."""
    parts: list[bytes] = []
    write = DirectBody.write

    def noted(self: DirectBody, part: bytes) -> None:
        parts.append(part)
        write(self, part)

    monkeypatch.setattr(DirectBody, "write", noted)
    return parts


@pytest.fixture(scope="module")
def slowly() -> Iterator[Any]:
    """A server whose engine gives a token every two milliseconds: the consumer waits for each."""
    engine = StubEngine()
    engine.delay_s = 0.002
    with serving(engine) as server:
        yield server


def raw(url: str, path: str, body: dict[str, Any]) -> str:
    """A stream's body, without what changes from request to request."""
    named = {"model": "m", "stream": True, **body}
    named.setdefault("max_output_tokens" if path == "/v1/responses" else "max_tokens", 70)
    response = httpx.post(url + path, json=named, headers={"x-request-id": "the-same"}, timeout=30)
    assert response.status_code == 200, response.text
    text = response.text
    return re.sub(r'"(created|created_at|completed_at)":[0-9.]+|(msg|resp)_?[0-9a-f]{8,}', "", text)


@pytest.mark.parametrize("case", CASES)
def test_both_ways_write_the_same_bytes(slowly: Any, written: list[bytes], monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    path, body = CASES[case]
    short = raw(slowly.url, path, body)
    taken, joined = len(written), b"".join(written).decode("utf-8", "replace")
    assert (taken > 5) == (case != "prompts"), "several prompts are merged, which is the long way"
    assert "[DONE]" not in joined
    monkeypatch.setattr(sse, "direct_body", lambda scope: None)
    assert raw(slowly.url, path, body) == short
    assert len(written) == taken


def test_a_reader_that_stops_gets_everything_in_order_once_it_reads(written: list[bytes]) -> None:
    engine = StubEngine(lambda submit, choice: b"".join(b"%07d," % i for i in range(20_000)), context=200_000, pool=200_000)
    engine.per_output = 4_000
    engine.delay_s = 0.001
    with serving(engine) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.connect((server.host, server.port))
        body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 160_000, "stream": True, "return_token_ids": True}).encode()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.5)
        received = b""
        while piece := sock.recv(65_536):
            received += piece
    plain = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", received)
    text = "".join(json.loads(line)["choices"][0]["text"] for line in re.findall(rb"data: (\{.*\})", plain))
    assert text == "".join(f"{i:07d}," for i in range(20_000))
    assert 0 < len(written) < 40, "some went the short way, and none while the buffer was full"


def test_a_failure_on_the_short_way_is_an_error_event() -> None:
    class Broken(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            if token_id == ord("q"):
                raise ValueError("no such token")
            return super().token_bytes(token_id)

    engine = StubEngine()
    engine.delay_s = 0.002
    with serving(engine, tokenizer=Broken()) as server:
        text = httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 90, "stream": True}).text
        assert "[DONE]" not in text and text.count('"error"') == 1
        server.wait_idle()
        assert len(engine.aborted) == 1


async def test_a_sink_gets_outputs_only_in_turn() -> None:
    stream, taken = RequestStream("r", 1, lambda _: None), list[int]()

    def output(token: int, **more: Any) -> Output:
        return Output(request_id="r", choice=0, token_ids=(token,), **more)

    def sink(given: Output) -> bool:
        if given.finish_reason is None and given.token_ids[0] % 2:
            taken.append(given.token_ids[0])
            return True
        return False

    stream.sink = sink
    stream.feed(output(1))  # nobody waits
    assert await stream.next_batch() == [output(1)]
    waiting = asyncio.ensure_future(stream.next_batch())
    await asyncio.sleep(0)
    stream.feed(output(3))
    stream.feed(output(5))
    assert taken == [3, 5] and not waiting.done()
    stream.feed(output(6))  # refused
    stream.feed(output(7))  # behind one that waits
    stream.feed(output(9, finish_reason="stop"))
    assert [one.token_ids[0] for one in await waiting] == [6, 7, 9] and taken == [3, 5]
    assert stream.finished


async def test_a_cancelled_stream_lets_its_sink_go() -> None:
    stream = RequestStream("r", 1, lambda _: None)
    sink: Callable[[Output], bool] = lambda _: True  # noqa: E731
    stream.sink = sink
    stream.cancel()
    assert stream.sink is None
