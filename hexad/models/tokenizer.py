"""Text <-> token ids, from a Hugging Face folder or GGUF metadata. No torch, and no transformers (slow to import).

Thread-safe: encoding and decoding change nothing. Encoding a long text releases the interpreter lock, so it belongs in threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import tokenizers

from hexad.common.errors import ModelError
from hexad.models.formats.built import BuiltTokenizer
from hexad.models.formats.gguf import GGUFFile, find_gguf
from hexad.models.formats.gguf_tokenizer import tokenizer_of_gguf
from hexad.models.formats.hf_tokenizer import tokenizer_of_folder

LONG_TEXT_CHARS = 1_000  # from here on `encode` takes the batch call: the plain one keeps the interpreter lock


class HasPath(Protocol):
    """Anything that says where a model lies, such as `sources.ModelFiles`."""

    @property
    def path(self) -> Path: ...


class Tokenizer:
    """One vocabulary. `vocab_size` is its own: the network's embedding may have more rows."""

    def __init__(self, built: BuiltTokenizer) -> None:
        self._backend = built.backend
        self._special = built.special_ids
        self._plain: tokenizers.Tokenizer | None = None  # a copy that reads special tokens' names as text
        self._added = {i: token.content for i, token in built.backend.get_added_tokens_decoder().items()}
        self._style, self._drops_space = _decoder_style(built.backend)
        self.bos_token_id = built.bos_id
        self.eos_token_id = built.eos_id
        self.pad_token_id = built.pad_id
        # Added tokens may leave a gap behind the others: ids are counted, not tokens.
        self.vocab_size: int = max(built.backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in self._added), 0)
        self._bytes: list[bytes | None] | None = None

    @classmethod
    def from_files(cls, files: HasPath | Path | str, override: str | None = None) -> Tokenizer:
        """The tokenizer of the model at `files`: a folder, a .gguf file, or what `sources.fetch` returned.

        Args:
            override: instead of the model's own: a folder or file, or `pre:NAME`, the word split of a GGUF file that records none.

        Raises:
            ModelError: none there, or one that is not understood; the message says what to do.
        """
        path = Path(files) if isinstance(files, str | Path) else files.path
        pre = override.removeprefix("pre:") if override and override.startswith("pre:") else None
        if override and pre is None:
            path = Path(override)
        if not path.exists():
            raise ModelError(f"{path}: no such file or folder: name one that holds tokenizer.json or a .gguf file")
        if path.name == "tokenizer.json":
            path = path.parent
        if path.is_dir() and ((path / "tokenizer.json").is_file() or not any(path.glob("*.gguf"))) and pre is None:
            return cls(tokenizer_of_folder(path))
        file = GGUFFile.open(find_gguf(path))
        return cls(tokenizer_of_gguf(file.metadata, file.path, pre))

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Ids of `text`.

        Args:
            add_special_tokens: put the model's BOS or EOS around it, if it uses them.
            allow_special: names of special tokens in the text become these tokens; False: they are text like any other.
        """
        if len(text) > LONG_TEXT_CHARS:
            return self.encode_batch([text], add_special_tokens, allow_special)[0]
        ids: list[int] = self._backend_for(allow_special).encode(_valid(text), add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True, allow_special: bool = True) -> list[list[int]]:
        """`encode` of each text, in parallel."""
        backend = self._backend_for(allow_special)
        return [e.ids for e in backend.encode_batch_fast([_valid(t) for t in texts], add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids. Ids outside the vocabulary add nothing; bytes that are no UTF-8 become U+FFFD."""
        ids = [i for i in token_ids if 0 <= i < self.vocab_size and not (skip_special_tokens and i in self._special)]
        if self._style == "other":
            text: str = self._backend.decode(ids, skip_special_tokens=False)
            return text
        table = self._byte_table()
        joined = b"".join(table[i] or b"" for i in ids)
        if self._drops_space and joined.startswith(b" "):
            joined = joined[1:]
        return joined.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that the token adds in the middle of a text (a special token: its name); None when that is not known."""
        if self._style == "other":
            return None
        return (self._byte_table()[token_id] or b"") if 0 <= token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is markup, hidden from text by default."""
        return token_id in self._special

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling; None outside of it."""
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return token

    def token_to_id(self, token: str) -> int | None:
        index: int | None = self._backend.token_to_id(_valid(token))
        return index

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self.id_to_token(self.eos_token_id)

    def to_json(self) -> str:
        """As a tokenizer.json, for libraries that read one (grammar compilers)."""
        text: str = self._backend.to_str()
        return text

    def _backend_for(self, allow_special: bool) -> tokenizers.Tokenizer:
        if allow_special:
            return self._backend
        if self._plain is None:
            plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
            plain.encode_special_tokens = True
            self._plain = plain
        return self._plain

    def _byte_table(self) -> list[bytes | None]:
        if self._bytes is None:
            names: list[str | None] = [None] * self.vocab_size
            for name, index in self._backend.get_vocab(with_added_tokens=True).items():
                if index < self.vocab_size:
                    names[index] = name
            spell = _SPELLING[self._style]
            self._bytes = [
                self._added_bytes(i) if i in self._added else None if name is None else spell(name) for i, name in enumerate(names)
            ]
        return self._bytes

    def _added_bytes(self, index: int) -> bytes:
        name = self._added[index]
        return (name if self._style == "byte_level" else name.replace("▁", " ")).encode()


def _valid(text: str) -> str:
    """Lone surrogates, which JSON escapes can smuggle in, become U+FFFD; pairs become their character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _decoder_style(backend: tokenizers.Tokenizer) -> tuple[str, bool]:
    """("byte_level" | "pieces" | "metaspace" | "other", whether the decoder drops one space at the start of a text)."""
    decoder = backend.decoder
    if decoder is None:
        return "other", False
    steps = msgspec.json.decode(decoder.__getstate__())
    parts = steps.get("decoders", [steps])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    if kinds == ["Metaspace"] and parts[0].get("replacement") == "▁":
        return "metaspace", parts[0].get("prepend_scheme", "always") != "never"
    is_replace = parts[0].get("type") == "Replace" and parts[0].get("pattern") == {"String": "▁"} and parts[0].get("content") == " "
    if is_replace and kinds[1:3] == ["ByteFallback", "Fuse"]:
        if kinds[3:] == []:
            return "pieces", False
        if kinds[3:] == ["Strip"] and (parts[3].get("content"), parts[3].get("start"), parts[3].get("stop")) == (" ", 1, 0):
            return "pieces", True
    return "other", False


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print stand for themselves, the others for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(b): b for b in printable}
    hidden = (b for b in range(256) if b not in printable)
    return alphabet | {chr(0x100 + i): b for i, b in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[c] for c in token])
    except KeyError:  # not spelt in the alphabet: literal text
        return token.encode()


def _metaspace_bytes(token: str) -> bytes:
    return token.replace("▁", " ").encode()


def _piece_bytes(token: str) -> bytes:
    """A SentencePiece piece; <0x0A> and its like are single bytes."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return _metaspace_bytes(token)


_SPELLING = {"byte_level": _byte_level_bytes, "pieces": _piece_bytes, "metaspace": _metaspace_bytes}
