"""Streams say what whole answers say, keep quiet connections alive, and carry errors in band."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx2 as httpx
import openai
import pytest
from api_stub import Running, StubEngine, fresh_seed, serving

from hexad.application.api import wire
from hexad.common.errors import RequestError

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
LINE_ENDS = "\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"  # what `iter_lines` of Python's clients takes for the end of a line, beside \n


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data events of a stream, which must end with [DONE]."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def joined(chunks: list[dict[str, Any]], chat: bool) -> dict[int, dict[str, Any]]:
    """Each choice as its chunks add up to."""
    result: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = result.setdefault(choice["index"], {"text": "", "logprobs": [], "finish": None, "ids": []})
            assert whole["finish"] is None, "a chunk after the end of its choice"
            whole["text"] += (choice["delta"].get("content") or "") if chat else choice["text"]
            if choice["logprobs"]:
                whole["logprobs"] += choice["logprobs"]["content"] if chat else choice["logprobs"]["tokens"]
            whole["finish"] = choice["finish_reason"]
            whole["ids"] += choice.get("token_ids") or []
    return result


VARIANTS: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"stop": ["brown"]},
    {"stop": ["東"], "include_stop_str_in_output": True},
    {"stop": ["ZZZZ"], "logprobs": 2},
    {"stop": ["fox j"], "logprobs": 2, "n": 2},
    {"max_tokens": 16},  # ends inside the parrot
    {"return_token_ids": True},
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("per_output", [1, 7])
def test_b07_b08_streams_equal_whole_answers(http: httpx.Client, server: Running, variant: dict[str, Any], per_output: int) -> None:
    server.engine.per_output = per_output
    for path, chat in (("/v1/chat/completions", True), ("/v1/completions", False)):
        body: dict[str, Any] = {**CHAT, **variant} if chat else {"model": "m", "prompt": "hi", "max_tokens": 60, **variant}
        if chat and "logprobs" in variant:
            body |= {"logprobs": True, "top_logprobs": variant["logprobs"]}
        whole = http.post(path, json=body).json()
        chunks = events(http, path, {**body, "stream_options": {"include_usage": True}})
        parts = joined(chunks, chat)
        assert len(parts) == body.get("n", 1)
        for choice in whole["choices"]:
            part = parts[choice["index"]]
            text = choice["message"]["content"] if chat else choice["text"]
            assert part["text"] == text
            assert part["finish"] == choice["finish_reason"]
            assert part["ids"] == choice.get("token_ids", [])
            if "logprobs" in variant:
                entries = choice["logprobs"]["content"] if chat else choice["logprobs"]["tokens"]
                assert part["logprobs"] == entries
                if chat:
                    _check_entries(entries, text, stopped=choice["finish_reason"] == "stop")
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks[:-1])
        usage = whole["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 2
    server.wait_idle()


def _check_entries(entries: list[dict[str, Any]], text: str, stopped: bool) -> None:
    raw = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert raw.startswith(text.encode()) if stopped else raw == text.encode()
    for entry in entries:
        assert len(entry["top_logprobs"]) == 2
        assert {t["token"]: t["logprob"] for t in entry["top_logprobs"]}[entry["token"]] == entry["logprob"]


def test_b08_usage_only_when_asked_for(http: httpx.Client) -> None:
    chunks = events(http, "/v1/chat/completions", CHAT)
    assert all("usage" not in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)
    continuous = events(http, "/v1/chat/completions", {**CHAT, "stream_options": {"continuous_usage_stats": True}})
    counts = [chunk["usage"]["completion_tokens"] for chunk in continuous]
    assert counts == sorted(counts)
    assert counts[-1] == 60


def test_no_replacement_characters_in_deltas(http: httpx.Client) -> None:
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in events(http, "/v1/chat/completions", CHAT))
    assert "🦜 東京駅" in text
    assert "\ufffd" not in text


def test_first_chunk_has_the_role_once_a_choice(http: httpx.Client) -> None:
    chunks = events(http, "/v1/chat/completions", {**CHAT, "n": 2})
    roles = [choice["index"] for chunk in chunks for choice in chunk["choices"] if "role" in choice["delta"]]
    assert sorted(roles) == [0, 1]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_many_prompts_are_numbered_in_order(http: httpx.Client, server: Running) -> None:
    body = {"model": "m", "prompt": ["a", "bb", "ccc"], "n": 2, "max_tokens": 30}
    whole = http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert [c["text"][:8] for c in whole["choices"]] == ["choice 0", "choice 1"] * 3
    parts = joined(events(http, "/v1/completions", body), False)
    assert {i: p["text"] for i, p in parts.items()} == {c["index"]: c["text"] for c in whole["choices"]}
    assert whole["usage"]["prompt_tokens"] == 6
    assert whole["usage"]["completion_tokens"] == 180
    ids = http.post("/v1/completions", json={**body, "prompt": [[1, 2], [3]]}).json()
    assert ids["usage"]["prompt_tokens"] == 3
    assert http.post("/v1/completions", json={**body, "prompt": [1, 2, 3]}).json()["usage"]["prompt_tokens"] == 3


def test_a_stop_string_ends_the_choice_in_the_engine(http: httpx.Client, server: Running) -> None:
    server.engine.delay_s, before = 0.002, server.engine.made
    try:
        answer = http.post("/v1/completions", json={"model": "m", "prompt": "x", "stop": "says", "max_tokens": 400}).json()
        assert answer["choices"][0]["text"] == "choice 0 "
        assert answer["choices"][0]["stop_reason"] == "says"
        server.wait_idle()
        assert server.engine.made - before < 100
        before = len(server.engine.aborted)
        http.post("/v1/completions", json={"model": "m", "prompt": "x", "stop": "0 says", "max_tokens": 30, "n": 2})
        assert any(entry.endswith("/0") for entry in server.engine.aborted[before:])
    finally:
        server.engine.delay_s = 0


def test_b09_echo_with_logprobs(http: httpx.Client) -> None:
    body = {"model": "m", "prompt": "Is é wet?", "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    assert choice["text"] == "Is é wet?"
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == 10
    logprobs = choice["logprobs"]
    assert [len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [10] * 4
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8]
    one = http.post("/v1/completions", json={**body, "max_tokens": 1}).json()["choices"][0]
    assert len(one["logprobs"]["token_logprobs"]) == 11
    assert one["logprobs"]["text_offset"][-1] == 9
    assert one["text"] == "Is é wet?c"
    assert http.post("/v1/completions", json={**body, "logprobs": None, "max_tokens": 2}).json()["choices"][0]["text"] == "Is é wet?ch"
    for extra in ({"n": 3, "max_tokens": 5}, {"prompt": ["ab", "c"], "max_tokens": 3}, {"prompt": [104, 105]}):
        whole = http.post("/v1/completions", json={**body, **extra}).json()
        parts = joined(events(http, "/v1/completions", {**body, **extra}), False)
        for choice in whole["choices"]:
            assert parts[choice["index"]]["text"] == choice["text"]
            assert parts[choice["index"]]["logprobs"] == choice["logprobs"]["tokens"]


def test_prompt_logprobs(http: httpx.Client) -> None:
    body = {"model": "m", "prompt": "abc", "max_tokens": 1, "prompt_logprobs": 2}
    positions = http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert positions[0] is None
    assert positions[1]["98"] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    assert len(positions) == 3
    chat = http.post("/v1/chat/completions", json={**CHAT, "prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert http.post("/v1/completions", json={**body, "stream": True}).status_code == 400


def test_return_token_ids(http: httpx.Client) -> None:
    body = {**CHAT, "return_token_ids": True, "max_tokens": 5}
    whole = http.post("/v1/chat/completions", json=body).json()
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert whole["choices"][0]["token_ids"] == list(b"choic")
    chunks = events(http, "/v1/chat/completions", body)
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [whole["prompt_token_ids"]]
    text = http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2, "return_token_ids": True}).json()["choices"][0]
    assert (text["prompt_token_ids"], text["token_ids"]) == ([104, 105], [99, 104])


def test_b06_heartbeats_fill_every_gap() -> None:
    engine = StubEngine()
    engine.first_delay_s, engine.delay_s = 3.0, 0.5
    with serving(engine, server__heartbeat_s=0.3) as server:
        body = json.dumps({**CHAT, "max_tokens": 3, "stream": True}).encode()
        with socket.create_connection((server.host, server.port)) as sock:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            sock.sendall(head.encode() + body)
            last_s, received, gaps = time.monotonic(), b"", []
            while piece := sock.recv(65_536):
                gaps.append(time.monotonic() - last_s)
                last_s, received = time.monotonic(), received + piece
        assert received.startswith(b"HTTP/1.1 200")
        assert max(gaps) < 1.5, gaps  # five intervals, half the wait for the first token
        assert received.count(b": heartbeat") >= 5
        assert received.count(b"data: [DONE]") == 1
        engine.first_delay_s = 0.7
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="x")
        stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "cho"
        with httpx.Client(base_url=server.url) as http:
            assert "heartbeat" not in http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2}).text
            engine.first_delay_s, start_s = 8.0, time.monotonic()
            refused = http.post("/v1/chat/completions", json={**CHAT, "stream": True, "temperature": 9})
            assert (refused.status_code, refused.headers["content-type"]) == (400, "application/json")
            assert time.monotonic() - start_s < 6


def test_an_error_after_the_start_is_an_event_and_no_done() -> None:
    engine = StubEngine()
    engine.fail_midway()
    with serving(engine) as server:
        with httpx.Client(base_url=server.url) as http:
            text = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9, "stream": True}).text
            assert '"text":"hi"' in text
            assert "data: [DONE]" not in text
            last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
            assert last["error"]["code"] == "request_failed"
            assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9}).status_code == 500
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.APIError, match="NaN in the logits"):
            list(client.completions.create(model="m", prompt="x", stream=True))
        server.wait_idle()


def test_openai_client(server: Running) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    messages: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    whole = client.chat.completions.create(model="m", messages=messages, max_tokens=40, logprobs=True, top_logprobs=1)
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].logprobs is not None
    assert whole.usage is not None
    stream = client.chat.completions.create(
        model="m", messages=messages, max_tokens=40, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 5}
    )
    text, usage = "", None
    for chunk in stream:
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage == whole.usage
    assert client.completions.create(model="m", prompt="x", max_tokens=5).choices[0].text == "choic"
    assert [model.id for model in client.models.list()] == ["m", "alias"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="m", prompt="x", temperature=3)


def test_an_event_is_one_line_for_every_client() -> None:
    text = "".join(map(chr, range(0x3100))) + "🦜"
    for frame in (wire.frame({"text": text}), wire.error_frame(RequestError(text))):
        line, empty = frame.decode().split("\n", 1)
        assert empty == "\n" and line.splitlines() == [line]
    assert json.loads(wire.encode([text])) == [text]
    assert "東京 é".encode() in wire.encode("東京 é")  # other text is not blown up


def test_random_texts_and_cuts_join_to_the_whole() -> None:
    import random

    rng = random.Random(fresh_seed())
    alphabet = "ab é東🦜\n\u0000" + LINE_ENDS
    engine = StubEngine(context=4096)
    with serving(engine) as server, httpx.Client(base_url=server.url, timeout=20) as http:
        for _ in range(25):
            text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 40)))
            engine.script = lambda submit, choice, text=text: text.encode()  # type: ignore[misc]
            engine.per_output = rng.randrange(1, 9)
            start = rng.randrange(len(text))
            stop = text[start : start + rng.randrange(1, 4)]
            body = {"prompt": "x", "max_tokens": 500, "stop": [stop] if rng.random() < 0.6 else None}
            expected = text[: text.find(stop)] if body["stop"] else text
            whole = http.post("/v1/completions", json=body).json()["choices"][0]
            assert whole["text"] == expected
            assert whole["finish_reason"] == "stop"
            assert joined(events(http, "/v1/completions", body), False)[0]["text"] == expected
