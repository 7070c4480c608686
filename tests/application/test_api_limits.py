"""B11: what does not fit is refused with the true numbers, nothing is dropped unless asked for, and the default output is what remains."""

from __future__ import annotations

import time
from typing import Any

import httpx2 as httpx
import pytest
from api_stub import Running, StubEngine, serving

from hexad.application.api.limits import fit, truncate
from hexad.common.errors import ContextLengthError, NeverFitsError, RequestError


def ask(http: httpx.Client, tokens: int, **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"model": "m", "prompt": [65] * tokens, **fields})


def test_b11_too_long_is_refused_with_the_numbers(http: httpx.Client) -> None:
    for stream in (False, True):
        start_s = time.monotonic()
        error = ask(http, 1012, max_tokens=16, stream=stream)
        assert time.monotonic() - start_s < 5
        assert error.status_code == 400
        body = error.json()["error"]
        assert body["code"] == "context_length_exceeded"
        for number in ("1,012", "512", "16"):
            assert number in body["message"]


def test_b11_around_the_limit(http: httpx.Client) -> None:
    over = ask(http, 510, max_tokens=16)
    assert over.status_code == 400
    assert over.json()["error"]["param"] == "max_tokens"
    assert "at most 2" in over.json()["error"]["message"]
    clamped = ask(http, 510).json()
    assert clamped["choices"][0]["finish_reason"] == "length"
    assert clamped["usage"]["completion_tokens"] == 2
    assert clamped["usage"]["total_tokens"] == 512
    assert ask(http, 512).status_code == 400
    assert ask(http, 512, max_tokens=0).status_code == 200
    assert ask(http, 511, max_tokens=1).status_code == 200
    assert ask(http, 1, max_tokens=511).json()["usage"]["total_tokens"] == 512


def test_b11_chat_counts_what_tokenize_counts(http: httpx.Client, server: Running) -> None:
    messages = [{"role": "system", "content": "The code word is MANGO-41."}, {"role": "user", "content": "x" * 300}]
    count = http.post("/tokenize", json={"messages": messages}).json()["count"]
    usage = http.post("/v1/chat/completions", json={"messages": messages}).json()["usage"]
    assert usage["prompt_tokens"] == count
    assert usage["total_tokens"] <= 512
    ids = server.engine.submitted[-1].prompt[0].ids
    assert b"MANGO-41" in bytes(i for i in ids if i < 256)


def test_truncation_only_when_asked_for(http: httpx.Client, server: Running) -> None:
    assert ask(http, 600, max_tokens=2, truncate_prompt_tokens=10).json()["usage"]["prompt_tokens"] == 10
    assert ask(http, 600, max_tokens=12, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == 500
    assert ask(http, 5, max_tokens=2, truncate_prompt_tokens=10).json()["usage"]["prompt_tokens"] == 5
    http.post("/v1/completions", json={"prompt": "abcdef", "max_tokens": 1, "truncate_prompt_tokens": 3})
    assert server.engine.submitted[-1].prompt[0].ids == tuple(b"def")
    for bad in (0, -2, 513):
        assert ask(http, 5, truncate_prompt_tokens=bad).json()["error"]["param"] == "truncate_prompt_tokens"


def test_what_the_whole_pool_cannot_hold() -> None:
    with serving(StubEngine(pool=64)) as server, httpx.Client(base_url=server.url) as http:
        error = ask(http, 60, max_tokens=10)
        assert error.status_code == 400
        assert error.json()["error"]["code"] == "kv_cache_exceeded"
        assert ask(http, 60).json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("prompt", [0, 1, 9, 10, 11])
@pytest.mark.parametrize("output", [None, 0, 1, 9, 10, 2**31 - 1])
@pytest.mark.parametrize("pool", [5, 10, 20])
def test_fit_never_exceeds_and_refuses_only_what_must_be(prompt: int, output: int | None, pool: int) -> None:
    limit = min(10, pool)
    fits = prompt > 0 and prompt + (1 if output is None else output) <= limit
    if fits:
        allowed = fit(prompt, output, context=10, pool=pool)
        assert prompt + allowed <= limit
        assert allowed == (limit - prompt if output is None else output)
    else:
        with pytest.raises(RequestError) as caught:
            fit(prompt, output, context=10, pool=pool)
        if prompt and prompt + (1 if output is None else output) > 10:
            assert isinstance(caught.value, ContextLengthError)
        elif prompt:
            assert isinstance(caught.value, NeverFitsError)


def test_truncate_keeps_the_end() -> None:
    ids = tuple(range(20))
    assert truncate(ids, None, max_tokens=1, context=10) == ids
    assert truncate(ids, 3, max_tokens=1, context=10) == (17, 18, 19)
    assert truncate(ids, -1, max_tokens=None, context=10) == ids[-9:]
    assert truncate(ids, -1, max_tokens=50, context=10) == ids[-1:]
