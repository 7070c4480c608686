"""The default model, offline and through an engine process: it knows the capital of France, alone or in company."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from hexad import LLM, SamplingParams
from hexad.common.config import DEFAULT_MODEL, HexadConfig
from hexad.engine.plan import TokenSegment
from hexad.orchestration.client import EngineClient
from hexad.orchestration.messages import Output, Submit

QUESTION = "The capital of France is"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SMALL = {"kv_cache_memory_bytes": 2**28, "dtype": "float32", "threads": min(2, os.cpu_count() or 1), "device": "cpu"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEFAULT_MODEL, **SMALL) as llm:
        yield llm


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    (result,) = llm.generate(QUESTION, GREEDY)
    assert result.outputs[0].text.startswith(" Paris")
    (answer,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0.0, max_tokens=20))
    assert "Paris" in answer.outputs[0].text and answer.outputs[0].finish_reason == "stop"


def test_company_changes_nothing(llm: LLM) -> None:
    prompts = [QUESTION, "Two plus two is", "Once upon a time", "def add(a, b):"] * 3
    together = [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts[:4]]
    assert together == alone * 3


def test_engine_process_gives_the_same(llm: LLM) -> None:
    expected = llm.generate(QUESTION, GREEDY)[0]
    values = {"model.dtype": "float32", "cache.kv_cache_memory_bytes": 2**28, "device.device": "cpu", "device.threads": SMALL["threads"]}

    async def run() -> tuple[list[Output], dict[str, float | int | str | None]]:
        client = await EngineClient.start(HexadConfig().with_values({**values, "server.log_level": "error"}))
        try:
            assert client.welcome.dtype == "float32" and client.welcome.vocab_size == 49_152

            def submit(name: str, max_tokens: int) -> Submit:
                params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
                return Submit(request_id=name, prompt=(TokenSegment(tuple(expected.prompt_token_ids)),), params=params, eos_token_ids=(2,))

            leaving = client.submit(submit("leaves", 500))
            await leaving.next_batch()
            await leaving.aclose()
            outputs = [output async for output in client.submit(submit("stays", 8))]
            return outputs, await client.call("stats")
        finally:
            assert await client.close() == 0

    outputs, stats = asyncio.run(run())
    assert [token for output in outputs for token in output.token_ids] == expected.outputs[0].token_ids
    assert stats["num_running"] == stats["num_waiting"] == 0
