"""Which fields a request may have. A field that matters is honoured or refused, never dropped in silence.

Four kinds: honoured (the fields of the pydantic model), known but unsupported (400 `unsupported` unless the value is neutral),
known and without effect here (accepted, named in `x-hexad-ignored`), and unknown (400 when it is within two edits of a known
name, else ignored, logged once and named in `x-hexad-ignored`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hexad.common.errors import RequestError, UnknownFieldError, UnsupportedError, edit_distance
from hexad.common.params import MAX_BAD_WORDS, MAX_BIAS_ENTRIES

log = logging.getLogger("hexad.api")
Model = TypeVar("Model", bound=BaseModel)
MAX_SHOWN_CHARS = 80
MAX_FIELDS = 256
MAX_MESSAGES = 4_096
MAX_ENTRIES = {"messages": MAX_MESSAGES, "logit_bias": MAX_BIAS_ENTRIES, "stop_token_ids": MAX_BIAS_ENTRIES, "bad_words": MAX_BAD_WORDS}

WITHOUT_EFFECT = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "reasoning",
        "reasoning_effort",
        "verbosity",
        "include_reasoning",
        "spaces_between_special_tokens",
    }
)
SILENT = frozenset({"user", "store", "metadata", "service_tier", "safety_identifier"})  # bookkeeping of the caller's own


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is v or (type(value) is type(v) and value == v) for v in values)


def _text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


Neutral = Mapping[str, Callable[[Any], bool]]
NEUTRAL: Neutral = {  # known, unsupported; the values that change nothing are accepted
    "response_format": _text_format,
    "structured_outputs": _one_of(),
    "guided_json": _one_of(),
    "guided_regex": _one_of(),
    "guided_choice": _one_of(),
    "guided_grammar": _one_of(),
    "guided_json_object": _one_of(False),
    "guided_decoding_backend": _one_of(),
    "guided_whitespace_pattern": _one_of(),
    "tools": _one_of([]),
    "tool_choice": _one_of("none", "auto"),
    "functions": _one_of([]),
    "function_call": _one_of("none", "auto"),
    "modalities": _one_of(["text"]),
    "audio": _one_of(),
    "prediction": _one_of(),
    "web_search_options": _one_of(),
    "suffix": _one_of(""),
    "use_beam_search": _one_of(False),
    "length_penalty": _one_of(1, 1.0),
    "early_stopping": _one_of(False),
    "chat_template": _one_of(),
    "documents": _one_of([]),
    "mm_processor_kwargs": _one_of({}),
    "logits_processors": _one_of([]),
    "kv_transfer_params": _one_of(),
    "prompt_embeds": _one_of(),
    "return_tokens_as_token_ids": _one_of(False),
}
WHY = {"chat_template": "templates from requests are not run by this server; it uses the model's own"}


def screen(body: Mapping[str, Any], model: type[BaseModel], more: Neutral | None = None) -> tuple[dict[str, Any], list[str]]:
    """Split `body` into what `model` reads and the names that are ignored. `more`: unsupported fields of this endpoint alone.

    Raises:
        UnsupportedError: a known field with a value that this build cannot serve.
        UnknownFieldError: an unknown field that is probably a misspelling.
    """
    if len(body) > MAX_FIELDS:
        raise RequestError(f"the body has {len(body):,} fields, the limit is {MAX_FIELDS}: send fewer")
    for name, limit in MAX_ENTRIES.items():  # before anything walks through them
        if isinstance(value := body.get(name), list | dict) and len(value) > limit:
            raise RequestError(f"{name} has {len(value):,} entries, the limit is {limit:,}: send fewer", param=name)
    known: dict[str, Any] = {}
    ignored: list[str] = []
    unsupported = {**NEUTRAL, **more} if more else NEUTRAL
    for name, value in body.items():
        if name in model.model_fields:
            known[name] = value
        elif value is None:
            continue
        elif name in unsupported:
            if not unsupported[name](value):
                raise UnsupportedError(f"{name} is not supported by this server{_reason(name)}: leave it out", param=name)
        elif name not in WITHOUT_EFFECT:
            _refuse_misspelling(name, model)
            ignored.append(name)
        elif name not in SILENT:
            ignored.append(name)
    for name in ignored:
        _log_once(name)
    return known, ignored


def _reason(name: str) -> str:
    return f" ({WHY[name]})" if name in WHY else ""


def _refuse_misspelling(name: str, model: type[BaseModel]) -> None:
    known = (*model.model_fields, *NEUTRAL, *WITHOUT_EFFECT)
    close = [(edit_distance(name, k, 3), k) for k in known if abs(len(name) - len(k)) < 3]
    # two edits of a name of three letters make anything: the shorter the known name, the fewer edits count
    close = [(edits, k) for edits, k in close if edits <= min(2, len(k) // 2)]
    if close:
        best = min(close)[1]
        raise UnknownFieldError(f"there is no field {name[:MAX_SHOWN_CHARS]!r}: did you mean {best!r}?", param=name[:MAX_SHOWN_CHARS])


_logged: set[str] = set()


def _log_once(name: str) -> None:
    if len(_logged) < 1_000 and name not in _logged:
        _logged.add(name)
        log.warning("request field %r is ignored: this server does not know it, or it has no effect here", name[:MAX_SHOWN_CHARS])


def read(body: Mapping[str, Any], model: type[Model], more: Neutral | None = None) -> tuple[Model, list[str]]:
    """Screen (see there) and validate `body`; returns the request and the ignored names.

    Raises:
        RequestError: names the first wrong field as `param`.
    """
    known, ignored = screen(body, model, more)
    try:
        return model.model_validate(known), ignored
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> RequestError:
    item = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "missing":
        return RequestError(f"{path} is missing: it is required", param=path, code="missing_required_parameter")
    value = repr(item["input"])
    shown = value if len(value) <= MAX_SHOWN_CHARS else value[:MAX_SHOWN_CHARS] + "..."
    message = item["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return RequestError(f"{path} is {shown}: it {message}", param=path, code="invalid_type")
