"""What crosses the socket between front ends (client) and the engine process (core loop): msgpack of these structs, never pickle.

Transport: the core binds a ZeroMQ ROUTER, each front end connects a DEALER; a frame is one encoded message. The identity frame is
the front end's address: answers go where the request came from. `Outputs` take the front end's `news_line`, if it has one. Every accepted
`Submit` gets exactly one terminal `Output` for each of its choices (finish_reason set, or error set).
"""

from __future__ import annotations

import msgspec

from hexad.common.params import SamplingParams
from hexad.engine.plan import PromptSegment, TokenLogprobs

PROTOCOL_VERSION = 1


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a front end; answered with `Welcome`."""

    protocol: int


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """Versions and limits, so that a front end can refuse a request by itself."""

    protocol: int
    version: str
    config_hash: str
    model: str
    max_len: int  # tokens of prompt plus output
    max_request_blocks_tokens: int  # tokens that the whole KV pool holds
    vocab_size: int
    device: str
    dtype: str
    kv_bytes: int
    num_blocks: int
    block_size: int


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """One request; `params.n` choices."""

    request_id: str  # unique in its front end
    prompt: tuple[PromptSegment, ...]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0  # lower first
    tenant: str = ""
    cache_salt: str = ""
    adapter_id: int | None = None
    deadline_s: float | None = None  # from arrival at the core
    client_time_s: float = 0.0  # wall clock at submission, for latency metrics


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these requests; each live choice ends with finish_reason "abort". Unknown ids are ignored."""

    request_ids: tuple[str, ...]
    choice: int | None = None  # only this choice of each (its text ended at a stop string); None: all


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A utility call: "stats", "reset_prefix_cache", "ping", "drain", and "goodbye" (the front end leaves; not answered)."""

    call_id: int
    method: str


class CallResult(msgspec.Struct, frozen=True, tag="call_result"):
    call_id: int
    value: dict[str, float | int | str | None]
    error: str | None = None


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """News of one choice: ids since the last one, and at the end how it ended."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # choice 0 only, before or with its first token
    finish_reason: str | None = None  # "stop" | "length" | "abort"
    stop_token_id: int | None = None  # the EOS or stop token that ended it (it is in token_ids)
    num_cached: int | None = None  # prompt tokens found in the prefix cache; sent once, with the first output of choice 0
    error: str | None = None  # terminal: message of the failure
    error_code: str | None = None  # code of the error class, e.g. "overloaded", "kv_cache_exceeded", "request_failed"
    queued_s: float | None = None  # with the first output: time in the queue
    num_preemptions: int = 0  # with the terminal output


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All news of one step for one front end."""

    items: tuple[Output, ...]


ToCore = Hello | Submit | Abort | Call
ToClient = Welcome | Outputs | CallResult
