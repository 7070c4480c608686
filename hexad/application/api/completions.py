"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from hexad.application.api import wire
from hexad.application.api.body import read_object
from hexad.application.api.fields import read
from hexad.application.api.generation import Choice, News
from hexad.application.api.job import Caller, Head, Job, Parts
from hexad.application.api.logprobs import LegacyLogprobs, join_legacy, prompt_logprobs
from hexad.application.api.prompts import Prompt, read_prompts
from hexad.application.api.schema import CompletionRequest
from hexad.application.api.state import ServerState
from hexad.common.errors import RequestError

MAX_CHOICES = 1_024


async def completions(state: ServerState, http: Request) -> Response:
    """One or many prompts, continued."""
    return await answer_completion(state, http, await read_object(http, state.bodies))


async def answer_completion(state: ServerState, http: Caller, body: dict[str, Any]) -> Response:
    """The answer to one body, whichever way it came."""
    request, ignored = read(body, CompletionRequest)
    job = Job(state, http, request, ignored)

    def prompts() -> list[Prompt]:
        found = read_prompts(state, request.prompt, request.add_special_tokens is not False, whole=request.truncate_prompt_tokens is None)
        if len(found) * (request.n or 1) > MAX_CHOICES:
            raise RequestError(f"{len(found)} prompts with n {request.n} are more than {MAX_CHOICES} choices: send fewer", param="n")
        return found

    return await job.answer("cmpl", "text_completion", prompts, lambda head: CompletionWriter(state, request, head), job.chunk_events)


class CompletionWriter:
    """The completions format."""

    def __init__(self, state: ServerState, request: CompletionRequest, head: Head) -> None:
        self._tokenizer = state.tokenizer
        self._request = request
        self._head = head
        self._logprobs: dict[int, LegacyLogprobs] = {}
        self._parts: dict[int, Parts[wire.CompletionLogprobs]] = {}
        self._prompts: dict[int, tuple[Prompt, wire.PromptLogprobs | UnsetType]] = {}

    @property
    def only_text(self) -> bool:
        return self._request.logprobs is None and not self._request.return_token_ids

    def chunks(self, news: News) -> Iterable[wire.CompletionChoice]:
        choice, delta = news
        opens = choice.index not in self._logprobs
        text, logprobs = self._open(choice) if opens else ("", [])
        text += delta.text
        if self._request.logprobs is not None and delta.logprobs:
            logprobs.append(self._logprobs[choice.index].delta(delta))
        with_ids = bool(self._request.return_token_ids)
        if text or logprobs or delta.done or (with_ids and (delta.token_ids or opens)):
            yield wire.CompletionChoice(
                index=choice.index,
                text=text,
                logprobs=join_legacy(logprobs) if logprobs else None,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason if delta.done else UNSET,
                token_ids=delta.token_ids if with_ids else UNSET,
                prompt_token_ids=choice.run.work.prompt.ids if with_ids and opens else UNSET,
            )

    def _open(self, choice: Choice) -> tuple[str, list[wire.CompletionLogprobs]]:
        """What precedes a choice's own text: the echoed prompt."""
        legacy = self._logprobs[choice.index] = LegacyLogprobs(self._tokenizer)
        prompt, request = choice.run.work.prompt, self._request
        if not request.echo:
            return "", []
        text = prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.ids, skip_special_tokens=False)
        if request.logprobs is None:
            legacy.skip(text)
            return text, []
        return text, [legacy.prompt(prompt.ids, text, choice.run.prompt_logprobs)]

    def add(self, news: News) -> None:
        choice, delta = news
        parts = self._parts.setdefault(choice.index, Parts())
        for piece in self.chunks(news):
            parts.texts.append(piece.text)
            if piece.logprobs is not None:
                parts.logprobs.append(piece.logprobs)
        parts.token_ids.extend(delta.token_ids)
        if delta.done:
            parts.finish_reason, parts.stop_reason = delta.finish_reason, delta.stop_reason
            entries = choice.run.prompt_logprobs
            wanted = self._request.prompt_logprobs is not None
            self._prompts[choice.index] = (choice.run.work.prompt, prompt_logprobs(self._tokenizer, entries) if wanted else UNSET)

    def chunk(self, choices: list[wire.CompletionChoice], usage: wire.Usage | UnsetType | None) -> wire.Envelope:
        return self._head.envelope(choices, usage)

    def whole(self, usage: wire.Usage) -> wire.Envelope:
        return self._head.envelope([self._choice(index, parts) for index, parts in sorted(self._parts.items())], usage)

    def _choice(self, index: int, parts: Parts[wire.CompletionLogprobs]) -> wire.CompletionChoice:
        prompt, entries = self._prompts[index]
        with_ids = bool(self._request.return_token_ids)
        return wire.CompletionChoice(
            index=index,
            text="".join(parts.texts),
            logprobs=join_legacy(parts.logprobs) if self._request.logprobs is not None else None,
            finish_reason=parts.finish_reason,
            stop_reason=parts.stop_reason,
            token_ids=tuple(parts.token_ids) if with_ids else UNSET,
            prompt_token_ids=prompt.ids if with_ids else UNSET,
            prompt_logprobs=entries,
        )
