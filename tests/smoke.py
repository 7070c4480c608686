"""Ask a running server one question through the openai client, streamed and not. Usage: smoke.py http://host:port"""

from __future__ import annotations

import sys
import time
import urllib.request

from openai import OpenAI


def wait_ready(address: str, timeout_s: float) -> None:
    """Poll /health/ready until it answers 200."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{address}/health/ready", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"{address} was not ready within {timeout_s:.0f} s")


def main() -> None:
    address = sys.argv[1]
    wait_ready(address, 300)
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = [c.choices[0].delta.content or "" for c in client.chat.completions.create(stream=True, **options) if c.choices]
    print(f"{model}: {whole!r} in {len(chunks)} chunks")
    assert "Paris" in whole, whole
    assert "".join(chunks) == whole, (chunks, whole)


if __name__ == "__main__":
    main()
