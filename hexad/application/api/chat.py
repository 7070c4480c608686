"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from hexad.application.api import wire
from hexad.application.api.body import read_object
from hexad.application.api.fields import read
from hexad.application.api.generation import News
from hexad.application.api.job import Caller, Head, Job, Parts
from hexad.application.api.logprobs import chat_logprobs, prompt_logprobs
from hexad.application.api.prompts import prompt_of, turn
from hexad.application.api.schema import ChatRequest
from hexad.application.api.state import ServerState


async def chat_completions(state: ServerState, http: Request) -> Response:
    """One conversation, answered."""
    return await answer_chat(state, http, await read_object(http, state.bodies))


async def answer_chat(state: ServerState, http: Caller, body: dict[str, Any]) -> Response:
    """The answer to one body, whichever way it came."""
    request, ignored = read(body, ChatRequest)
    job = Job(state, http, request, ignored)

    return await job.answer(
        "chatcmpl", "chat.completion", lambda: [prompt_of(state, request)], lambda head: ChatWriter(state, request, head), job.chunk_events
    )


class ChatWriter:
    """The chat format."""

    def __init__(self, state: ServerState, request: ChatRequest, head: Head) -> None:
        self._tokenizer = state.tokenizer
        self._request = request
        self._head = head
        self._parts: dict[int, Parts[wire.TokenLogprob]] = {}
        self._opened: set[int] = set()
        self._prompt_ids: tuple[int, ...] | UnsetType = UNSET
        self._prompt_logprobs: wire.PromptLogprobs | UnsetType = UNSET

    @property
    def only_text(self) -> bool:
        return not self._request.logprobs and not self._request.return_token_ids

    def chunks(self, news: News) -> Iterable[wire.ChatChunkChoice]:
        choice, delta = news
        with_ids = bool(self._request.return_token_ids)
        if choice.index not in self._opened:
            if with_ids and not self._opened:
                self._prompt_ids = choice.run.work.prompt.ids
            self._opened.add(choice.index)
            yield wire.ChatChunkChoice(index=choice.index, delta=wire.ChatDelta(role="assistant", content=self._echo()))
        if delta.text or delta.logprobs or delta.done or (with_ids and delta.token_ids):
            yield wire.ChatChunkChoice(
                index=choice.index,
                delta=wire.ChatDelta(content=delta.text) if delta.text else wire.ChatDelta(),
                logprobs=chat_logprobs(self._tokenizer, delta) if self._request.logprobs and delta.logprobs else None,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason if delta.done else UNSET,
                token_ids=delta.token_ids if with_ids else UNSET,
            )

    def _echo(self) -> str:
        """`echo`: the last message, when the answer continues it or has its role."""
        messages = self._request.messages
        if not self._request.echo or messages[-1].role != "assistant":
            return ""
        return str(turn(messages[-1], len(messages) - 1)["content"])

    def add(self, news: News) -> None:
        choice, delta = news
        parts = self._parts.setdefault(choice.index, Parts())
        parts.texts.append(delta.text)
        parts.token_ids.extend(delta.token_ids)
        if self._request.logprobs:
            parts.logprobs.extend(chat_logprobs(self._tokenizer, delta).content)
        if delta.done:
            parts.finish_reason, parts.stop_reason = delta.finish_reason, delta.stop_reason
            if self._request.return_token_ids:
                self._prompt_ids = choice.run.work.prompt.ids
            if self._request.prompt_logprobs is not None:
                self._prompt_logprobs = prompt_logprobs(self._tokenizer, choice.run.prompt_logprobs)

    def chunk(self, choices: list[wire.ChatChunkChoice], usage: wire.Usage | UnsetType | None) -> wire.Envelope:
        envelope = self._head.envelope(choices, usage, "chat.completion.chunk")
        envelope.prompt_token_ids, self._prompt_ids = self._prompt_ids, UNSET  # on the first chunk only
        return envelope

    def whole(self, usage: wire.Usage) -> wire.Envelope:
        envelope = self._head.envelope([self._choice(index, parts) for index, parts in sorted(self._parts.items())], usage)
        envelope.prompt_token_ids = self._prompt_ids
        envelope.prompt_logprobs = self._prompt_logprobs
        return envelope

    def _choice(self, index: int, parts: Parts[wire.TokenLogprob]) -> wire.ChatChoice:
        return wire.ChatChoice(
            index=index,
            message=wire.ChatMessage(role="assistant", content=self._echo() + "".join(parts.texts)),
            logprobs=wire.ChatLogprobs(parts.logprobs) if self._request.logprobs else None,
            finish_reason=parts.finish_reason,
            stop_reason=parts.stop_reason,
            token_ids=tuple(parts.token_ids) if self._request.return_token_ids else UNSET,
        )
