"""Request bodies as pydantic models: the fields that are honoured, with strict types (`"0"` is not a number, `1.5` not an integer).

A field that is `None` counts as absent. Ranges are not checked here but in `SamplingParams.validate`, once for every entry point.
Fields that are known but not listed here are in `fields.py`.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class StreamOptions(BaseModel):
    """What a stream carries besides the text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None  # one last chunk with the usage
    continuous_usage_stats: bool | None = None  # the usage so far on every chunk


class AnyRequest(BaseModel):
    """What every format has: the model, how to sample, and the fields of this server's own."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    deadline_s: float | None = None  # seconds from arrival until the answer must be complete


class GenerationRequest(AnyRequest):
    """What completions and chat completions have in common."""

    n: int | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: Any = None  # a string or a list of them: read by `sampling.stop_strings`
    stream_options: StreamOptions | None = None
    user: str | None = None

    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None  # keep the last k prompt tokens; -1: as many as the context holds


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Any = None  # a string, ids, or a list of either: read by `prompts.read_prompts`
    logprobs: int | None = None
    best_of: int | None = None


class Message(BaseModel):
    """One turn. Unknown keys are ignored; content is a string or a list of text parts."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Templated(BaseModel):
    """What decides how messages become a prompt."""

    model_config = ConfigDict(strict=True, extra="ignore")

    messages: list[Message]
    add_generation_prompt: bool | None = None  # default true
    continue_final_message: bool | None = None  # the last message is the start of the answer
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(GenerationRequest, Templated):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: int | None = None  # wins over max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeRequest(BaseModel):
    """`POST /tokenize`: either a prompt or messages."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """`POST /detokenize`."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    tokens: list[int]
