"""`POST /v1/responses`: OpenAI's Responses API over the same engine as chat completions. Text in, text out; nothing is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse

from hexad.application.api import wire
from hexad.application.api.body import read_object
from hexad.application.api.fields import read
from hexad.application.api.generation import News
from hexad.application.api.job import Head, Job
from hexad.application.api.prompts import prompt_of
from hexad.application.api.responses_body import NEUTRAL, ResponsesRequest, to_chat
from hexad.application.api.state import ServerState
from hexad.common.errors import HexadError, RequestError


class Cached(msgspec.Struct, frozen=True):
    cached_tokens: int


class Reasoned(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: Cached
    output_tokens: int
    output_tokens_details: Reasoned
    total_tokens: int

    @classmethod
    def of(cls, usage: wire.Usage) -> Usage:
        cached = Cached(usage.prompt_tokens_details.cached_tokens)
        return cls(usage.prompt_tokens, cached, usage.completion_tokens, Reasoned(), usage.total_tokens)


class OutputText(msgspec.Struct, frozen=True, tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class Item(msgspec.Struct, frozen=True, tag="message"):
    id: str
    status: str
    content: tuple[OutputText, ...]
    role: str = "assistant"


class Answer(msgspec.Struct, kw_only=True):
    """A response, whole or as far as it has come. What is not supported has the value that says so."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    model: str
    output: tuple[Item, ...]
    error: None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    usage: Usage | None = None
    background: bool = False
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: bool = False
    text: dict[str, dict[str, str]] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: str = "none"
    tools: tuple[()] = ()
    truncation: str = "disabled"


async def responses(state: ServerState, http: Request) -> HTTPResponse:
    """One conversation, answered, in the format of OpenAI's Responses API. Nothing is stored."""
    request, ignored = read(await read_object(http, state.bodies), ResponsesRequest, NEUTRAL)
    chat = to_chat(request)

    try:
        job = Job(state, http, chat, ignored)
        return await job.answer(
            "resp", "response", lambda: [prompt_of(state, chat)], lambda head: ResponseWriter(request, head), ResponseEvents
        )
    except RequestError as error:
        ours = {"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input"}.get(error.param or "")
        if ours is None:
            raise
        message = error.message.replace("max_tokens", "max_output_tokens").replace("messages", "input")
        raise type(error)(message, param=ours, code=error.code) from None


class ResponseWriter:
    """The one choice of a request as a response with one message."""

    def __init__(self, request: ResponsesRequest, head: Head) -> None:
        self._request = request
        self._head = head
        self._texts: list[str] = []
        self._cut = False

    def add(self, news: News) -> None:
        self._texts.append(news.delta.text)
        self._cut = news.delta.finish_reason == "length"

    @property
    def status(self) -> str:
        return "incomplete" if self._cut else "completed"

    def text(self) -> OutputText:
        return OutputText("".join(self._texts))

    def item(self, status: str, *content: OutputText) -> Item:
        return Item(f"msg-{self._head.id.removeprefix('resp-')}", status, content)

    def so_far(self, status: str, *output: Item) -> Answer:
        """The response without its outcome."""
        request = self._request
        return Answer(
            id=self._head.id,
            created_at=self._head.created,
            status=status,
            model=self._head.model,
            output=output,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
        )

    def whole(self, usage: wire.Usage) -> Answer:
        answer = self.so_far(self.status, self.item(self.status, self.text()))
        answer.usage = Usage.of(usage)
        answer.incomplete_details = {"reason": "max_output_tokens"} if self._cut else None
        return answer


PLACE: dict[str, Any] = {"output_index": 0, "content_index": 0}  # of the one text of the one item


class ResponseEvents:
    """The events of a stream, numbered."""

    def __init__(self, writer: ResponseWriter, usage: Callable[[], wire.Usage]) -> None:
        self._writer = writer
        self._usage = usage
        self._item_id = writer.item("").id
        self._number = 0

    def _event(self, name: str, **fields: Any) -> bytes:
        self._number += 1
        return wire.named_frame(name, {"sequence_number": self._number - 1, **fields})

    def _begin(self) -> list[bytes]:
        begun = self._writer.so_far("in_progress")
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=self._writer.item("in_progress")),
            self._event("response.content_part.added", item_id=self._item_id, part=OutputText(""), **PLACE),
        ]

    def of(self, batch: Sequence[News]) -> bytes:
        frames = [] if self._number else self._begin()
        for news in batch:
            self._writer.add(news)
            if text := news.delta.text:
                frames.append(self._event("response.output_text.delta", item_id=self._item_id, delta=text, logprobs=(), **PLACE))
        return b"".join(frames)

    def end(self) -> bytes:
        whole, text = self._writer.whole(self._usage()), self._writer.text()
        return b"".join(
            [
                self._event("response.output_text.done", item_id=self._item_id, text=text.text, logprobs=(), **PLACE),
                self._event("response.content_part.done", item_id=self._item_id, part=text, **PLACE),
                self._event("response.output_item.done", output_index=0, item=whole.output[0]),
                self._event(f"response.{whole.status}", response=whole),
            ]
        )

    def error_frame(self, error: HexadError) -> bytes:
        body = error.body()["error"]
        return self._event("error", code=body["code"], message=body["message"], param=body["param"], error=body)
