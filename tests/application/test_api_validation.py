"""What is wrong with a request is a 400 in OpenAI's form that names the field, before any stream opens; what is harmless passes."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2 as httpx
import pytest
from api_stub import ChatML, Running, StubEngine, serving

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi", "max_tokens": 4}


def post_raw(http: httpx.Client, path: str, body: bytes) -> httpx.Response:
    return http.post(path, content=body, headers={"content-type": "application/json"})


def check_error(response: httpx.Response, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if code is not None:
        assert error["code"] == code, error
    if param is not None:
        assert error["param"] == param, error
    return error


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"prompt": "\xe9"}', b'{"prompt": "\\ud800", "model": "m"}', b"[" * 100_000],
)
def test_malformed_bodies(http: httpx.Client, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        check_error(post_raw(http, path, body), 400, "malformed_body")


NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
INTEGERS = ["max_tokens", "n", "top_k", "min_tokens", "seed", "prompt_logprobs", "logprobs", "truncate_prompt_tokens"]
WILD = ["-1e9", "1e308", "-1e308", "NaN", "Infinity", "-Infinity", "1e400", '"0"', "true", "[]", "{}"]


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", WILD)
def test_numbers_survive_anything(http: httpx.Client, field: str, value: str) -> None:
    body = json.dumps({k: v for k, v in TEXT.items() if k != field})[:-1] + f', "{field}": {value}}}'
    check_error(post_raw(http, "/v1/completions", body.encode()), 400, param=field)


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [*WILD, "1.5", str(-(2**63) - 1), str(2**64), "9" * 5000])
def test_integers_survive_anything(http: httpx.Client, field: str, value: str) -> None:
    body = json.dumps({k: v for k, v in TEXT.items() if k != field})[:-1] + f', "{field}": {value}}}'
    check_error(post_raw(http, "/v1/completions", body.encode()), 400, param=field if len(value) < 5000 else None)


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", 2**31), ("max_tokens", 2**63), ("n", 0), ("n", 17), ("top_p", 0), ("top_k", -2)]
)
def test_values_out_of_range(http: httpx.Client, field: str, value: float) -> None:
    check_error(http.post("/v1/completions", json={**TEXT, field: value}), 400, param=field)


def test_b13_small_temperature_and_top_p_pass(http: httpx.Client) -> None:
    for values in (
        {"temperature": 1e-300},
        {"temperature": 1e-8},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 10**6},
        {"min_p": 1},
        {"temperature": 2},
    ):
        assert http.post("/v1/completions", json={**TEXT, **values}).status_code == 200, values


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("topk", "top_k"),
        ("maxTokens", "max_tokens"),
        ("stops", "stop"),
        ("tool", "tools"),
    ],
)
def test_misspelt_fields_are_named(http: httpx.Client, wrong: str, right: str) -> None:
    error = check_error(http.post("/v1/completions", json={**TEXT, wrong: 1}), 400, "unknown_field", wrong)
    assert repr(right) in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {"structured_outputs": {"regex": "a"}},
        {"guided_json": {}},
        {"guided_regex": "a"},
        {"suffix": "x"},
        {"use_beam_search": True},
        {"modalities": ["audio"]},
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_known_fields_that_are_not_supported(http: httpx.Client, fields: dict[str, Any], stream: bool) -> None:
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        check_error(http.post(path, json={**body, **fields, "stream": stream}), 400, "unsupported", next(iter(fields)))


def test_best_of(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={**TEXT, "n": 2, "best_of": 2}).status_code == 200
    check_error(http.post("/v1/completions", json={**TEXT, "n": 1, "best_of": 2}), 400, "unsupported", "best_of")
    check_error(http.post("/v1/completions", json={**TEXT, "n": 2, "best_of": 1}), 400, "invalid_value", "best_of")


def test_b32_harmless_extras_pass_and_are_named(http: httpx.Client) -> None:
    body = {
        **CHAT,
        "messages": [{"role": "user", "content": "hi", "id": 7, "trace": {"span": "a1"}}],
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "user": "u",
        "reasoning_effort": "low",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "tools": None,
        "stop": None,
        "x_unknown": 1,
    }
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    ignored = response.headers["x-hexad-ignored"].split(", ")
    assert "x_unknown" in ignored
    assert "reasoning_effort" in ignored
    assert "store" not in ignored
    assert "stop" not in ignored
    plain = http.post("/v1/chat/completions", json=CHAT)
    assert "x-hexad-ignored" not in plain.headers
    assert plain.json()["choices"] == response.json()["choices"]


def test_b32_table_of_edges(http: httpx.Client) -> None:
    chat = "/v1/chat/completions"
    assert http.post(chat, json={**CHAT, "stop": []}).status_code == 200
    check_error(http.post(chat, json={**CHAT, "stop": [""]}), 400, param="stop")
    check_error(http.post(chat, json={**CHAT, "stop": ""}), 400, param="stop")
    assert http.post(chat, json={**CHAT, "stop": list("abcde")}).status_code == 200
    check_error(http.post(chat, json={**CHAT, "stop": ["a"] * 17}), 400, param="stop")
    check_error(http.post(chat, json={**CHAT, "stop": [1]}), 400, param="stop")
    check_error(http.post(chat, json={**CHAT, "top_logprobs": 2}), 400, param="top_logprobs")
    check_error(http.post(chat, json={**CHAT, "logprobs": True, "top_logprobs": 21}), 400, param="top_logprobs")
    check_error(http.post(chat, json={**CHAT, "stream_options": {"include_usage": True}}), 400, param="stream_options")
    check_error(http.post(chat, json={**CHAT, "stream": "yes"}), 400, param="stream")
    check_error(
        http.post(chat, json={**CHAT, "stream": True, "stream_options": {"include_usage": 1}}), 400, param="stream_options.include_usage"
    )
    both = http.post(chat, json={**CHAT, "max_tokens": 9, "max_completion_tokens": 3}).json()
    assert both["usage"]["completion_tokens"] == 3
    check_error(http.post(chat, json={**CHAT, "max_completion_tokens": -1}), 400, param="max_completion_tokens")
    check_error(http.post(chat, json={**CHAT, "min_tokens": 9}), 400, param="min_tokens")


@pytest.mark.parametrize("field", ["logit_bias"])
@pytest.mark.parametrize(
    "value", [{"99999999": 5, "10": -100}, {"-1": 1}, {"abc": 1}, {"1.5": 1}, {"²": 1}, {"1": 101}, {"1": None}, {"1": 1e9}, {"260": 1}, []]
)
def test_b14_logit_bias_outside_is_refused(http: httpx.Client, field: str, value: Any) -> None:
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        error = check_error(http.post(path, json={**body, field: value}), 400)
        assert (error["param"] or "").startswith("logit_bias")


def test_b14_logit_bias_nan(http: httpx.Client) -> None:
    check_error(post_raw(http, "/v1/completions", b'{"model":"m","prompt":"x","logit_bias":{"1":NaN}}'), 400, param="logit_bias")


def test_b14_valid_bias_reaches_the_engine(http: httpx.Client, server: Running) -> None:
    for value, expected in (({"10": -100, "259": 100}, {10: -100, 259: 100}), ({}, {}), (None, {})):
        assert http.post("/v1/completions", json={**TEXT, "logit_bias": value}).status_code == 200
        assert server.engine.submitted[-1].params.logit_bias == expected
    for field in ("stop_token_ids", "allowed_token_ids"):
        for bad in ([260], [-1], [2**63], ["1"], "x", [True]):
            error = check_error(http.post("/v1/completions", json={**TEXT, field: bad}), 400)
            assert error["param"].startswith(field)


@pytest.mark.parametrize("prompt", [None, [], {}, 7, [None], ["a", 1], [[1], "a"], [[]], [260], [-1], [2**70], [1.5], [True], ""])
def test_prompts_that_are_none(http: httpx.Client, prompt: Any) -> None:
    check_error(http.post("/v1/completions", json={**TEXT, "prompt": prompt}), 400, param="prompt")


def test_too_many_prompts_or_choices(http: httpx.Client) -> None:
    check_error(http.post("/v1/completions", json={**TEXT, "prompt": ["a"] * 257}), 400, param="prompt")
    check_error(http.post("/v1/completions", json={**TEXT, "prompt": ["a"] * 200, "n": 16}), 400, param="n")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "bot", "content": "x"}], "messages.0.role"),
        ([{"role": 1, "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0.content.0"),
        ([{"role": "user", "content": ["x"]}], "messages.0.content.0"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
def test_messages_that_are_wrong(http: httpx.Client, messages: Any, param: str) -> None:
    for stream in (True, False):
        check_error(http.post("/v1/chat/completions", json={**CHAT, "messages": messages, "stream": stream}), 400, param=param)


def test_b30_refusal_of_the_template_is_a_400() -> None:
    with serving(template=ChatML(alternate=True)) as server, httpx.Client(base_url=server.url) as http:
        body = {**CHAT, "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
        for stream in (False, True):
            error = check_error(http.post("/v1/chat/completions", json={**body, "stream": stream}), 400)
            assert error["type"] == "invalid_request_error"
            assert "alternate" in error["message"]
            assert "{%" not in error["message"]


def test_b33_templates_of_requests_are_refused(http: httpx.Client) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    check_error(http.post("/v1/chat/completions", json={**CHAT, "chat_template": loop}), 400, "unsupported", "chat_template")
    for name in ("chat_template", "messages", "tools", "__class__"):
        check_error(http.post("/v1/chat/completions", json={**CHAT, "chat_template_kwargs": {name: loop}}), 400, "unsupported")
    assert http.post("/v1/chat/completions", json={**CHAT, "chat_template_kwargs": {"enable_thinking": False}}).status_code == 200


def test_continue_final_message(http: httpx.Client, server: Running) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The"}], "continue_final_message": True}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    ids = server.engine.submitted[-1].prompt[0].ids
    assert bytes(ids[-3:]) == b"The"
    check_error(http.post("/v1/chat/completions", json={**body, "add_generation_prompt": True}), 400, param="continue_final_message")
    check_error(http.post("/v1/chat/completions", json={**CHAT, "continue_final_message": True}), 400, param="continue_final_message")


def test_models_and_routes(http: httpx.Client) -> None:
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["m", "alias"]
    assert http.get("/v1/models/alias").json()["id"] == "alias"
    check_error(http.get("/v1/models/nobody"), 404, "model_not_found", "model")
    check_error(http.post("/v1/completions", json={**TEXT, "model": "nobody"}), 404, "model_not_found", "model")
    assert http.post("/v1/completions", json={**TEXT, "model": "alias"}).json()["model"] == "alias"
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).json()["model"] == "m"
    check_error(http.get("/nowhere"), 404, "not_found")
    check_error(http.get("/v1/completions"), 405, "method_not_allowed")
    check_error(http.post("/v1/models"), 405, "method_not_allowed")
    assert http.get("/v1/completions").headers["allow"] == "POST"
    assert http.head("/health").status_code == 200


def test_bodies_that_are_too_large() -> None:
    with serving(server__max_body_bytes=1_000) as server, httpx.Client(base_url=server.url) as http:
        check_error(http.post("/v1/completions", json={**TEXT, "prompt": "x" * 2_000}), 413, "payload_too_large")

        def pieces() -> Any:
            for _ in range(20):
                yield b" " * 100

        check_error(http.post("/v1/completions", content=pieces()), 413, "payload_too_large")
        assert http.post("/v1/completions", json=TEXT).status_code == 200


def test_request_ids(http: httpx.Client) -> None:
    given = http.get("/version", headers={"x-request-id": "a.b-C_1"})
    assert given.headers["x-request-id"] == "a.b-C_1"
    for bad in ("a b", "x" * 129, "ä".encode(), ""):
        made = http.get("/version", headers={"x-request-id": bad}).headers["x-request-id"]
        assert made != bad
        assert len(made) == 32
    answer = http.post("/v1/completions", json={**TEXT, "request_id": "mine"}, headers={"x-request-id": "outer"})
    assert answer.json()["id"] == "cmpl-mine"
    assert answer.headers["x-request-id"] == "outer"
    twice = [http.post("/v1/completions", json=TEXT, headers={"x-request-id": "same"}).status_code for _ in range(2)]
    assert twice == [200, 200]


def test_tokenize_and_detokenize(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"model": "m", "prompt": "hé", "return_token_strs": True}).json()
    assert answer == {"count": 3, "max_model_len": 512, "tokens": [104, 195, 169], "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa9"]}
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hé"}
    chat = http.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    usage = http.post("/v1/chat/completions", json=CHAT).json()["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    check_error(http.post("/tokenize", json={}), 400)
    check_error(http.post("/tokenize", json={"prompt": "a", "messages": CHAT["messages"]}), 400)
    check_error(http.post("/detokenize", json={"tokens": [260]}), 400, param="tokens")
    check_error(http.post("/detokenize", json={"tokens": ["a"]}), 400)


def test_engine_refusals_are_plain_http_errors() -> None:
    from hexad.orchestration.messages import Output

    engine = StubEngine()
    with serving(engine) as server, httpx.Client(base_url=server.url) as http:
        for code, status in (("overloaded", 503), ("kv_cache_exceeded", 400), ("request_failed", 500), ("deadline_exceeded", 504)):
            engine.refuse = Output(request_id="", choice=0, error="no", error_code=code)
            for stream in (False, True):
                for n in (1, 2):
                    check_error(http.post("/v1/completions", json={**TEXT, "stream": stream, "n": n}), status, code)
        engine.refuse = None
        engine.is_alive = False
        check_error(http.post("/v1/completions", json=TEXT), 503, "engine_dead")
        check_error(http.get("/health"), 503, "engine_dead")
        assert http.get("/health/live").status_code == 200


def test_unforeseen_errors_do_not_leak(http: httpx.Client, server: Running, caplog: pytest.LogCaptureFixture) -> None:
    script, server.engine.script = server.engine.script, None
    submit, server.engine.submit = server.engine.submit, lambda _: 1 / 0
    try:
        for stream in (False, True):
            error = check_error(http.post("/v1/completions", json={**TEXT, "stream": stream}), 500, "internal_error")
            assert "zero" not in error["message"]
    finally:
        server.engine.script, server.engine.submit = script, submit
    assert http.post("/v1/completions", json=TEXT).status_code == 200


def test_openapi_lists_every_route_and_field(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health/ready", "/metrics"} <= set(paths)
    schema = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "top_k", "stream_options", "max_completion_tokens"} <= set(schema["properties"])
    assert "$ref" not in json.dumps(schema)
    for path, operations in paths.items():
        for operation in operations.values():
            declared = [parameter["name"] for parameter in operation.get("parameters", []) if parameter["in"] == "path"]
            assert declared == re.findall(r"{(\w+)}", path)
