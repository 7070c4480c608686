"""The course of a generation request between its parsed body and its answer, the same for every endpoint that generates."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from hexad.application.api import wire
from hexad.application.api.generation import Envelope, Generation, News, Work
from hexad.application.api.limits import fit, truncate
from hexad.application.api.prompts import Prompt
from hexad.application.api.sampling import sampling_params
from hexad.application.api.schema import ChatRequest, CompletionRequest, StreamOptions
from hexad.application.api.sse import ClientGoneError, EventStream, finish
from hexad.application.api.state import ServerState
from hexad.common.errors import HexadError
from hexad.orchestration.output import Delta

PLACE = "\ufffe"  # stands for a text
L = TypeVar("L")
Caller = Request | WebSocket


@dataclass(frozen=True)
class Head:
    """The fields that every answer and chunk of one request repeats."""

    id: str
    object: str
    created: int
    model: str
    fingerprint: str

    def envelope(self, choices: list[Any], usage: wire.Usage | UnsetType | None, object_: str | None = None) -> wire.Envelope:
        return wire.Envelope(
            id=self.id,
            object=object_ or self.object,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            system_fingerprint=self.fingerprint,
        )


class Writer(Protocol):
    """A whole answer's format."""

    def add(self, news: News) -> None:
        """Take one delta."""
        ...

    def whole(self, usage: wire.Usage) -> msgspec.Struct: ...


class ChunkWriter(Writer, Protocol):
    """An answer's format. Whole answers and chunks are made of the same deltas, so they cannot differ."""

    def chunks(self, news: News) -> Iterable[msgspec.Struct]:
        """Choices of stream chunks for one delta; may be none. A prompt's echo comes with its choice's first one."""
        ...

    def chunk(self, choices: list[Any], usage: wire.Usage | UnsetType | None) -> wire.Envelope: ...

    @property
    def only_text(self) -> bool:
        """Chunks between a choice's first and its last differ in their text alone."""
        ...


class Events(Protocol):
    """A stream's format."""

    def of(self, batch: Sequence[News]) -> bytes:
        """Events for some deltas; may be none."""
        ...

    def end(self) -> bytes:
        """What follows the last delta."""
        ...

    def error_frame(self, error: HexadError) -> bytes:
        """The last event of a stream that fails."""
        ...


class ChunkEvents:
    """OpenAI's: a chunk an event, the usage if it is asked for, and [DONE]."""

    def __init__(self, writer: ChunkWriter, usage: Callable[[], wire.Usage], options: StreamOptions | None) -> None:
        self._writer = writer
        self._usage = usage
        self._with_usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)

        self._around: dict[int, tuple[bytes, bytes]] = {}  # by choice: what stands before and after the text of an ordinary chunk

    def of(self, batch: Sequence[News]) -> bytes:
        return self._event(batch[0]) if len(batch) == 1 else b"".join([self._event(news) for news in batch])

    def _event(self, news: News) -> bytes:
        choice, delta = news
        around = self._around.get(choice.index)
        if around is not None and delta.text and not delta.done:
            return around[0] + wire.encode(delta.text) + around[1]
        frames = self._whole(news)
        if around is None and self._writer.only_text and not self._continuous:
            before, _, after = self._whole(News(choice, Delta(text=PLACE))).rpartition(wire.encode(PLACE))
            self._around[choice.index] = before, after
        return frames

    def _whole(self, news: News) -> bytes:
        usage = self._usage() if self._continuous else None if self._with_usage else UNSET
        return b"".join([wire.frame(self._writer.chunk([choice], usage)) for choice in self._writer.chunks(news)])

    def end(self) -> bytes:
        return (wire.frame(self._writer.chunk([], self._usage())) if self._with_usage else b"") + wire.DONE

    def error_frame(self, error: HexadError) -> bytes:
        return wire.error_frame(error)


W = TypeVar("W", bound=Writer)


