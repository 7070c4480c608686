"""GGUF metadata -> a `tokenizers.Tokenizer`. No torch.

Two kinds of vocabulary: "gpt2" (byte-level BPE with merges, split as `tokenizer.ggml.pre` says) and "llama" (SentencePiece BPE: pieces
with scores and byte fallback; its merges are rebuilt from the scores). The file's add_bos, add_eos and add_space_prefix are honoured.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from hexad.common.errors import ModelError, nearest
from hexad.models.formats.built import BuiltTokenizer, surround
from hexad.models.formats.fields import Fields
from hexad.models.formats.pretokenizers import DEFAULT, SPLITS, Split

log = logging.getLogger(__name__)

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_OVERRIDE = "give the original tokenizer (--tokenizer FOLDER) or the split's name (--tokenizer pre:NAME)"


def tokenizer_of_gguf(metadata: Mapping[str, Any], path: Path, pre: str | None = None) -> BuiltTokenizer:
    """The tokenizer in a GGUF file's metadata.

    Args:
        pre: name of the word split, instead of the recorded one.

    Raises:
        ModelError: no vocabulary, a kind or split that is not known (lists the known ones), or lists that contradict each other.
    """
    fields = Fields({k.removeprefix(_KEY): v for k, v in metadata.items() if k.startswith(_KEY)}, path, _KEY)
    vocabulary = _Vocabulary(fields)
    kind = fields.get("model")
    if kind == "gpt2":
        split = _split(fields, pre)
        backend, add_bos = _byte_level(vocabulary, split), split.add_bos
    elif kind == "llama":
        backend, add_bos = _sentencepiece(vocabulary), True
    else:
        raise ModelError(f"{path}: tokenizer kind {kind!r} is not supported in GGUF; supported: gpt2, llama; {_OVERRIDE.split(' or ')[0]}")
    _add_tokens(backend, vocabulary)
    built = BuiltTokenizer(
        backend,
        bos_id=vocabulary.id_of("bos"),
        eos_id=vocabulary.id_of("eos"),
        pad_id=vocabulary.id_of("padding"),
        special_ids=frozenset(i for i, t in enumerate(vocabulary.types) if t in (_CONTROL, _UNKNOWN)),
    )
    surround(built, fields.flag("add_bos_token", add_bos), fields.flag("add_eos_token", False))
    return built


class _Vocabulary:
    """The parallel lists of the file, checked against each other."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.tokens: list[str] = _strings(fields, "tokens")
        types = fields.get("token_type", [_NORMAL] * len(self.tokens))
        if not self.tokens or not isinstance(types, list) or len(types) != len(self.tokens):
            raise ModelError(f"{fields.path}: {len(self.tokens):,} tokens and {_length(types)} token types: no usable vocabulary")
        self.types: list[int] = types
        self.ids: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            self.ids.setdefault(token, index)

    def id_of(self, which: str) -> int | None:
        """The id of "bos", "eos", ...; None if the file names none.

        Raises:
            ModelError: an id outside the vocabulary.
        """
        value = self.fields.optional_id(f"{which}_token_id")
        if value is not None and value >= len(self.tokens):
            raise ModelError(f"{self.fields.path}: {_KEY}{which}_token_id is {value}, but the vocabulary has {len(self.tokens):,} tokens")
        return value


def _length(value: Any) -> str:
    return f"{len(value):,}" if isinstance(value, list) else "no"


def _strings(fields: Fields, key: str) -> list[str]:
    value = fields.get(key, [])
    if not isinstance(value, list) or (value and not isinstance(value[0], str)):
        raise ModelError(f"{fields.path}: {_KEY}{key} should be a list of strings")
    return value


def _split(fields: Fields, override: str | None) -> Split:
    name = override or fields.get("pre")
    if name is None or (name == DEFAULT and override is None):
        shown = "does not record how its tokenizer splits words" if name is None else "records the word split 'default'"
        log.warning(
            "%s %s. Token ids may differ from those that the model was trained on, and answers be worse: %s",
            fields.path, shown, _OVERRIDE,
        )  # fmt: skip
        return SPLITS[DEFAULT]
    if name not in SPLITS:
        near = nearest(str(name), SPLITS)
        hint = f"did you mean {near!r}? " if near and override else ""
        raise ModelError(f"{fields.path}: word split {name!r} is not known; {hint}known: {', '.join(SPLITS)}; {_OVERRIDE}")
    return SPLITS[name]


def _byte_level(vocabulary: _Vocabulary, split: Split) -> tokenizers.Tokenizer:
    merges = [_pair(merge, vocabulary) for merge in _strings(vocabulary.fields, "merges")]
    if not merges:
        raise ModelError(f"{vocabulary.fields.path}: the vocabulary has no merges, which BPE needs")
    backend = tokenizers.Tokenizer(_bpe(vocabulary, merges, ignore_merges=split.whole_words))
    backend.pre_tokenizer = split.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str, vocabulary: _Vocabulary) -> tuple[str, str]:
    """Left and right of "left right"; a byte that is a space is never written as one, so the first inner space separates."""
    at = merge.find(" ", 1)
    if at < 0:
        raise ModelError(f"{vocabulary.fields.path}: merge {merge[:40]!r} is not two tokens: the file is corrupt, fetch it again")
    return merge[:at], merge[at + 1 :]


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids, merges=merges, **options)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{vocabulary.fields.path}: vocabulary and merges contradict each other ({error}): fetch it again") from None


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    fields = vocabulary.fields
    scores = fields.get("scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise ModelError(f"{fields.path}: {len(vocabulary.tokens):,} tokens and {_length(scores)} scores: no usable vocabulary")
    unknown = vocabulary.id_of("unknown")
    has_bytes = _BYTE in vocabulary.types
    backend = tokenizers.Tokenizer(
        _bpe(
            vocabulary,
            _merges_of_scores(vocabulary, scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    prefix = fields.flag("add_space_prefix", True)
    to_piece = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_piece]) if prefix else to_piece
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges_of_scores(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Merges, best score first: SentencePiece joins the neighbours whose union has the highest score, however it is cut."""
    ids = vocabulary.ids
    mergeable = {_NORMAL, _USER_DEFINED}
    order = sorted((i for i, t in enumerate(vocabulary.types) if t in mergeable), key=lambda i: -scores[i])
    merges: list[tuple[str, str]] = []
    for index in order:
        piece = vocabulary.tokens[index]
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in ids and piece[at:] in ids]
        if len(cuts) > 1:
            cuts.sort(key=lambda cut: (ids[cut[0]], ids[cut[1]]))
        merges += cuts
    return merges


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens, which only markup may produce, and user-defined ones, which are never cut."""

    def of(*kinds: int) -> list[AddedToken]:
        # A duplicate name keeps its first id; the others can never be produced.
        wanted = [
            t for i, (t, k) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)) if k in kinds and vocabulary.ids[t] == i
        ]
        return [AddedToken(token, normalized=False, special=_CONTROL in kinds) for token in wanted if token]

    backend.add_special_tokens(of(_CONTROL, _UNKNOWN))
    backend.add_tokens(of(_USER_DEFINED))
