"""From a configuration to a running engine and the state of a server over it."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hexad.application.api.admission import Admission
from hexad.application.api.shared_metrics import SharedMetrics
from hexad.application.api.state import ServerState
from hexad.application.api.supervisor import SupervisedEngine
from hexad.common.config import HexadConfig
from hexad.common.errors import ConfigError, RequestError
from hexad.common.metrics import MetricsRegistry
from hexad.models import sources
from hexad.models.catalog import read_spec
from hexad.models.formats.files import read_json
from hexad.models.remote.cache import Progress as FetchProgress
from hexad.models.spec import ModelSpec
from hexad.models.template import ChatTemplate
from hexad.models.tokenizer import Tokenizer
from hexad.orchestration.client import EngineClient
from hexad.orchestration.spawn import Progress

if TYPE_CHECKING:
    from hexad.application.api.tracing import Tracing

T = TypeVar("T")
MAX_DESCRIPTORS = 2**20
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class TextSide:
    """What turns text into ids and back, and what the model's files say beside the weights."""

    name: str  # what users call the model
    spec: ModelSpec
    tokenizer: Tokenizer
    template: ChatTemplate | None
    sampling_defaults: dict[str, Any]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        own = self.tokenizer.eos_token_id
        return self.spec.eos_token_ids or ((own,) if own is not None else ())


@dataclass(frozen=True)
class Opened:
    """A server's state with what was said at the start; `close` ends the engine."""

    state: ServerState
    engine: SupervisedEngine
    text: TextSide
    notes: tuple[str, ...]  # how "auto" was decided

    async def close(self) -> None:
        self.state.close()
        await self.engine.close()


async def open_server(
    config: HexadConfig,
    *,
    on_fetch: FetchProgress | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Opened:
    """Fetch the model, start the engine, load the tokenizer meanwhile.

    Raises:
        StartupError: the model or the engine cannot be had; nothing is left behind.
    """
    files = await in_daemon_thread(lambda: sources.fetch(config.model.model, revision=config.model.revision, progress=on_fetch))
    starting = asyncio.ensure_future(EngineClient.start(config, on_progress=on_progress))
    reading = asyncio.ensure_future(in_daemon_thread(lambda: load_text(config, files)))
    try:
        await asyncio.wait({starting, reading}, return_when=asyncio.FIRST_EXCEPTION)
        for task in (reading, starting):  # a mistake in the text files need not wait for the weights
            if task.done():
                task.result()
        client, text = await starting, await reading
    except BaseException:
        await _abandon(starting, reading)
        raise
    engine = SupervisedEngine(client, lambda: EngineClient.start(config), max_deaths=config.server.max_engine_restarts)
    assert client.config is not None
    return Opened(make_state(client.config, engine, text), engine, text, client.notes)


async def _abandon(starting: asyncio.Future[EngineClient], reading: asyncio.Future[TextSide]) -> None:
    """End what has been started."""
    starting.cancel()
    reading.cancel()
    client, _ = await asyncio.gather(starting, reading, return_exceptions=True)
    if isinstance(client, EngineClient):
        await client.close(0.0)


def load_text(config: HexadConfig, files: sources.ModelFiles) -> TextSide:
    """Read tokenizer, template and sampling defaults.

    Raises:
        StartupError: a file is missing or not understood.
    """
    model = config.model
    tokenizer = Tokenizer.from_files(files.path, model.tokenizer)
    template = ChatTemplate.from_files(files.path, model.chat_template)
    if template is not None:
        with contextlib.suppress(RequestError):  # starts the renderer, which the first request would wait for
            template.encode(tokenizer, [{"role": "user", "content": "hi"}])
    return TextSide(
        name=files.display_name,
        spec=read_spec(files.path),
        tokenizer=tokenizer,
        template=template,
        sampling_defaults=sampling_defaults(model.generation_config, files.path),
    )


def sampling_defaults(choice: str, model: Path) -> dict[str, Any]:
    """The sampling values of a generation_config.json: the model's ("auto"), no one's ("none"), or the one in a folder.

    Raises:
        ConfigError: the folder has none.
    """
    if choice == "none":
        return {}
    folder = Path(choice) if choice != "auto" else model if model.is_dir() else model.parent
    found = read_json(folder / "generation_config.json")
    if found is None and choice != "auto":
        raise ConfigError(f"model.generation_config = {choice!r}: no generation_config.json there; use auto, none or a folder that has one")
    values = found or {}
    return {key: values[key] for key in SAMPLING_KEYS if isinstance(values.get(key), int | float)}


def make_state(config: HexadConfig, engine: SupervisedEngine, text: TextSide, *, shared: SharedMetrics | None = None) -> ServerState:
    """A server's state over a running engine. `config` is the resolved one."""
    names = config.model.served_model_name or (text.name,)
    metrics = MetricsRegistry(names[0])
    welcome = engine.welcome
    metrics.set_cache_info(block_size=welcome.block_size, num_blocks=welcome.num_blocks, cache_dtype=config.cache.kv_cache_dtype)
    return ServerState(
        config=config,
        engine=engine,
        tokenizer=text.tokenizer,
        template=text.template,
        models=names,
        metrics=metrics,
        admission=Admission(config.scheduler.max_num_seqs, config.scheduler.max_num_queued_reqs),
        sampling_defaults=text.sampling_defaults,
        eos_token_ids=text.eos_token_ids,
        shared_metrics=shared,
        tracing=make_tracing(config.server.otlp_traces_endpoint),
    )


def make_tracing(endpoint: str | None) -> Tracing | None:
    """Traces to `endpoint`; None without one.

    Raises:
        ConfigError: OpenTelemetry is not installed, or the address is none.
    """
    if endpoint is None:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"server.otlp_traces_endpoint = {endpoint!r}: use a URL such as http://127.0.0.1:4318/v1/traces")
    try:
        from hexad.application.api.tracing import Tracing
    except ImportError:
        raise ConfigError("server.otlp_traces_endpoint needs OpenTelemetry: pip install 'hexad[otel]'") from None
    return Tracing.to(endpoint)


def allow_many_connections() -> None:
    """Raise the soft limit on descriptors, often 1,024, as far as the system lets us: each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that does not keep the process alive: a signal during a download ends it at once."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="hexad-startup", daemon=True).start()
    return await future
