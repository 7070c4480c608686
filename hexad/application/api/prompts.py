"""From the request to prompt ids: the four forms of `prompt`, and messages through the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hexad.application.api.fields import MAX_MESSAGES
from hexad.application.api.limits import check_text
from hexad.application.api.schema import ChatRequest, Message, TokenizeRequest
from hexad.application.api.state import ServerState
from hexad.common.errors import RequestError, UnsupportedError

MAX_PROMPTS = 256
ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_VARIABLES = ("enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "date_string", "custom_instructions")


@dataclass(frozen=True)
class Prompt:
    """One prompt; `text` is what the caller wrote, None when it came as ids."""

    ids: tuple[int, ...]
    text: str | None


def read_prompts(state: ServerState, prompt: Any, add_special_tokens: bool, *, whole: bool = True) -> list[Prompt]:
    """`prompt` in any of its forms (string, ids, list of strings, list of ids). Runs in a text thread. `whole`: see `from_text`.

    Raises:
        RequestError: another form, an empty list, or ids that the model does not have.
    """
    if isinstance(prompt, str):
        return [from_text(state, prompt, add_special_tokens, whole=whole)]
    if not isinstance(prompt, list) or not prompt:
        raise _bad_prompt("prompt is missing or empty" if not prompt and not isinstance(prompt, int) else "prompt has a wrong type")
    if all(type(item) is int for item in prompt):
        return [Prompt(checked_ids(state, prompt, "prompt"), None)]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt has {len(prompt)} entries, the limit is {MAX_PROMPTS}: send several requests", param="prompt")
    if all(isinstance(item, str) for item in prompt):
        return [from_text(state, item, add_special_tokens, whole=whole) for item in prompt]
    if all(isinstance(item, list) and all(type(token) is int for token in item) for item in prompt):
        return [Prompt(checked_ids(state, item, "prompt"), None) for item in prompt]
    raise _bad_prompt("prompt has a wrong type")


def _bad_prompt(what: str) -> RequestError:
    return RequestError(f"{what}: it must be a string, a list of strings, a list of token ids, or a list of those", param="prompt")


def from_text(state: ServerState, text: str, add_special_tokens: bool, *, whole: bool) -> Prompt:
    """A prompt from plain text, as the model's tokenizer reads it.

    Raises:
        RequestError: the text is far too long. `whole`: all of it must fit the context; it will not be truncated or only counted.
    """
    check_text([text], state.context, "prompt", lambda start: len(state.tokenizer.encode(start)) if whole else 0)
    return Prompt(tuple(state.tokenizer.encode(text, add_special_tokens=add_special_tokens)), text)


def checked_ids(state: ServerState, ids: Sequence[int], param: str) -> tuple[int, ...]:
    """`ids`, all of which the model has.

    Raises:
        RequestError: one that it has not.
    """
    vocab_size = state.vocab_size
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{param} names token {token_id}: ids of this model are 0 to {vocab_size - 1}", param=param)
    return tuple(ids)


def prompt_of(state: ServerState, request: ChatRequest | TokenizeRequest) -> Prompt:
    """The prompt of a request with messages, whichever format it came in. See `chat_prompt`."""
    return chat_prompt(
        state,
        request.messages or (),
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=request.chat_template_kwargs,
        add_special_tokens=request.add_special_tokens,
        whole=isinstance(request, ChatRequest) and request.truncate_prompt_tokens is None,
    )


def chat_prompt(
    state: ServerState,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    variables: Mapping[str, Any] | None,
    add_special_tokens: bool | None,
    whole: bool = True,
) -> Prompt:
    """Messages through the model's template. Runs in a text thread. `whole`: see `from_text`.

    Raises:
        RequestError: messages that are malformed, or that the template refuses.
        UnsupportedError: the model has no template, or a content part is not text.
    """
    if state.template is None:
        raise UnsupportedError("this model has no chat template: use /v1/completions, or start the server with --chat-template")
    turns = [turn(message, index) for index, message in enumerate(_counted(messages))]
    if continue_final_message and add_generation_prompt:
        raise RequestError("add_generation_prompt and continue_final_message exclude each other: set one", param="continue_final_message")
    if continue_final_message and turns[-1]["role"] != "assistant":
        raise RequestError("continue_final_message needs a last message of role assistant", param="continue_final_message")
    texts = [turn["content"] for turn in turns]
    check_text(texts, state.context, "messages", lambda start: len(state.tokenizer.encode(start)) if whole else 0)
    ids, text = state.template.encode(
        state.tokenizer,
        turns,
        add_special_tokens=bool(add_special_tokens),
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=bool(continue_final_message),
        **_template_variables(variables),
    )
    return Prompt(tuple(ids), text)


def _counted(messages: Sequence[Message]) -> Sequence[Message]:
    if not messages:
        raise RequestError("messages is empty: send at least one", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(messages)} entries, the limit is {MAX_MESSAGES}: send fewer", param="messages")
    return messages


def turn(message: Message, index: int) -> dict[str, Any]:
    """One message as templates expect it: plain text content, tool arguments as objects."""
    if message.role not in ROLES:
        raise RequestError(
            f"messages.{index}.role is {message.role[:40]!r}: it must be one of {', '.join(ROLES)}",
            param=f"messages.{index}.role",
        )
    result: dict[str, Any] = {"role": message.role, "content": _content(message, index)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            result[name] = getattr(message, name)
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call, f"messages.{index}.tool_calls.{i}") for i, call in enumerate(message.tool_calls)]
    return result


def _content(message: Message, index: int) -> str:
    """Text of the content; parts are joined by line breaks."""
    content, param = message.content, f"messages.{index}.content"
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise RequestError(f"{param} is missing: it must be a string or a list of parts of type text", param=param)
    if not isinstance(content, list):
        raise RequestError(f"{param} must be a string or a list of parts of type text", param=param, code="invalid_type")
    return "\n".join(_part(part, f"{param}.{i}") for i, part in enumerate(content))


def _part(part: Any, param: str) -> str:
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text", "refusal"):
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            return text
        raise RequestError(f"{param}.text must be a string", param=f"{param}.text", code="invalid_type")
    if isinstance(part, dict) and isinstance(part.get("type"), str):
        raise UnsupportedError(f"{param} has type {part['type'][:40]!r}: this model reads parts of type text only", param=param)
    raise RequestError(f"{param} must be an object with a type", param=param, code="invalid_type")


def _tool_call(call: Mapping[str, Any], param: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{param}.function must be an object with a name", param=f"{param}.function", code="invalid_type")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise RequestError(f"{param}.function.arguments is not valid JSON", param=f"{param}.function.arguments") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _template_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    for name in variables or {}:
        if name not in TEMPLATE_VARIABLES:
            raise UnsupportedError(
                f"chat_template_kwargs has {name[:80]!r}: accepted are {', '.join(TEMPLATE_VARIABLES)}",
                param=f"chat_template_kwargs.{name[:80]}",
            )
    return dict(variables or {})
