"""Bodies of the Responses API, and what they mean as a chat request. Nothing is stored: a conversation is sent whole each time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hexad.application.api.blocks import text_of
from hexad.application.api.fields import MAX_MESSAGES
from hexad.application.api.schema import AnyRequest, ChatRequest, Message
from hexad.common.errors import RequestError, UnsupportedError

ROLES = ("user", "assistant", "system", "developer")
TYPES = ("input_text", "output_text", "text")


def _plain_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format", {"type": "text"}) == {"type": "text"} and set(value) <= {"format", "verbosity"}


NEUTRAL: Mapping[str, Callable[[Any], bool]] = {  # known here, unsupported; the values that change nothing are accepted
    "background": lambda value: value is False,
    "conversation": lambda value: False,
    "previous_response_id": lambda value: False,
    "prompt": lambda value: False,
    "text": _plain_text,
    "truncation": lambda value: value == "disabled",
    "include": lambda value: value == [],
    "max_tool_calls": lambda value: True,
    "top_logprobs": lambda value: value == 0,
    "stream_options": lambda value: isinstance(value, dict) and set(value) <= {"include_obfuscation"},
}


class ResponsesRequest(AnyRequest):
    """`POST /v1/responses`."""

    input: Any  # a string, or a list of messages
    instructions: str | None = None
    max_output_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


SAME_NAME = tuple(name for name in ResponsesRequest.model_fields if name in ChatRequest.model_fields)


def to_chat(request: ResponsesRequest) -> ChatRequest:
    """The same request in terms of chat completions.

    Raises:
        RequestError: an item or block that is not what the format says.
        UnsupportedError: an item that is no message, or a block that is not text.
    """
    values = {name: getattr(request, name) for name in SAME_NAME}
    return ChatRequest.model_construct(**values, messages=chat_turns(request), max_tokens=request.max_output_tokens)


def chat_turns(request: ResponsesRequest) -> list[Message]:
    """Instructions and input. Raises as `to_chat` does."""
    turns = [Message(role="system", content=request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return [*turns, Message(role="user", content=request.input)]
    if not isinstance(request.input, list) or not request.input:
        raise RequestError("input must be a string or a list of messages, not empty", param="input", code="invalid_type")
    if len(request.input) > MAX_MESSAGES:
        raise RequestError(f"input has {len(request.input):,} entries, the limit is {MAX_MESSAGES:,}: send fewer", param="input")
    return turns + [_turn(item, f"input.{index}") for index, item in enumerate(request.input)]


def _turn(item: Any, param: str) -> Message:
    if not isinstance(item, dict):
        raise RequestError(f"{param} must be an object with role and content", param=param, code="invalid_type")
    kind = item.get("type", "message")
    if kind != "message":
        raise UnsupportedError(f"{param} has type {str(kind)[:40]!r}: this server reads items of type message only", param=f"{param}.type")
    role = item.get("role")
    if role not in ROLES:
        raise RequestError(f"{param}.role is {str(role)[:40]!r}: it must be one of {', '.join(ROLES)}", param=f"{param}.role")
    return Message(role=role, content=text_of(item.get("content"), f"{param}.content", TYPES))
