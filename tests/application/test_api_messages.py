"""Anthropic's Messages API: the same answers as chat completions, in another format."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest
from api_stub import Running, StubEngine, named_events, serving

HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}


def events(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    return named_events(http.post("/v1/messages", json={**HI, **fields, "stream": True}))


def test_a_message_is_the_chat_answer(http: httpx.Client, server: Running) -> None:
    system = "Be short."
    message = http.post("/v1/messages", json={**HI, "system": system}).json()
    prompt = server.engine.submitted[-1].prompt
    turns = [{"role": "system", "content": system}, *HI["messages"]]
    chat = http.post("/v1/chat/completions", json={**HI, "messages": turns}).json()
    assert server.engine.submitted[-1].prompt == prompt
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (message["type"], message["role"], message["model"], message["stop_reason"]) == ("message", "assistant", "m", "max_tokens")
    assert message["id"].startswith("msg-")
    usage = message["usage"]  # what was read from the cache is not in input_tokens here
    assert usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"] == 12
    count = http.post("/v1/messages/count_tokens", json={"model": "m", "messages": HI["messages"], "system": system}).json()
    assert count == {"input_tokens": chat["usage"]["prompt_tokens"]}


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [({}, "max_tokens", None), ({"stop_sequences": ["says"], "max_tokens": 90}, "stop_sequence", "says")],
)
def test_streams_equal_whole_messages(http: httpx.Client, fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    whole = http.post("/v1/messages", json={**HI, **fields}).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    first, opened, *deltas, closed, last, end = events(http, **fields)
    assert first["message"]["content"] == []
    assert first["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert opened == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {delta["type"] for delta in deltas} == {"content_block_delta"}
    assert "".join(delta["delta"]["text"] for delta in deltas) == whole["content"][0]["text"]
    assert closed == {"type": "content_block_stop", "index": 0}
    assert last["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert last["usage"] == whole["usage"]
    assert end == {"type": "message_stop"}


def prompt_of(http: httpx.Client, server: Running, turns: list[dict[str, Any]], **fields: Any) -> str:
    assert http.post("/v1/messages", json={**HI, "messages": turns, **fields}).status_code == 200
    ids = server.engine.submitted[-1].prompt[0].ids
    return (
        server.tokenizer.decode(ids, skip_special_tokens=False)
        if hasattr(server, "tokenizer")
        else bytes(i for i in ids if i < 256).decode()
    )


def test_turns(http: httpx.Client, server: Running) -> None:
    """Neighbours of one role are one turn, blocks are lines, a last assistant turn is continued."""
    apart = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}]
    assert prompt_of(http, server, apart) == prompt_of(http, server, [{"role": "user", "content": "a\nb\nc"}])
    begun = prompt_of(http, server, [*HI["messages"], {"role": "assistant", "content": "I say"}])
    assert begun.endswith("assistant\nI say")
    cached = [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]
    assert prompt_of(http, server, apart, system=cached) == prompt_of(http, server, apart, system="S")
    assert prompt_of(http, server, apart, system="") == prompt_of(http, server, apart)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "system": "x"}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages.0.content.0.text"),
        ({"system": 7}, "system"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 99}, "stop_sequences"),
        ({"temperature": 9}, "temperature"),
        ({"max_token": 3}, "max_token"),
        ({"model": "other"}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_b32_mistakes_name_the_field_in_the_format(http: httpx.Client, fields: dict[str, Any], param: str, stream: bool) -> None:
    answer = http.post("/v1/messages", json={**HI, **fields, "stream": stream})
    assert answer.status_code in (400, 404), answer.text
    body = answer.json()
    assert body["type"] == "error"
    assert body["error"]["param"] == param
    assert body["error"]["type"] == "invalid_request_error"


def test_harmless_fields_pass(http: httpx.Client) -> None:
    extras = {
        "metadata": {"user_id": "u"},
        "tools": [],
        "thinking": {"type": "disabled"},
        "service_tier": "auto",
        "top_k": 5,
        "temperature": 1.0,
    }
    assert http.post("/v1/messages", json={**HI, **extras}).status_code == 200


def test_b54_the_key_of_either_header(http: httpx.Client) -> None:
    with serving(server__api_key=("k",)) as locked, httpx.Client(base_url=locked.url) as client:
        for headers, status in [
            ({"x-api-key": "k"}, 200),
            ({"authorization": "Bearer k"}, 200),
            ({"authorization": "Bearer k", "x-api-key": "wrong"}, 200),
            ({"authorization": "Bearer wrong", "x-api-key": "k"}, 401),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": ""}, 401),
            ({"x-api-key": "Bearer k"}, 401),
            ({}, 401),
        ]:
            answer = client.post("/v1/messages", json=HI, headers=headers)
            assert answer.status_code == status, headers
            if status == 401:
                assert answer.json()["type"] == "error"
                assert answer.json()["error"]["type"] == "authentication_error"


def test_a_failure_in_mid_stream_is_an_error_event() -> None:
    engine = StubEngine()
    engine.fail_midway()
    with serving(engine) as server, httpx.Client(base_url=server.url) as http:
        text = http.post("/v1/messages", json={**HI, "stream": True}).text
        assert "message_stop" not in text
        if "event: error" in text:
            assert text.count("event: error") == 1
            assert json.loads(text.strip().rpartition("data: ")[2])["error"]["message"] == "NaN in the logits"
        else:  # it failed before the stream had begun
            assert json.loads(text)["type"] == "error"
        server.wait_idle()
