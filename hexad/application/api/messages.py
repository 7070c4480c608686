"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API over the same engine as chat completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hexad.application.api import wire
from hexad.application.api.body import read_object
from hexad.application.api.fields import read
from hexad.application.api.generation import News
from hexad.application.api.health import json_response
from hexad.application.api.job import Head, Job, ignored_header
from hexad.application.api.messages_body import NEUTRAL, CountRequest, MessagesRequest, chat_turns, to_chat
from hexad.application.api.prompts import Prompt, chat_prompt, prompt_of
from hexad.application.api.state import ServerState
from hexad.common.errors import HexadError, RequestError
from hexad.orchestration.output import Delta


class Usage(msgspec.Struct, frozen=True):
    """Here the three kinds of input tokens exclude each other."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, usage: wire.Usage) -> Usage:
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(usage.prompt_tokens - cached, usage.completion_tokens, cached)


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    text: str


class Answer(msgspec.Struct, kw_only=True):
    """A whole message, or one that begins."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: Usage


async def messages(state: ServerState, http: Request) -> Response:
    """One conversation, answered, in the format of Anthropic's Messages API."""
    request, ignored = read(await read_object(http, state.bodies), MessagesRequest, NEUTRAL)
    chat = to_chat(request)
    job = Job(state, http, chat, ignored)

    try:
        return await job.answer("msg", "message", lambda: [prompt_of(state, chat)], MessageWriter, MessageEvents)
    except RequestError as error:
        if error.param != "stop":
            raise
        raise type(error)(error.message.replace("stop", "stop_sequences", 1), param="stop_sequences", code=error.code) from None


async def count_tokens(state: ServerState, http: Request) -> Response:
    """How many tokens the messages are, in the format of Anthropic's Messages API."""
    request, ignored = read(await read_object(http, state.bodies), CountRequest, NEUTRAL)
    state.resolve_model(request.model)
    turns = chat_turns(request)

    def prompt() -> Prompt:
        return chat_prompt(
            state,
            turns,
            add_generation_prompt=None,
            continue_final_message=turns[-1].role == "assistant",
            variables=request.chat_template_kwargs,
            add_special_tokens=None,
            whole=False,
        )

    response = json_response({"input_tokens": len((await state.in_thread(prompt)).ids)})
    response.headers.update(ignored_header(ignored))
    return response


def stop_of(delta: Delta) -> tuple[str | None, str | None]:
    """(stop_reason, stop_sequence) of the last delta."""
    if delta.finish_reason == "length":
        return "max_tokens", None
    if isinstance(delta.stop_reason, str):
        return "stop_sequence", delta.stop_reason
    return ("end_turn", None) if delta.finish_reason == "stop" else (None, None)


class MessageWriter:
    """The one choice of a request as a message."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._texts: list[str] = []
        self.stop: tuple[str | None, str | None] = (None, None)

    def add(self, news: News) -> None:
        self._texts.append(news.delta.text)
        if news.delta.done:
            self.stop = stop_of(news.delta)

    def begin(self, usage: wire.Usage) -> Answer:
        """The message before its first text."""
        return Answer(id=self._head.id, model=self._head.model, content=[], usage=Usage.of(usage))

    def whole(self, usage: wire.Usage) -> Answer:
        answer = self.begin(usage)
        answer.content = [TextBlock("".join(self._texts))]
        answer.stop_reason, answer.stop_sequence = self.stop
        return answer


class MessageEvents:
    """The events of a stream: the message begins, one block of text, what ended it, the end."""

    def __init__(self, writer: MessageWriter, usage: Callable[[], wire.Usage]) -> None:
        self._writer = writer
        self._usage = usage
        self._begun = False

    def of(self, batch: Sequence[News]) -> bytes:
        frames = [] if self._begun else self._begin()
        for news in batch:
            self._writer.add(news)
            if news.delta.text:
                frames.append(
                    wire.named_frame("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": news.delta.text}})
                )
        return b"".join(frames)

    def _begin(self) -> list[bytes]:
        self._begun = True
        return [
            wire.named_frame("message_start", {"message": self._writer.begin(self._usage())}),
            wire.named_frame("content_block_start", {"index": 0, "content_block": TextBlock("")}),
        ]

    def end(self) -> bytes:
        reason, sequence = self._writer.stop
        stopped = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": Usage.of(self._usage())}
        return (
            wire.named_frame("content_block_stop", {"index": 0})
            + wire.named_frame("message_delta", stopped)
            + wire.named_frame("message_stop", {})
        )

    def error_frame(self, error: HexadError) -> bytes:
        return wire.named_frame("error", error.body())
