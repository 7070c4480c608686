"""Usage of streams and of whole answers is one and the same, and counts the tokens that the engine made."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from engine_driver import fresh_seed
from tiny_model import ServerProcess, make_model, served

NUM_PROMPTS = 50


@pytest.fixture(scope="module", params=[(), ("--max-num-batched-tokens", "32", "--max-num-seqs", "16")], ids=["whole", "chunked"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with served(make_model(tmp_path_factory.mktemp("usage")), "--log-level", "warning", *request.param) as process:
        yield process


def streamed(http: httpx.Client, body: dict[str, Any]) -> tuple[dict[int, str], dict[int, list[int]], dict[str, Any], list[dict[str, Any]]]:
    """Texts and ids by choice, the usage, and all chunks."""
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    chunks = []
    with http.stream("POST", "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}) as answer:
        for line in answer.iter_lines():  # splits at U+2028 and its like, which a made-up text may have
            if line.startswith("data: {"):
                chunks.append(json.loads(line[6:]))
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    return texts, ids, chunks[-1]["usage"], chunks


def test_b08_streamed_usage_equals_whole_usage_and_the_ids_made(server: ServerProcess) -> None:
    rng = random.Random(fresh_seed())
    shared = "a prefix that several prompts have in common " * 2
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for _ in range(NUM_PROMPTS):
            prompt = rng.choice(["", shared]) + "x" * rng.randint(1, 60)
            body: dict[str, Any] = {
                "prompt": prompt,
                "max_tokens": rng.randint(1, 40),
                "n": rng.choice([1, 3]),
                "seed": rng.randrange(1000),
            }
            body |= {"temperature": rng.choice([0, 1]), "return_token_ids": True, "stop": rng.choice([None, ["e", "qu"]])}
            whole = http.post("/v1/completions", json=body).json()
            again = http.post("/v1/completions", json=body).json()  # now the prompt is cached
            texts, ids, usage, chunks = streamed(http, body)
            assert {choice["index"]: choice["text"] for choice in whole["choices"]} == texts
            assert {choice["index"]: choice["token_ids"] for choice in whole["choices"]} == ids
            for other in (whole["usage"], again["usage"], usage):
                assert other["prompt_tokens"] == len(prompt)  # a byte a token, counted once
                assert other["completion_tokens"] == sum(map(len, ids.values()))
                assert other["total_tokens"] == other["prompt_tokens"] + other["completion_tokens"]
                assert 0 <= (other.get("prompt_tokens_details") or {}).get("cached_tokens", 0) < len(prompt)
            assert usage.get("prompt_tokens_details") == again["usage"].get("prompt_tokens_details")
            assert chunks[-1]["choices"] == []
            assert all(chunk.get("usage") is None for chunk in chunks[:-1])
