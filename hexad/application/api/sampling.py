"""From a request's fields to `SamplingParams`: nulls become defaults, names are mapped, token lists are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hexad.application.api.schema import ChatRequest, CompletionRequest, GenerationRequest
from hexad.common.errors import RequestError, UnsupportedError
from hexad.common.params import MAX_BAD_WORDS, MAX_STOP_STRINGS, SamplingParams

SAME_NAME = (  # fields that SamplingParams has under the same name
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what a generation_config.json may set
MAX_PRIORITY = 2**31 - 1
MAX_DEADLINE_S = 86_400.0


def sampling_params(
    request: CompletionRequest | ChatRequest,
    *,
    vocab_size: int,
    defaults: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
) -> SamplingParams:
    """Validated options of one request, still without the bound that the context sets on `max_tokens`.

    `defaults` are the model's own sampling defaults; `encode` makes ids of a text without special tokens (for `bad_words`).

    Raises:
        RequestError: a value out of range; `param` is the request's own field name.
    """
    values: dict[str, Any] = {key: value for key, value in defaults.items() if key in DEFAULTED and value is not None}
    for name in SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            values[name] = value
    values["max_tokens"] = _max_tokens(request)
    values["stop"] = stop_strings(request.stop)
    values["stop_token_ids"] = tuple(request.stop_token_ids or ())
    values["logit_bias"] = _logit_bias(request.logit_bias)
    if request.allowed_token_ids is not None:
        values["allowed_token_ids"] = tuple(request.allowed_token_ids)
    values["bad_words_ids"] = _bad_words(request.bad_words, encode)
    values["logprobs"] = _logprobs(request)
    _check_envelope(request)
    if isinstance(request, CompletionRequest):
        _check_best_of(request)
        if request.echo and request.logprobs is not None:
            values.setdefault("prompt_logprobs", request.logprobs)
    if request.stream and request.prompt_logprobs is not None:
        raise UnsupportedError("prompt_logprobs is not available in a stream: leave out stream", param="prompt_logprobs")
    params = SamplingParams(**values)
    try:
        return params.validate(vocab_size)
    except RequestError as error:
        raise _renamed(error, request) from None


def _renamed(error: RequestError, request: GenerationRequest) -> RequestError:
    """Speak of the field that the caller sent."""
    if isinstance(request, ChatRequest):
        newer = request.max_completion_tokens is not None
        sent = {"max_tokens": "max_completion_tokens" if newer else "max_tokens", "logprobs": "top_logprobs"}
        name = sent.get(error.param or "")
        if name is not None and name != error.param:
            return type(error)(error.message.replace(error.param or "", name, 1), param=name, code=error.code)
    return error


def _max_tokens(request: GenerationRequest) -> int | None:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


def stop_strings(stop: Any) -> tuple[str, ...]:
    """`stop` as a tuple; null and [] mean none."""
    if stop is None:
        return ()
    items = [stop] if isinstance(stop, str) else stop
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise RequestError("stop must be a string or a list of strings", param="stop", code="invalid_type")
    if len(items) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(items)} entries, the limit is {MAX_STOP_STRINGS}: send fewer", param="stop")
    return tuple(items)


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > 12:
            raise RequestError(f"logit_bias has the key {key[:40]!r}: keys are token ids (digits)", param="logit_bias")
        result[int(key)] = value
    return result


def _bad_words(words: Sequence[str] | None, encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Each word as it is written at the start of a text, and after a space."""
    if not words:
        return ()
    if len(words) > MAX_BAD_WORDS // 2:
        raise RequestError(f"bad_words has {len(words)} entries, the limit is {MAX_BAD_WORDS // 2}: send fewer", param="bad_words")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise RequestError("bad_words has an empty entry: leave it out", param="bad_words")
        if len(word) > 1_000:
            raise RequestError(f"bad_words has an entry of {len(word)} characters, the limit is 1000: shorten it", param="bad_words")
        for text in (word.lstrip(), " " + word.lstrip()):
            sequences[tuple(encode(text))] = None
    return tuple(sequences)


def _logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true: set it, or leave top_logprobs out", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _check_best_of(request: CompletionRequest) -> None:
    n = request.n if request.n is not None else 1
    if request.best_of is None or request.best_of == n:
        return
    if request.best_of < n:
        raise RequestError(f"best_of is {request.best_of}, n is {n}: best_of may not be smaller", param="best_of")
    raise UnsupportedError(f"best_of above n is not supported by this server: leave it out, or use {n}", param="best_of")


def _check_envelope(request: GenerationRequest) -> None:
    """The fields that the engine reads beside the sampling options."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true: set it, or leave stream_options out", param="stream_options")
    if request.priority is not None and abs(request.priority) > MAX_PRIORITY:
        raise RequestError(f"priority is {request.priority}: it must be between {-MAX_PRIORITY} and {MAX_PRIORITY}", param="priority")
    if request.deadline_s is not None and not 0 < request.deadline_s <= MAX_DEADLINE_S:
        raise RequestError(f"deadline_s is {request.deadline_s}: it must be above 0 and at most {MAX_DEADLINE_S:g}", param="deadline_s")
    for name in ("cache_salt", "request_id"):
        value = getattr(request, name)
        if value is not None and len(value) > 128:
            raise RequestError(f"{name} has {len(value)} characters, the limit is 128: shorten it", param=name)
