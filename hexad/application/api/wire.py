"""What the API answers with, as msgspec structs: encoding a chunk costs about a microsecond.

`UNSET` leaves a key out, `None` writes null: `usage` is null on the chunks of a stream that asked for usage, and absent otherwise.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from hexad.common.errors import HexadError

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": heartbeat\n\n"
# SSE ends lines at CR and LF alone, but httpx's and requests' `iter_lines` at these too: they travel as JSON escapes
_LINE_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029"]


def encode(value: Any) -> bytes:
    """JSON on one line, by anybody's idea of a line."""
    data = _encode(value)
    if not data.isascii():
        for end, escape in _LINE_ENDS:
            data = data.replace(end, escape)
    return data


def frame(value: Any) -> bytes:
    """One SSE event."""
    return b"data: " + encode(value) + b"\n\n"


def named_frame(name: str, fields: dict[str, Any]) -> bytes:
    """One SSE event with a name, which the data repeats."""
    return b"event: " + name.encode() + b"\n" + frame({"type": name, **fields})


def error_frame(error: HexadError) -> bytes:
    """The last event of a stream that fails."""
    return frame(error.body())


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int  # found in the prefix cache; a part of prompt_tokens


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request: the prompt once, the outputs of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """One entry of chat logprobs."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The legacy format: four lists of one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters of the choice's text before the token


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate at one prompt position."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET  # the stop string or stop token id that ended it
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class Envelope(msgspec.Struct, kw_only=True):
    """Every answer of the generation endpoints, whole or chunk."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
