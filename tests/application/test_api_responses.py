"""OpenAI's Responses API: the same answers as chat completions, in another format; nothing is stored."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import openai
import pytest
from api_stub import Running, StubEngine, named_events, serving

HI: dict[str, Any] = {"model": "m", "input": "hi", "max_output_tokens": 12}
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
]


def test_a_response_is_the_chat_answer(http: httpx.Client, server: Running) -> None:
    answer = http.post("/v1/responses", json={**HI, "instructions": "Be short."}).json()
    prompt = server.engine.submitted[-1].prompt
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}]
    chat = http.post("/v1/chat/completions", json={"model": "m", "messages": turns, "max_tokens": 12}).json()
    assert server.engine.submitted[-1].prompt == prompt
    (item,) = answer["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert (answer["object"], answer["status"], answer["store"]) == ("response", "incomplete", False)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    assert answer["usage"]["input_tokens_details"] == chat["usage"]["prompt_tokens_details"]


def test_a_stream_equals_the_whole(http: httpx.Client) -> None:
    whole = http.post("/v1/responses", json=HI).json()
    events = named_events(http.post("/v1/responses", json={**HI, "stream": True}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert list(dict.fromkeys(event["type"] for event in events)) == ORDER
    told = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    last = events[-1]["response"]
    for answer in (whole, last):
        assert answer["output"][0]["content"][0]["text"] == told
    varying = ("id", "created_at", "output")
    assert {k: v for k, v in last.items() if k not in varying} == {k: v for k, v in whole.items() if k not in varying}
    assert len({event["item_id"] for event in events if "item_id" in event} | {last["output"][0]["id"]}) == 1


def test_the_sdk_reads_it(server: Running) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
    turns: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"role": "user", "content": "c"},
    ]
    whole = client.responses.create(model="m", input=turns, max_output_tokens=9)
    assert whole.output_text
    with client.responses.stream(model="m", input=turns, max_output_tokens=9) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    with pytest.raises(openai.BadRequestError, match=r"input\.0\.content\.0"):
        client.responses.create(
            model="m", input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "low"}]}]
        )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": [7]}, "input.0"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.type"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"input": "x" * 3_000}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_token": 3}, "max_output_token"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_b32_mistakes_name_the_field(http: httpx.Client, fields: dict[str, Any], param: str, stream: bool) -> None:
    answer = http.post("/v1/responses", json={**HI, **fields, "stream": stream})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_harmless_fields_pass(http: httpx.Client) -> None:
    extras: dict[str, Any] = {"store": True, "metadata": {}, "tools": [], "text": {"format": {"type": "text"}}, "truncation": "disabled"}
    answer = http.post("/v1/responses", json={**HI, **extras, "reasoning": {"effort": "low"}, "tool_choice": "auto"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-hexad-ignored"] == "reasoning"


def test_a_failure_in_mid_stream_is_an_error_for_the_sdk() -> None:
    engine = StubEngine()
    engine.fail_midway()
    with serving(engine) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.APIError, match="NaN in the logits"):
            list(client.responses.create(model="m", input="x", stream=True))
        server.wait_idle()
