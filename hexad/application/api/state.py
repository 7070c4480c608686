"""What all handlers share: the engine connection, the tokenizer, the template, and the limits that follow from them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hexad.application.api.admission import Admission
from hexad.application.api.body import BODIES_AT_ONCE, BodyRoom
from hexad.application.api.shared_metrics import SharedMetrics
from hexad.common.config import HexadConfig
from hexad.common.errors import NotFoundError
from hexad.common.metrics import MetricsRegistry
from hexad.orchestration.detokenize import TextTokenizer
from hexad.orchestration.messages import Submit, Welcome
from hexad.orchestration.stream import RequestStream

if TYPE_CHECKING:
    from hexad.application.api.tracing import Tracing

T = TypeVar("T")
TEXT_THREADS = 4


class Engine(Protocol):
    """What the API needs of the engine client; tests bring their own."""

    welcome: Welcome

    @property
    def is_alive(self) -> bool: ...

    def submit(self, submit: Submit) -> RequestStream: ...

    def abort(self, request_id: str, choice: int | None = None) -> None: ...

    async def call(self, method: str, timeout_s: float = 30.0) -> dict[str, float | int | str | None]: ...


class Tokenizer(TextTokenizer, Protocol):
    """Both ways between text and ids. Thread-safe."""

    vocab_size: int

    def encode(self, text: str, add_special_tokens: bool = ...) -> Sequence[int]: ...


class Template(Protocol):
    """Messages to prompt ids. Thread-safe, bounded in time and size; names of control tokens inside messages stay text.

    Raises:
        RequestError: the template refuses the messages, with its own words.
    """

    def encode(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_special_tokens: bool = ..., **options: Any
    ) -> tuple[Sequence[int], str]: ...


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """Immutable references; the parts that change (admission, metrics) look after themselves. Event-loop bound."""

    config: HexadConfig  # resolved
    engine: Engine
    tokenizer: Tokenizer
    template: Template | None  # None: the model has no chat template
    models: tuple[str, ...]  # names the API answers to, the first one is reported
    metrics: MetricsRegistry
    admission: Admission
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # from the model's generation_config.json
    eos_token_ids: tuple[int, ...] = ()
    shared_metrics: SharedMetrics | None = None  # with several API processes
    tracing: Tracing | None = None
    created_s: int = field(default_factory=lambda: int(time.time()))
    text_threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(TEXT_THREADS, "hexad-text"))

    @cached_property
    def bodies(self) -> BodyRoom:
        """Where requests are read."""
        return BodyRoom(BODIES_AT_ONCE * self.config.server.max_body_bytes)

    @property
    def context(self) -> int:
        """Longest sequence, prompt and output, in tokens."""
        return self.engine.welcome.max_len

    @property
    def vocab_size(self) -> int:
        """Ids that stand for text: rows of the embedding beyond the tokenizer's ids are padding."""
        return min(self.tokenizer.vocab_size, self.engine.welcome.vocab_size)

    @property
    def pool(self) -> int:
        """Tokens that one request may keep in the KV memory."""
        return self.engine.welcome.max_request_blocks_tokens

    def resolve_model(self, name: str | None) -> str:
        """The name to report for the model that a request asks for (absent: the first).

        Raises:
            NotFoundError: no such model here.
        """
        if name is None:
            return self.models[0]
        if name not in self.models:
            raise NotFoundError(
                f"there is no model {name[:200]!r} here: this server has {', '.join(self.models)}",
                param="model",
                code="model_not_found",
            )
        return name

    async def in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run text work (templates, tokenising) away from the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.text_threads, work, *args)

    def close(self) -> None:
        self.text_threads.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            self.tracing.close()
