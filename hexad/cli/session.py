"""A conversation partner for `chat` and `run`: a server elsewhere, or one of this process's own on loopback. One way to talk to both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx

from hexad.cli.settings import Settings
from hexad.common.config import HexadConfig
from hexad.common.errors import HexadError, StartupError

CONNECT_TIMEOUT_S = 5.0
Message = Mapping[str, str]


@dataclass
class Figures:
    """What one answer took."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    first_s: float = 0.0  # to the first text
    total_s: float = 0.0
    finish_reason: str = ""

    def __str__(self) -> str:
        decode_s = self.total_s - self.first_s
        speed = f", {(self.tokens - 1) / decode_s:.1f} tokens/s" if self.tokens > 1 and decode_s > 0 else ""
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        return (
            f"prompt {self.prompt_tokens} tokens{cached}, answer {self.tokens} tokens in {self.total_s:.2f} s: "
            f"first text after {self.first_s:.2f} s{speed}; ended by {self.finish_reason or 'you'}"
        )


class Talker:
    """A client of one server. Not thread-safe."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        """Asks the server for its models.

        Raises:
            StartupError: nobody answers, or not in our way.
        """
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S))
        self.figures = Figures()
        try:
            answer = self._http.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
            _raise_for(answer.status_code, answer.read())
            self.model = model or str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise StartupError(f"{url}: no OpenAI-compatible server answers there ({type(error).__name__}): check --url") from None

    def chat(self, messages: Sequence[Message], **fields: Any) -> Generator[str, None, None]:
        """Text of the answer, piece by piece; `figures` are filled in as it goes. Closing the iterator stops the server's work."""
        return self._stream("/v1/chat/completions", {"messages": list(messages), **fields})

    def complete(self, prompt: str, **fields: Any) -> Generator[str, None, None]:
        """Likewise, for a text to continue."""
        return self._stream("/v1/completions", {"prompt": prompt, **fields})

    def _stream(self, path: str, fields: Mapping[str, Any]) -> Generator[str, None, None]:
        given = {key: value for key, value in fields.items() if value is not None}
        body = {"model": self.model, **given, "stream": True, "stream_options": {"include_usage": True}}
        figures = self.figures = Figures()
        start_s = time.monotonic()
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    _raise_for(response.status_code, response.read())
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        text = _take(json.loads(line[6:]), figures)
                        if text:
                            figures.first_s = figures.first_s or time.monotonic() - start_s
                            yield text
        except httpx.HTTPError as error:
            raise HexadError(f"the server stopped answering: {error}") from None
        finally:
            figures.total_s = time.monotonic() - start_s

    def close(self) -> None:
        self._http.close()


def _take(chunk: Mapping[str, Any], figures: Figures) -> str:
    """The text of one chunk; notes usage and how it ended."""
    if "error" in chunk:
        raise HexadError(chunk["error"]["message"])
    if chunk.get("usage"):
        usage = chunk["usage"]
        figures.prompt_tokens, figures.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        figures.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    text = ""
    for choice in chunk.get("choices", ()):
        figures.finish_reason = choice.get("finish_reason") or figures.finish_reason
        text += (choice.get("delta") or {}).get("content") or choice.get("text") or ""
    return text


def _raise_for(status: int, body: bytes) -> None:
    if status == 200:
        return
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"the server answered with status {status}"
    raise HexadError(str(message))


@contextlib.contextmanager
def talker(settings: Settings, url: str | None, model: str | None) -> Iterator[Talker]:
    """Somebody to talk to: the server at `url`, or one started here for as long as the block lasts.

    Raises:
        StartupError: it cannot be reached, or not be started.
    """
    with contextlib.ExitStack() as stack:
        if url is None:
            server = stack.enter_context(own_server(settings))
            found = Talker(server.url, server.key, None)
        else:
            keys = settings.config.server.api_key
            found = Talker(url, keys[0] if keys else None, model)
        stack.callback(found.close)
        yield found


@dataclass(frozen=True)
class OwnServer:
    url: str
    key: str


@contextlib.contextmanager
def own_server(settings: Settings) -> Iterator[OwnServer]:
    """A server on loopback in a thread of this process, with a key that nobody else knows."""
    from hexad.common import log

    key = secrets.token_hex(16)
    quiet = {} if "server.log_level" in settings.origins else {"server.log_level": "warning"}
    config = settings.config.with_values({"server.host": "127.0.0.1", "server.port": 0, "server.api_key": (key,), **quiet})
    log.set_up(config.server.log_level, config.server.log_format, process="api")
    thread = _ServerThread(config)
    thread.start()
    try:
        yield OwnServer(thread.wait(), key)
    finally:
        thread.end()


class _ServerThread(threading.Thread):
    """Runs a server until `end`."""

    def __init__(self, config: HexadConfig) -> None:
        super().__init__(name="hexad-server", daemon=True)
        self._config = config
        self._ready = threading.Event()
        self._url = ""
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: asyncio.Event | None = None

    def wait(self) -> str:
        """The address, once it listens; raises what the start raised."""
        while not self._ready.wait(0.1):  # a plain wait could not be interrupted from the keyboard
            pass
        if self._error is not None:
            raise self._error
        return self._url

    def end(self) -> None:
        if self._loop is not None and self._asked is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._asked.set)
        self.join(10.0)

    def run(self) -> None:
        from hexad.cli.runtime import run_async

        try:
            run_async(self._main())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        from hexad.application.api.service import Server, bind, listen, url_of, uvicorn_config
        from hexad.application.api.startup import open_server
        from hexad.cli.progress import FetchBar

        self._loop, self._asked = asyncio.get_running_loop(), asyncio.Event()
        with bind(self._config.server) as sock, FetchBar() as bar:
            starting = asyncio.ensure_future(open_server(self._config, on_fetch=bar.update))
            stopping = asyncio.ensure_future(self._asked.wait())
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return
            opened = starting.result()
            listen(sock, self._config.server)
            server = Server(uvicorn_config(opened.state, self._config.server))
            serving = asyncio.ensure_future(server.serve(sockets=[sock]))
            while not server.started:
                await asyncio.sleep(0.005)
            self._url = url_of(sock, self._config.server)
            self._ready.set()
            await stopping
            server.should_exit = server.force_exit = True
            await serving
            await opened.close()
