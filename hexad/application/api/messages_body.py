"""Bodies of the Messages API (Anthropic's format), and what they mean as a chat request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from hexad.application.api.blocks import text_of
from hexad.application.api.fields import MAX_MESSAGES
from hexad.application.api.schema import AnyRequest, ChatRequest, Message
from hexad.common.errors import RequestError

ROLES = ("user", "assistant")
TYPES = ("text",)
NEUTRAL: Mapping[str, Callable[[Any], bool]] = {  # known here, unsupported; the values that change nothing are accepted
    "thinking": lambda value: isinstance(value, dict) and value.get("type") == "disabled",
    "mcp_servers": lambda value: value == [],
    "container": lambda value: False,
    "output_config": lambda value: value == {},
    "output_format": lambda value: False,
}


class Turn(BaseModel):
    """One turn; content is a string or a list of blocks of type text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: str
    content: Any


class CountRequest(BaseModel):
    """`POST /v1/messages/count_tokens`."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    messages: list[Turn]
    system: Any = None  # a string or a list of blocks of type text
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, AnyRequest):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None


SAME_NAME = tuple(name for name in MessagesRequest.model_fields if name in ChatRequest.model_fields and name != "messages")


def to_chat(request: MessagesRequest) -> ChatRequest:
    """The same request in terms of chat completions.

    Raises:
        RequestError: a turn or block that is not what the format says.
        UnsupportedError: a block that is not text.
    """
    values = {name: getattr(request, name) for name in SAME_NAME}
    turns = chat_turns(request)
    values |= {"messages": turns, "stop": request.stop_sequences, "continue_final_message": turns[-1].role == "assistant"}
    return ChatRequest.model_construct(**values)


def chat_turns(request: CountRequest) -> list[Message]:
    """System prompt and turns. Neighbours of one role are one turn: so the format has it. Raises as `to_chat` does."""
    if not request.messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    if len(request.messages) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(request.messages):,} entries, the limit is {MAX_MESSAGES:,}: send fewer", param="messages")
    pieces: list[tuple[str, list[str]]] = []
    if request.system is not None and (system := text_of(request.system, "system", TYPES)):
        pieces.append(("system", [system]))
    for index, turn in enumerate(request.messages):
        if turn.role not in ROLES:
            param = f"messages.{index}.role"
            raise RequestError(f"{param} is {turn.role[:40]!r}: it must be user or assistant; the field system has the rest", param=param)
        text = text_of(turn.content, f"messages.{index}.content", TYPES)
        if pieces and pieces[-1][0] == turn.role:
            pieces[-1][1].append(text)
        else:
            pieces.append((turn.role, [text]))
    return [Message(role=role, content="\n".join(texts)) for role, texts in pieces]
