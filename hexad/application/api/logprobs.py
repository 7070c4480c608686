"""Log-probabilities in the formats of the API: chat entries with bytes, the legacy lists with text offsets, prompt maps."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hexad.application.api.wire import ChatLogprobs, CompletionLogprobs, PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob
from hexad.engine.plan import TokenLogprobs
from hexad.orchestration.detokenize import TextTokenizer
from hexad.orchestration.output import Delta

LOWEST = -9999.0  # what JSON gets for a log-probability of minus infinity, as the hosted API does


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def raw_token(tokenizer: TextTokenizer, token_id: int) -> bytes:
    """The bytes that a token stands for (a special one: its name)."""
    raw = tokenizer.token_bytes(token_id)
    return raw if raw is not None else tokenizer.decode([token_id], skip_special_tokens=False).encode()


def show(raw: bytes) -> str:
    """Bytes as text; a part of a character is written out, so that different tokens stay different."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: TextTokenizer, delta: Delta) -> ChatLogprobs:
    """Entries of one delta. The bytes of all entries joined are the text."""
    content = []
    for entry, raw in zip(delta.logprobs, delta.logprob_bytes, strict=True):
        top = []
        for token_id, logprob in entry.top:
            candidate = raw if token_id == entry.token_id and raw else raw_token(tokenizer, token_id)
            top.append(TopLogprob(show(candidate), finite(logprob), list(candidate)))
        shown = show(raw or raw_token(tokenizer, entry.token_id))
        content.append(TokenLogprob(shown, finite(entry.logprob), list(raw), top))
    return ChatLogprobs(content)


class LegacyLogprobs:
    """Makes the four lists of one choice, delta by delta; offsets count characters of the choice's text, an echoed prompt included."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, ids: Sequence[int], text: str, entries: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """Entries of an echoed prompt: one a token, the first without log-probability."""
        result = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(ids, entries, strict=True):
            raw = raw_token(self._tokenizer, token_id)
            self._add(result, raw, entry, counted=not self._tokenizer.is_special(token_id) or show(raw) in text)
        self._offset = len(text)
        self._decoder.reset()
        return result

    def delta(self, delta: Delta) -> CompletionLogprobs:
        result = CompletionLogprobs([], [], [], [])
        for entry, raw in zip(delta.logprobs, delta.logprob_bytes, strict=True):
            self._add(result, raw or raw_token(self._tokenizer, entry.token_id), entry, counted=bool(raw))
        return result

    def skip(self, text: str) -> None:
        """Text without entries (an echo without prompt log-probabilities)."""
        self._offset += len(text)

    def _add(self, result: CompletionLogprobs, raw: bytes, entry: TokenLogprobs | None, *, counted: bool) -> None:
        result.tokens.append(show(raw))
        result.text_offset.append(self._offset)
        result.token_logprobs.append(None if entry is None else finite(entry.logprob))
        result.top_logprobs.append(None if entry is None else self._top(raw, entry))
        if counted:
            self._offset += len(self._decoder.decode(raw))

    def _top(self, raw: bytes, entry: TokenLogprobs) -> dict[str, float]:
        top = {show(raw_token(self._tokenizer, token_id)): finite(logprob) for token_id, logprob in entry.top if token_id != entry.token_id}
        top[show(raw)] = finite(entry.logprob)  # the token itself is always there, also when it is not among the best
        return dict(sorted(top.items(), key=lambda item: -item[1]))


def join_legacy(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    joined = CompletionLogprobs([], [], [], [])
    for part in parts:
        joined.tokens.extend(part.tokens)
        joined.token_logprobs.extend(part.token_logprobs)
        joined.top_logprobs.extend(part.top_logprobs)
        joined.text_offset.extend(part.text_offset)
    return joined


def prompt_logprobs(tokenizer: TextTokenizer, entries: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
    """The `prompt_logprobs` field: per prompt position a map from token id to its log-probability (the first: null)."""
    return [None if entry is None else _position(tokenizer, entry) for entry in entries]


def _position(tokenizer: TextTokenizer, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
    ranks = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)}
    ranks[entry.token_id] = (entry.logprob, entry.rank)
    return {
        str(token_id): PromptLogprob(finite(logprob), rank, show(raw_token(tokenizer, token_id)))
        for token_id, (logprob, rank) in ranks.items()
    }
