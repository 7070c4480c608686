"""A client process of the load generator: `python -m hexad.bench.client` reads one job (msgpack) and writes JSON lines.

Kept lean, because whatever it spends is measured as the server's: a bare asyncio protocol over httptools, one connection a stream, no
third-party HTTP client; a chunk is time-stamped when its bytes arrive, and decoded with a typed decoder.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import ssl
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from hexad.bench.records import Record


class Job(msgspec.Struct):
    """What to send; see `httpface._job`. `begin_s` is on the clock of `time.perf_counter`, which processes of one machine share."""

    url: str
    body: dict[str, Any]
    prompts: list[list[int]]
    concurrency: int
    vocab_size: int
    begin_s: float
    api_key: str | None = None
    duration_s: float | None = None
    request_rate: float | None = None
    timeout_s: float = 600.0


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Stream(asyncio.Protocol):
    """One kept-alive connection. One request at a time."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.closed = False
        self._record: Record | None = None
        self._done: asyncio.Future[None] | None = None
        self._parser: Any = None
        self._pending = b""
        self._status = 0
        self._usage: _Usage | None = None
        self._answered = False  # a byte of the current answer has come
        self._asked = 0
        self.stale = False  # a kept-alive connection that the server closed before the latest request reached it
        self.tokens = 0  # chunks seen, for progress

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.stale = self._asked > 1 and not self._answered and self._record is not None
        self._finish(f"the connection was closed: {exc}" if exc else "the connection was closed")

    def data_received(self, data: bytes) -> None:
        self._now, self._answered = time.perf_counter(), True
        if self._parser is None:  # bytes that nobody asked for
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"not HTTP: {error}")

    # Called by the parser.

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._pending += body
        if self._status != 200:
            return
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        if self._status and self._status != 200:
            self._finish(f"HTTP {self._status}: {self._pending[:300].decode(errors='replace')}")
        else:
            self._finish(None)

    def _event(self, data: bytes) -> None:
        record = self._record
        if record is None or data == b"[DONE]":
            return
        chunk = _decode(data)
        if chunk.error is not None:
            self._finish(f"error in the stream: {json.dumps(chunk.error)[:300]}")
            return
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.choices and chunk.choices[0].text is not None and not (chunk.choices[0].text == "" and chunk.choices[0].finish_reason):
            record.events_s.append(self._now)
            self.tokens += 1

    async def ask(self, head: bytes, body: bytes, record: Record, timeout_s: float) -> None:
        """Send one request and wait for its end; the outcome is in `record`."""
        self._record, self._usage, self._pending, self._status = record, None, b"", 0
        self._answered, self._asked = False, self._asked + 1
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        record.start_s = time.perf_counter()
        self.transport.write(head + str(len(body)).encode() + b"\r\n\r\n" + body)
        try:
            await asyncio.wait_for(self._done, timeout_s)
        except TimeoutError:
            record.error = f"no end after {timeout_s:.0f} s"
            self.transport.close()

    def _finish(self, error: str | None) -> None:
        record = self._record
        if record is None or self._done is None or self._done.done():
            return
        record.end_s = time.perf_counter()
        record.error = error
        record.output_tokens = self._usage.completion_tokens if self._usage else len(record.events_s)
        details = (self._usage.prompt_tokens_details if self._usage else None) or {}
        record.cached_tokens = int(details.get("cached_tokens") or 0)
        self._record = None
        self._done.set_result(None)


