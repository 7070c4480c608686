"""Any OpenAI-compatible address as a `Face`. Requests are sent by client processes of their own (`hexad.bench.client`), several when
there are many streams, so that timing is not held up by one event loop; each reports how busy it was."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

import msgspec

from hexad.bench.faces import Prompt, Tick, no_tick
from hexad.bench.records import Record
from hexad.common.errors import ConfigError

STREAMS_PER_CLIENT = 128
BUSY_LIMIT = 0.8  # share of one core above which a client may be what is measured


class HttpFace:
    """Streams from `{base_url}/v1/completions` (or chat/completions with `chat=True`, which then sends text)."""

    def __init__(
        self,
        base_url: str,
        model: str | None,
        vocab_size: int,
        *,
        api_key: str | None = None,
        clients: int | None = None,
        extra_body: dict[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Look at the address.

        Raises:
            ConfigError: it is no web address, nothing answers there, or it serves several models and `model` is None.
        """
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url is {base_url!r}: begin with http:// or https://, as in http://127.0.0.1:8000")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self.model = model or self._only_model()
        self.vocab_size = vocab_size
        self._clients = clients
        self._extra = extra_body or {}
        self._timeout_s = timeout_s
        self._records: list[Record] = []
        self._busy: list[float] = []
        self._max_busy = 0.0

    @property
    def records(self) -> list[Record]:
        return self._records

    def info(self) -> dict[str, Any]:
        return {"face": "http", "address": self.base_url, "served_model": self.model, "client_busy_max": self._max_busy}

    def flags(self) -> list[str]:
        """What may be wrong with the measurement itself."""
        if self._max_busy <= BUSY_LIMIT:
            return []
        return [f"a client process was {self._max_busy:.0%} busy: it may be the bottleneck, use more --clients"]

    def close(self) -> None:
        """Nothing is kept between runs."""

    def run(
        self,
        prompts: Sequence[Prompt],
        output_tokens: int,
        *,
        concurrency: int | None = None,
        duration_s: float | None = None,
        request_rate: float | None = None,
        tick: Tick = no_tick,
    ) -> list[Record]:
        """See `Face.run`."""
        streams = min(concurrency or len(prompts), len(prompts))
        count = min(self._clients or math.ceil(streams / STREAMS_PER_CLIENT), streams)
        self._records = []
        jobs = [
            self._job(prompts[i::count], output_tokens, _share(streams, count, i), count, duration_s, request_rate) for i in range(count)
        ]
        workers = [_Worker(job) for job in jobs]
        begin_s = time.perf_counter() + 0.05
        for worker in workers:
            worker.start(begin_s)
        try:
            while any(worker.alive for worker in workers):
                time.sleep(0.05)
                tick(sum(w.finished for w in workers), sum(w.tokens for w in workers))
        except KeyboardInterrupt:
            for worker in workers:
                worker.interrupt()
            raise
        finally:
            for worker in workers:
                worker.join()
            self._records = [record for worker in workers for record in worker.records]
            self._max_busy = max([self._max_busy, *(w.busy for w in workers)])
        failed = [worker.failure for worker in workers if worker.failure]
        if failed:
            raise ConfigError(f"the load generator failed: {failed[0]}")
        return self._records

    def _job(
        self, prompts: Sequence[Prompt], output_tokens: int, streams: int, count: int, duration_s: float | None, rate: float | None
    ) -> dict[str, Any]:
        return {
            "url": f"{self.base_url}/v1/completions",
            "api_key": self._api_key,
            "body": {
                "model": self.model,
                "max_tokens": output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._extra,
            },
            "prompts": [list(prompt) for prompt in prompts],
            "concurrency": streams,
            "duration_s": duration_s,
            "request_rate": rate / count if rate else None,
            "vocab_size": self.vocab_size,
            "timeout_s": self._timeout_s,
        }

    def _only_model(self) -> str:
        request = urllib.request.Request(f"{self.base_url}/v1/models")
        if self._api_key:
            request.add_header("Authorization", f"Bearer {self._api_key}")
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                names = [entry["id"] for entry in json.load(response)["data"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.base_url}/v1/models does not answer as an OpenAI-compatible server does: {error}") from None
        if len(names) != 1:
            raise ConfigError(f"{self.base_url} serves {len(names)} models ({', '.join(names[:5])}): name one with --served-model-name")
        return str(names[0])


def _share(total: int, parts: int, index: int) -> int:
    """Part `index` of `total` things dealt out to `parts`."""
    return total // parts + (index < total % parts)


class _Worker:
    """One client process and the thread that reads what it says (JSON lines)."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self.finished = self.tokens = 0
        self.busy = 0.0
        self.records: list[Record] = []
        self.failure: str | None = None
        self.alive = True

    def start(self, begin_s: float) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hexad.bench.client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        self._thread = threading.Thread(target=self._read, args=(msgspec.msgpack.encode(self._job | {"begin_s": begin_s}),), daemon=True)
        self._thread.start()

    def interrupt(self) -> None:
        """Ask it to stop and to hand over what it has."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def join(self) -> None:
        self._thread.join(timeout=30)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _read(self, job: bytes) -> None:
        assert self._process.stdin and self._process.stdout and self._process.stderr
        done = False
        try:
            self._process.stdin.write(job)
            self._process.stdin.close()
            for line in self._process.stdout:
                news = msgspec.json.decode(line)
                self.finished, self.tokens = news["finished"], news["tokens"]
                if "records" in news:
                    done, self.busy = True, news["busy"]
                    self.records = msgspec.convert(news["records"], list[Record])
        except (OSError, msgspec.DecodeError) as error:
            self.failure = str(error)
        self._process.wait()
        if not done and self.failure is None:
            lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
            self.failure = lines[-1] if lines else f"exit code {self._process.returncode}"
        self.alive = False
