"""A Hugging Face folder's tokenizer.json and tokenizer_config.json -> a `tokenizers.Tokenizer`. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from hexad.common.errors import ModelError
from hexad.models.formats.built import BuiltTokenizer, surround
from hexad.models.formats.files import read_json

MAX_TOKENIZER_BYTES = 256 * 2**20
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_of_folder(folder: Path) -> BuiltTokenizer:
    """The tokenizer in `folder`.

    Raises:
        ModelError: no tokenizer.json, or one that is not valid.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        other = [n for n in ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt") if (folder / n).is_file()]
        hint = f" ({other[0]} alone is not read: convert it with transformers' save_pretrained)" if other else ""
        raise ModelError(f"{folder}: no tokenizer.json here{hint}; or name another folder with --tokenizer")
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelError(f"{path}: {path.stat().st_size:,} bytes; a tokenizer has at most {MAX_TOKENIZER_BYTES:,}")
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path}: not a valid tokenizer ({str(error)[:200]}): fetch it again") from None
    backend.no_padding()
    backend.no_truncation()  # a saved limit would cut prompts silently
    config = read_json(folder / "tokenizer_config.json") or {}
    names = {**(read_json(folder / "special_tokens_map.json") or {}), **config}
    _add_missing(backend, config)
    named = {key: _content(names.get(key)) for key in _NAMED}
    ids = {key: None if name is None else backend.token_to_id(name) for key, name in named.items()}
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    special |= {i for i in ids.values() if i is not None} | set(_listed(backend, names))
    built = BuiltTokenizer(backend, ids["bos_token"], ids["eos_token"], ids["pad_token"], frozenset(special))
    if backend.post_processor is None:  # else tokenizer.json says itself what surrounds a text
        surround(built, config.get("add_bos_token") is True, config.get("add_eos_token") is True)
    return built


def _content(value: Any) -> str | None:
    """The text of a token, written as a string or as an object."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _listed(backend: tokenizers.Tokenizer, names: Mapping[str, Any]) -> Iterator[int]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = names.get(key)
        entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        for entry in entries:
            name = _content(entry)
            index = backend.token_to_id(name) if name else None
            if index is not None:
                yield index


def _add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows, in the order of their ids."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return
    known = backend.get_added_tokens_decoder()
    entries = sorted(((int(i), e) for i, e in listed.items() if i.isdigit() and isinstance(e, Mapping)), key=lambda pair: pair[0])
    for index, entry in entries:
        name = _content(entry)
        if name is None or index in known:
            continue
        flags = {k: entry[k] for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if isinstance(entry.get(k), bool)}
        if backend.token_to_id(name) in (index, None) and index <= backend.get_vocab_size():
            backend.add_tokens([AddedToken(name, **flags)])
