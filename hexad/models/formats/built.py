"""What the readers of tokenizer files hand to `models/tokenizer.py`. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import tokenizers
from tokenizers import processors


@dataclass(frozen=True, slots=True)
class BuiltTokenizer:
    """A tokenizer and what its file says about special tokens."""

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    special_ids: frozenset[int] = field(default_factory=frozenset)  # control tokens: hidden from text


def surround(built: BuiltTokenizer, add_bos: bool, add_eos: bool) -> None:
    """Make the tokenizer put BOS before and EOS after a text, as far as it has them."""
    ids = (built.bos_id if add_bos else None, built.eos_id if add_eos else None)
    names = [None if i is None else built.backend.id_to_token(i) for i in ids]
    special = [(name, i) for name, i in zip(names, ids, strict=True) if name is not None and i is not None]
    if not special:
        return
    before, after = ([] if name is None else [f"{name}:0"] for name in names)
    parts = [*before, "$A:0", *after]
    built.backend.post_processor = processors.TemplateProcessing(single=parts, pair=[*parts, "$B:1"], special_tokens=special)
