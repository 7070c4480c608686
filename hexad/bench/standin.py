"""A tokenizer for shapes that have none: one word for each id, so that a server can turn dummy output into text of a usual length."""

from __future__ import annotations

import json
from pathlib import Path


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json into `folder`: id 0 is "<unk>", id i is a byte-level word of three or four letters."""
    vocab = {"<unk>": 0, **{f"Ġ{_word(i)}": i for i in range(1, vocab_size)}}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))


def _word(number: int) -> str:
    """`number` in letters."""
    letters = ""
    while number or len(letters) < 3:
        number, digit = divmod(number, 26)
        letters += chr(ord("a") + digit)
    return letters
