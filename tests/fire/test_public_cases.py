"""Public bug cases in their wider forms, against whole server processes."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from firing import Bystander, Connection, Watched, generate, get, post
from tiny_model import served

STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HOSTILE = {
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
}


def turn(role: str, content: Any = "x") -> dict[str, Any]:
    return {"role": role, "content": content}


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "fine": ([turn("user")], 200),
    "fine, three turns": ([turn("user"), turn("assistant"), turn("user")], 200),
    "two users": ([turn("user"), turn("user")], 400),
    "system": ([turn("system"), turn("user")], 400),
    "developer": ([turn("developer"), turn("user")], 400),
    "only system": ([turn("system")], 400),
    "assistant first": ([turn("assistant"), turn("user")], 400),
    "assistant last": ([turn("user"), turn("assistant")], 200),
    "system in the middle": ([turn("user"), turn("system"), turn("user")], 400),
    "tool without a call": ([turn("user"), turn("tool")], 200),
    "unknown role": ([turn("bot")], 400),
}


async def test_b30_refusals_of_a_strict_template(tiny: Path, tmp_path: Path) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text(STRICT)
    with served(tiny, "--chat-template", str(template), "--log-level", "error") as process:
        server = Watched(process.url, process.process.pid)
        refused = 0
        for name, (messages, status) in CONVERSATIONS.items():
            for stream in (False, True):
                body = json.dumps({"messages": messages, "max_tokens": 4, "stream": stream}).encode()
                answer = await server.ask(post("/v1/chat/completions", body))
                assert answer.status == status, (name, answer.body)
                assert b"{%" not in answer.body
                assert b"raise_exception" not in answer.body
                if status == 400:
                    refused += 1
                    assert answer.error()["type"] == "invalid_request_error"
                    assert answer.headers["content-type"] == "application/json"
        metrics = (await server.ask(get("/metrics"))).body.decode()
        line = 'hexad:http_requests_total{method="POST",route="/v1/chat/completions",status="400"}'
        assert f"{line} {refused}.0" in metrics


@pytest.mark.parametrize("kind", HOSTILE)
async def test_b33_a_hostile_template_of_the_model_itself(tiny: Path, tmp_path: Path, kind: str) -> None:
    template = tmp_path / "hostile.jinja"
    template.write_text(HOSTILE[kind])
    with served(tiny, "--chat-template", str(template), "--log-level", "error") as process:
        server = Watched(process.url, process.process.pid)
        memory = server.rss_mib()["api"]
        chat = post("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}')
        async with Bystander(process.url, every_s=0.01) as bystander:
            start_s = time.monotonic()
            answers = await asyncio.gather(*(server.ask(chat) for _ in range(3)))
            took_s = time.monotonic() - start_s
        assert [answer.status for answer in answers] == [400] * 3, answers[0].body
        assert took_s < 8  # three, each with a limit of its own, on a busy machine
        assert bystander.complaints == []
        assert bystander.worst_s < 2
        assert server.rss_mib()["api"] < memory + 60


async def test_b60_a_caller_that_does_not_read_does_not_hold_up_the_end(tiny: Path) -> None:
    with served(tiny, "--shutdown-timeout", "1", "--log-level", "error") as process:
        stuck = Connection(process.url)
        reader, writer = await stuck.open()
        reader._transport.pause_reading()
        writer.write(generate(stream=True, max_tokens=1_000, n=16, ignore_eos=True, logprobs=20) * 2)
        await asyncio.sleep(1.5)
        children, start_s = process.children(), time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.process.wait, 20) == 0
        assert time.monotonic() - start_s < 10
        assert children
        stuck.abort()
