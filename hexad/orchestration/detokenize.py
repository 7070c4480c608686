"""Token ids to text, one id at a time. No torch.

Two ways, chosen once for a tokenizer:

- Bytes: the tokenizer knows the exact bytes that each token adds in mid-text (byte-level BPE, SentencePiece with byte fallback). Bytes are
  buffered until a whole UTF-8 character is there. Bytes that can never become one turn into U+FFFD, one per maximal invalid part (the
  Unicode standard's practice, and Python's "replace"); so does a character that is still incomplete at the end.
- Windows: any other tokenizer. The ids since the last settled text are decoded with and without the newest one; the difference is the new
  text, held back while it ends in U+FFFD.

Both cost O(1) a token, amortised, and give the same text however the ids are split into pushes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_PRIMING_TOKENS = 4  # a UTF-8 character has at most four bytes, a token at least one
_MAX_HELD_TOKENS = 16  # windows only: text that ends in U+FFFD for longer is invalid, not incomplete


class TextTokenizer(Protocol):
    """What detokenisation needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that the token adds in the middle of a text (a special token: its name); None when that is not known."""
        ...

    def is_special(self, token_id: int) -> bool: ...


class Detokenizer(Protocol):
    """Text of a growing sequence of ids.

    `pending` is true while the newest token's text is not complete: the next characters belong to it too.
    """

    pending: bool

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """The text still held back, at the end of the sequence."""
        ...

    def raw(self, token_id: int, text: str) -> bytes:
        """The bytes that the token just pushed contributed; `text` is what `push` returned for it."""
        ...


def make_detokenizer(tokenizer: TextTokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> Detokenizer:
    """A detokenizer for output that follows `prompt_ids`: its text is decode(prompt + output) without decode(prompt)."""
    if _byte_exact(tokenizer, prompt_ids):
        return ByteDetokenizer(tokenizer, prompt_ids, skip_special_tokens)
    return WindowDetokenizer(tokenizer, prompt_ids, skip_special_tokens)


def _byte_exact(tokenizer: TextTokenizer, prompt_ids: Sequence[int]) -> bool:
    probe = prompt_ids[-1] if prompt_ids else 0
    return tokenizer.token_bytes(probe) is not None


class ByteDetokenizer:
    """Detokenisation by bytes."""

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = not any(self._shown(token_id) and tokenizer.token_bytes(token_id) for token_id in prompt_ids)
        self._last = b""
        self.pending = False
        self._prime(prompt_ids)

    def _shown(self, token_id: int) -> bool:
        return not (self._skip_special and self._tokenizer.is_special(token_id))

    def _prime(self, prompt_ids: Sequence[int]) -> None:
        """A prompt that ends inside a character leaves its first bytes in the decoder."""
        tail = b"".join(self._tokenizer.token_bytes(t) or b"" for t in prompt_ids[-_PRIMING_TOKENS:] if self._shown(t))
        self._decoder.decode(tail)
        self.pending = bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        if not self._shown(token_id):
            self._last = b""
            return ""
        piece = self._tokenizer.token_bytes(token_id) or b""
        if self._at_start and piece:
            piece = self._first_piece(token_id, piece)
        self._last = piece
        text = self._decoder.decode(piece)
        self.pending = bool(self._decoder.getstate()[0])
        return text

    def _first_piece(self, token_id: int, piece: bytes) -> bytes:
        """SentencePiece decoders drop one space at the very start of a text: so does this, when nothing was shown before."""
        self._at_start = False
        if piece.startswith(b" "):
            alone = self._tokenizer.decode([token_id], skip_special_tokens=False)
            if not alone.startswith(" ") or len(alone) < len(piece.decode("utf-8", "replace")):
                return piece[1:]
        return piece

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self.pending = False
        return text

    def raw(self, token_id: int, text: str) -> bytes:
        return self._last


class WindowDetokenizer:
    """Detokenisation by differences of decoded windows."""

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        # Skipped tokens do not count as context: a decoder may treat what follows them as the start of a text.
        shown = [t for t in prompt_ids[-64:] if not (skip_special_tokens and tokenizer.is_special(t))]
        self._ids = shown[-_PRIMING_TOKENS - 1 :]
        self._settled = self._decode(self._ids)  # text of the ids that were given out
        self._num_settled = len(self._ids)
        self.pending = False

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)

    def push(self, token_id: int) -> str:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        self._ids.append(token_id)
        whole = self._decode(self._ids)
        held = len(self._ids) - self._num_settled
        if whole.endswith("\ufffd") and held < _MAX_HELD_TOKENS:
            self.pending = True
            return ""
        return self._settle(whole, held)

    def _settle(self, whole: str, held: int) -> str:
        text = whole[len(self._settled) :]
        self._ids = self._ids[-held:]  # the newest settled ids are the context of the next ones
        self._settled = self._decode(self._ids)
        self._num_settled = len(self._ids)
        self.pending = False
        return text

    def flush(self) -> str:
        held = len(self._ids) - self._num_settled
        return self._settle(self._decode(self._ids), held) if held else ""

    def raw(self, token_id: int, text: str) -> bytes:
        return text.encode("utf-8", "replace")