@dataclass
class Parts(Generic[L]):
    """What one choice of a whole answer has come to; `L` is a piece of log-probabilities."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[L] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


_count = 0


class Job:
    """One request at an endpoint."""

    def __init__(self, state: ServerState, http: Caller, request: CompletionRequest | ChatRequest, ignored: Iterable[str]) -> None:
        self.state = state
        self.http = http
        self.request = request
        self.ignored = ignored
        self.record: dict[str, Any] = http.scope["state"]["record"]  # of the access log

    def chunk_events(self, writer: ChunkWriter, usage: Callable[[], wire.Usage]) -> ChunkEvents:
        """The stream that the request asks for, for `answer`."""
        return ChunkEvents(writer, usage, self.request.stream_options)

    async def answer(
        self,
        prefix: str,
        object_: str,
        prompts: Callable[[], Sequence[Prompt]],
        writer: Callable[[Head], W],
        events: Callable[[W, Callable[[], wire.Usage]], Events],
    ) -> Response:
        """Admit, tokenise (`prompts` runs in a text thread), check, run. What is wrong with the request is raised before a stream opens.

        Raises:
            HexadError: the request is refused, or failed.
        """
        head = self._head(prefix, object_)
        ticket = self.state.admission.enter()
        try:
            work = self._work(await self.state.in_thread(prompts))
            generation = Generation(self.state, work, self._envelope(), ticket)
            if self.request.stream:
                heartbeat_s = self.state.config.server.heartbeat_s
                stream = events(writer(head), generation.usage)
                headers = ignored_header(self.ignored)
                frames = self._frames(generation, stream)
                return EventStream(
                    frames,
                    ticket,
                    heartbeat_s=heartbeat_s,
                    headers=headers,
                    error_frame=stream.error_frame,
                    attach=lambda lane: generation.attach(lane, stream.of),
                )
            body = await finish(self._whole(generation, writer(head)), self.http.receive, ticket)
        except ClientGoneError:
            ticket.release()
            return Response(status_code=499)  # nobody reads it
        except BaseException:
            ticket.release()
            raise
        ticket.release()
        return Response(body, headers=ignored_header(self.ignored), media_type="application/json")

    def _head(self, prefix: str, object_: str) -> Head:
        """Raises NotFoundError: the model is not served here."""
        model = self.record["model"] = self.state.resolve_model(self.request.model)
        return Head(
            id=f"{prefix}-{self.request.request_id or self._http_id}",
            object=object_,
            created=int(time.time()),
            model=model,
            fingerprint=f"fp_{self.state.engine.welcome.config_hash}",
        )

    @property
    def _http_id(self) -> str:
        return str(self.http.scope["state"]["request_id"])

    def _envelope(self) -> Envelope:
        """The engine's id is unique, whatever ids callers send."""
        global _count
        _count += 1
        request = self.request
        return Envelope(
            request_id=f"{self._http_id}-{_count}",
            priority=request.priority or 0,
            tenant=self.http.scope["state"].get("tenant", ""),
            cache_salt=request.cache_salt or "",
            deadline_s=request.deadline_s,
        )

    def _work(self, prompts: Sequence[Prompt]) -> list[Work]:
        """Sampling options, truncation and the bound on the output for each prompt.

        Raises:
            RequestError: a value out of range, or a prompt that does not fit.
        """
        state, request = self.state, self.request

        def encode(text: str) -> Sequence[int]:
            return state.tokenizer.encode(text, add_special_tokens=False)

        params = sampling_params(request, vocab_size=state.vocab_size, defaults=state.sampling_defaults, encode=encode)
        work = []
        for prompt in prompts:
            ids = truncate(prompt.ids, request.truncate_prompt_tokens, max_tokens=params.max_tokens, context=state.context)
            kept = prompt if len(ids) == len(prompt.ids) else Prompt(ids, None)
            max_tokens = fit(len(ids), params.max_tokens, context=state.context, pool=state.pool)
            work.append(Work(prompt=kept, params=msgspec.structs.replace(params, max_tokens=max_tokens)))
        return work

    async def _whole(self, generation: Generation, writer: Writer) -> bytes:
        batches = generation.batches()
        try:
            async for batch in batches:
                for news in batch:
                    writer.add(news)
        finally:
            await batches.aclose()
            self._note(generation)
        return wire.encode(writer.whole(generation.usage()))

    async def _frames(self, generation: Generation, events: Events) -> AsyncGenerator[bytes, None]:
        batches = generation.batches()
        try:
            async for batch in batches:
                if frames := events.of(batch):
                    yield frames
            yield events.end()
        finally:
            await batches.aclose()
            self._note(generation)

    def _note(self, generation: Generation) -> None:
        """What came of it, for the access record and the trace."""
        self.record.update(_outcome(generation))
        span = self.http.scope["state"].get("span")
        if self.state.tracing is not None and span is not None:
            self.state.tracing.phases(span, generation.arrived_s, generation.runs)


def ignored_header(ignored: Iterable[str]) -> dict[str, str]:
    """Names of request fields without effect, as far as a header can carry them."""
    names = [name[:80] for name in ignored if name.isascii() and name.isprintable()][:20]
    return {"x-hexad-ignored": ", ".join(names)} if names else {}


def _outcome(generation: Generation) -> Mapping[str, Any]:
    usage = generation.usage()
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.prompt_tokens_details.cached_tokens,
        "finish_reason": generation.finish_reason,
    }
