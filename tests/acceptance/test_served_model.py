"""The default model behind `hexad serve`, asked through the `openai` client."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from engine_driver import fresh_seed
from load import load, resident_bytes, wait_idle
from tiny_model import ServerProcess, served

from hexad.common.config import DEFAULT_MODEL
from hexad.common.errors import ModelError
from hexad.models.sources import fetch

EMOJI = "🦜🚀 東京駅"
MODEL = "tiny"  # the name under which the helper serves


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    try:
        fetch(DEFAULT_MODEL)
    except ModelError as error:
        pytest.fail(f"the default model is not here and cannot be fetched: {error}")
    flags = (
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--kv-cache-memory-bytes",
        "256MiB",
        "--max-model-len",
        "2048",
        "--log-level",
        "warning",
    )
    with served(Path(DEFAULT_MODEL), *flags, "--log-level", "warning") as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=120, max_retries=0)


def chat(client: openai.OpenAI, question: str, **options: Any) -> tuple[str, str, Any]:
    """The answer whole, the same streamed and joined, and the usage of both."""
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0, **options}
    whole = client.chat.completions.create(**asked)
    pieces, usage = [], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert len(pieces) > 2
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    return whole.choices[0].message.content or "", "".join(pieces), whole.usage


def test_b08_the_capital_of_france_streamed_and_not(client: openai.OpenAI) -> None:
    whole, joined, usage = chat(client, "What is the capital of France?", max_tokens=32)
    assert "Paris" in whole
    assert joined == whole
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_b02_long_characters_are_whole(client: openai.OpenAI, server: ServerProcess) -> None:
    whole, joined, _ = chat(client, f"Repeat this exactly, nothing else: {EMOJI}", max_tokens=40)
    assert joined == whole
    assert "\ufffd" not in joined[:-1]  # the limit on tokens may cut the last character
    for stream in (False, True):
        answer = client.completions.create(model=MODEL, prompt=EMOJI, max_tokens=1, echo=True, temperature=0, stream=stream)
        chunks = answer if stream else [answer]
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        assert text.startswith(EMOJI)
    with httpx.Client(base_url=server.url) as http:
        ids = http.post("/tokenize", json={"prompt": EMOJI}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == EMOJI


def test_b36_a_real_model_under_load(server: ServerProcess) -> None:
    rng = random.Random(fresh_seed())
    prompts = ["Once upon a time", "The three laws are", "def add(a, b):", "1, 2, 3,"]
    options = {"in_flight": 8, "patience_s": 1.0, "tokens": 4}
    load(server, rng, prompts, count=12, **options)
    wait_idle(server)
    before = resident_bytes(server)
    outcome = load(server, rng, prompts, count=45, **options)
    assert outcome.num_complete == 30
    assert outcome.num_gone > 5
    state = wait_idle(server)
    assert (state["num_running"], state["num_waiting"], state["kv_usage"], state["server_load"]) == (0, 0, 0, 0)
    assert resident_bytes(server) - before < 64 * 2**20
    assert all(len(texts) == 1 for texts in outcome.answers.values())
