"""The openai and anthropic packages, LangChain, LlamaIndex and simonw's llm: whole answers, streams, errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

HI: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def client(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=120)


def test_openai_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="hexad", messages=HI, max_tokens=8, temperature=0)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="hexad", messages=HI, max_tokens=8, temperature=0, **options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_completions_logprobs_and_models(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="hexad", prompt="The capital of France is", max_tokens=3, logprobs=2, echo=True, temperature=0)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].text.startswith("The capital of France is")
    assert [model.id for model in client.models.list()] == ["hexad"]
    assert client.models.retrieve("hexad").id == "hexad"
    chat = client.chat.completions.create(model="hexad", messages=HI, max_tokens=3, logprobs=True, top_logprobs=3, n=2)
    assert len(chat.choices) == 2
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content or []) == 3
    raw = client.chat.completions.with_raw_response.create(model="hexad", messages=HI, max_tokens=1, extra_headers={"x-request-id": "mine"})
    assert raw.headers["x-request-id"] == "mine"


def test_openai_errors(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="hexad", messages=HI, temperature=9)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=HI)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="hexad", prompt="word " * 20_000)


def test_openai_responses(client: openai.OpenAI) -> None:
    options: Any = {"model": "hexad", "input": HI, "instructions": "Be brief.", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**options)
    assert "Paris" in whole.output_text
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    events = list(client.responses.create(**options, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    with pytest.raises(openai.BadRequestError, match="max_output_tokens"):
        client.responses.create(**{**options, "max_output_tokens": -1})


def test_openai_leaving_a_stream(client: openai.OpenAI) -> None:
    for _ in range(3):
        with client.chat.completions.create(model="hexad", messages=HI, max_tokens=500, stream=True) as stream:
            next(iter(stream))


async def _ask_async(url: str, key: str) -> str:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key=key) as client:
        answer = await client.chat.completions.create(model="hexad", messages=HI, max_tokens=8, temperature=0)
        return answer.choices[0].message.content or ""


def test_openai_async(url: str, key: str) -> None:
    import asyncio

    assert "Paris" in asyncio.run(_ask_async(url, key))


def test_anthropic(url: str, key: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=120)
    options: Any = {"model": "hexad", "system": "Be brief.", "messages": HI, "max_tokens": 8, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**options)
    assert "Paris" in whole.content[0].text
    assert whole.stop_reason in ("end_turn", "max_tokens")
    count = client.messages.count_tokens(model="hexad", system="Be brief.", messages=HI)
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == count.input_tokens
    with client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**{**options, "extra_body": {"temperature": 9}})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**options, "model": "another"})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(**options)


def test_langchain(url: str, key: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    options: dict[str, Any] = {"base_url": url + "/v1", "api_key": key, "model": "hexad", "temperature": 0, "max_tokens": 8}
    chat = ChatOpenAI(**options)
    answer = chat.invoke([("system", "Be brief."), ("user", "What is the capital of France?")])
    assert "Paris" in str(answer.content)
    assert answer.usage_metadata is not None
    assert "".join(str(chunk.content) for chunk in chat.stream("What is the capital of France?"))
    assert len(chat.batch(["Say yes.", "Say no."])) == 2
    assert "Paris" in OpenAI(**options).invoke("The capital of France is")


def test_llama_index(url: str, key: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    options: dict[str, Any] = {"model": "hexad", "api_base": url + "/v1", "api_key": key, "temperature": 0, "max_tokens": 8}
    chat = OpenAILike(**options, is_chat_model=True)
    assert "Paris" in str(chat.chat([ChatMessage(role="user", content="What is the capital of France?")]))
    assert [piece.delta for piece in chat.stream_chat([ChatMessage(role="user", content="Say yes.")])]
    assert "Paris" in str(OpenAILike(**options, is_chat_model=False).complete("The capital of France is"))


@pytest.mark.parametrize("flags", [[], ["--no-stream"]])
def test_simonw_llm(url: str, key: str, tmp_path: Path, flags: list[str]) -> None:
    config = f"- model_id: hexad\n  model_name: hexad\n  api_base: {url}/v1\n  api_key_name: hexad\n"
    (tmp_path / "extra-openai-models.yaml").write_text(config)
    (tmp_path / "keys.json").write_text(f'{{"hexad": "{key}"}}')
    command = [sys.executable, "-m", "llm", "-m", "hexad", "-o", "max_tokens", "8", "-o", "temperature", "0", *flags]
    env = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    done = subprocess.run([*command, "What is the capital of France?"], capture_output=True, text=True, env=env, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
