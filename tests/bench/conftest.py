"""A server with known timing, and a face with known records: what the measuring tools say of them can be checked."""

import asyncio
import contextlib
import json
import threading

import pytest

from hexad.bench.records import Record


class TimedServer:
    """An OpenAI-compatible completions endpoint that waits `ttft_s`, then sends a token each `itl_s`.

    With `leave`, it closes a connection when the second request on it arrives, without a word, as servers close idle connections.
    """

    def __init__(self, ttft_s=0.05, itl_s=0.01, models=("stub",), fail_after=None, leave=False):
        self.leave = leave
        self.ttft_s, self.itl_s, self.models, self.fail_after = ttft_s, itl_s, models, fail_after
        self.requests = []
        self.live = self.most_live = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(5)
        self.url = f"http://127.0.0.1:{self.port}"

    def _run(self):
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, reader, writer):
        try:
            while await self._one(reader, writer):
                if self.leave:
                    await reader.readuntil(b"\r\n\r\n")
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is gone
                writer.close()

    async def _one(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        if head.startswith(b"GET"):
            return await self._plain(writer, 200, {"data": [{"id": name} for name in self.models]})
        self.requests.append(body)
        if self.fail_after is not None and len(self.requests) > self.fail_after:
            return await self._plain(writer, 503, {"error": {"message": "busy"}})
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        try:
            await self._stream(writer, body)
        finally:
            self.live -= 1
        return True

    async def _plain(self, writer, status, value):
        text = json.dumps(value).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
        await writer.drain()
        return True

    async def _stream(self, writer, body):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(self.ttft_s)
        for index in range(body["max_tokens"]):
            if index:
                await asyncio.sleep(self.itl_s)
            last = index == body["max_tokens"] - 1
            self._send(writer, json.dumps({"choices": [{"text": "x", "finish_reason": "length" if last else None}]}))
            await writer.drain()
        self._send(writer, json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}))
        self._send(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    @staticmethod
    def _send(writer, text):
        event = f"data: {text}\n\n".encode()
        half = len(event) // 2  # events that arrive in pieces must be joined
        for part in (event[:half], event[half:]):
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


@pytest.fixture
def timed_server():
    made = []

    def make(**options):
        made.append(TimedServer(**options))
        return made[-1]

    yield make
    for server in made:
        server.close()


class ScriptedFace:
    """Answers every prompt with fixed timing, without time passing; `calls` lists (prompts, output tokens, keyword arguments)."""

    def __init__(self, ttft_s=0.1, itl_s=0.01, fail=None, interrupt_at=None):
        self.vocab_size = 1000
        self.ttft_s, self.itl_s, self.fail, self.interrupt_at = ttft_s, itl_s, fail, interrupt_at
        self.calls = []
        self.records = []

    def run(self, prompts, output_tokens, **more):
        self.calls.append((prompts, output_tokens, more))
        self.records = []
        for index, prompt in enumerate(prompts):
            if self.interrupt_at is not None and len(self.calls) == self.interrupt_at and index == len(prompts) // 2:
                raise KeyboardInterrupt
            events = [self.ttft_s + step * self.itl_s for step in range(output_tokens)]
            error = self.fail if index == 0 else None
            self.records.append(Record(len(prompt), 0.0, events, output_tokens, events[-1], error))
        return self.records

    def info(self):
        return {"face": "scripted", "device": "scripted"}

    def close(self):
        pass


@pytest.fixture
def scripted_face():
    return ScriptedFace
