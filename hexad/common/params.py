"""What a caller may ask of generation. One frozen struct, validated once at the edge, sent over the wire as it is."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from hexad.common.errors import RequestError

MAX_N = 16
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1_000
MAX_BIAS_ENTRIES = 1_024
MAX_BAD_WORDS = 256
MAX_SEED = 2**64 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping options of one request. Defaults are the neutral values.

    `validate()` raises `RequestError` with the field as `param`; nothing past the API checks ranges again.
    """

    n: int = 1  # choices per prompt, 1..MAX_N
    max_tokens: int | None = None  # None: as many as the context allows
    min_tokens: int = 0  # EOS and stop token ids are masked until this many tokens exist
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # (0, 1]; the top token always stays
    top_k: int = 0  # 0 or -1: no limit
    min_p: float = 0.0  # [0, 1], relative to the most likely token
    presence_penalty: float = 0.0  # [-2, 2], over generated tokens
    frequency_penalty: float = 0.0  # [-2, 2], over generated tokens
    repetition_penalty: float = 1.0  # (0, 10], over prompt and generated tokens (CTRL, Keskar et al. 2019)
    seed: int | None = None  # None: the engine draws one
    logit_bias: dict[int, float] = {}  # token id -> [-100, 100], added to the logits
    allowed_token_ids: tuple[int, ...] | None = None  # all others are masked
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that may not appear in the output
    stop: tuple[str, ...] = ()  # text that ends the choice
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: none; k: the sampled token's and the k best, 0..MAX_LOGPROBS
    prompt_logprobs: int | None = None  # likewise for each prompt token (the first has none)

    @property
    def greedy(self) -> bool:
        """True when the choice is the arg max (temperature 0, or so small that it is)."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """True when the history of tokens changes the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def validate(self, vocab_size: int) -> SamplingParams:
        """Check every range against `vocab_size` (the tokenizer's, without padding rows); returns self.

        Raises:
            RequestError: names the field, the value and the range.
        """
        _integer("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, max_tokens is {self.max_tokens}: min_tokens may not exceed it",
                param="min_tokens",
            )
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), MAX_SEED)
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None:
                _integer(field, value, 0, MAX_LOGPROBS)
        self._validate_tokens(vocab_size)
        self._validate_stops()
        return self

    def _validate_tokens(self, vocab_size: int) -> None:
        _count("logit_bias", len(self.logit_bias), MAX_BIAS_ENTRIES)
        for token_id, bias in self.logit_bias.items():
            _token("logit_bias", token_id, vocab_size)
            _number("logit_bias", bias, -100.0, 100.0)
        for token_id in self.stop_token_ids:
            _token("stop_token_ids", token_id, vocab_size)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty: name at least one id, or leave it out", param="allowed_token_ids")
            for token_id in self.allowed_token_ids:
                _token("allowed_token_ids", token_id, vocab_size)
        _count("bad_words", len(self.bad_words_ids), MAX_BAD_WORDS)
        for word in self.bad_words_ids:
            if not word:
                raise RequestError("bad_words has an empty entry: leave it out", param="bad_words")
            for token_id in word:
                _token("bad_words", token_id, vocab_size)

    def _validate_stops(self) -> None:
        _count("stop", len(self.stop), MAX_STOP_STRINGS)
        _count("stop_token_ids", len(self.stop_token_ids), MAX_BIAS_ENTRIES)
        for text in self.stop:
            if not text:
                raise RequestError("stop has an empty string: leave it out", param="stop")
            if len(text) > MAX_STOP_CHARS:
                raise RequestError(f"a stop string has {len(text)} characters, the limit is {MAX_STOP_CHARS}: shorten it", param="stop")


GREEDY_BELOW = 1e-5  # below this, logits / temperature could overflow and the draw is the arg max anyway


def _integer(field: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{field} is {value!r}: it must be an integer", param=field)
    if not low <= value <= high:
        raise RequestError(f"{field} is {value}: it must be between {low} and {high}", param=field)


def _number(field: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{field} is {value!r}: it must be a number", param=field)
    if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        start = "above" if open_low else "at least"
        raise RequestError(f"{field} is {value}: it must be {start} {low:g} and at most {high:g}", param=field)


def _token(field: str, token_id: Any, vocab_size: int) -> None:
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
        raise RequestError(f"{field} names token {token_id!r}: ids of this model are 0 to {vocab_size - 1}", param=field)


def _count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(f"{field} has {count} entries, the limit is {limit}: send fewer", param=field)