class Client:
    """Sends the prompts of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.records: list[Record] = []
        self.finished = 0
        self._streams: list[_Stream] = []
        self._sent = 0
        parts = urlsplit(job.url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        key = f"Authorization: Bearer {job.api_key}\r\n" if job.api_key else ""
        self._head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nAccept: text/event-stream\r\n"
            f"{key}Content-Length: "
        ).encode()
        fixed = msgspec.json.encode(job.body)
        self._body_start = fixed[:-1] + b',"prompt":'
        self._bodies = [msgspec.json.encode(prompt) for prompt in job.prompts] if job.duration_s is None else []

    @property
    def tokens(self) -> int:
        return sum(stream.tokens for stream in self._streams)

    async def run(self) -> None:
        """Send everything; returns when the last answer is there, or the time is over."""
        job = self.job
        await asyncio.sleep(max(0.0, job.begin_s - time.perf_counter()))
        if job.request_rate:
            tasks = await self._open_loop(job.request_rate)
        else:
            tasks = [asyncio.create_task(self._slot()) for _ in range(job.concurrency)]
        if job.duration_s is not None:
            await asyncio.wait(tasks, timeout=job.duration_s)
            self.stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """Cut what is running."""
        self._sent = sys.maxsize
        for stream in self._streams:
            stream._record = None  # what is unfinished stays without an end
            if stream._done is not None and not stream._done.done():
                stream._done.set_result(None)
            if stream.transport is not None:
                stream.transport.abort()

    async def _open_loop(self, rate: float) -> list[asyncio.Task[None]]:
        generator, tasks = random.Random(0), []
        gate = asyncio.Semaphore(self.job.concurrency)
        end = time.perf_counter() + (self.job.duration_s or float("inf"))
        idle: list[_Stream] = []

        async def one(index: int) -> None:
            async with gate:
                stream = idle.pop() if idle else None
                stream = await self._send(stream, index)
                idle.append(stream)

        while self._more() and time.perf_counter() < end:
            tasks.append(asyncio.create_task(one(self._take())))
            await asyncio.sleep(generator.expovariate(rate))
        return tasks

    async def _slot(self) -> None:
        stream: _Stream | None = None
        while self._more():
            stream = await self._send(stream, self._take())

    def _more(self) -> bool:
        return self._sent < (sys.maxsize if self.job.duration_s is not None else len(self.job.prompts))

    def _take(self) -> int:
        self._sent += 1
        return self._sent - 1

    async def _send(self, stream: _Stream | None, index: int) -> _Stream:
        prompt = self.job.prompts[index % len(self.job.prompts)]
        record = Record(len(prompt), time.perf_counter())
        self.records.append(record)
        try:
            if stream is None or stream.closed:
                stream = await self._connect()
            await self._ask(stream, index, record)
            if stream.stale:  # as any HTTP client does: once more, on a connection of its own
                stream, record.end_s, record.error = await self._connect(), 0.0, None
                await self._ask(stream, index, record)
        except OSError as error:
            record.error = f"{self._host}:{self._port}: {error}"
            await asyncio.sleep(0.1)
            stream = stream or _Stream()
            stream.closed = True
        self.finished += 1
        return stream

    async def _connect(self) -> _Stream:
        _, stream = await asyncio.get_running_loop().create_connection(_Stream, self._host, self._port, ssl=self._tls)
        self._streams.append(stream)
        return stream

    async def _ask(self, stream: _Stream, index: int, record: Record) -> None:
        await stream.ask(self._head, self._body_start + self._prompt(index) + b"}", record, self.job.timeout_s)

    def _prompt(self, index: int) -> bytes:
        if index < len(self._bodies):
            return self._bodies[index]
        prompt, low = list(self.job.prompts[index % len(self.job.prompts)]), min(1_000, self.job.vocab_size // 4)
        prompt[0] = low + (prompt[0] + index * 7919) % (self.job.vocab_size - low)  # never the same prompt twice
        return msgspec.json.encode(prompt)


def _say(client: Client, **more: Any) -> None:
    line = msgspec.json.encode({"finished": client.finished, "tokens": client.tokens, **more})
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


async def _main() -> None:
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    client = Client(job)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, client.stop)
    task = asyncio.create_task(client.run())
    start, busy = max(time.perf_counter(), job.begin_s), time.process_time()
    while not task.done():
        await asyncio.wait([task], timeout=0.25)
        _say(client)
    task.result()
    share = (time.process_time() - busy) / max(time.perf_counter() - start, 1e-9)
    _say(client, records=client.records, busy=share)


if __name__ == "__main__":
    asyncio.run(_main())
