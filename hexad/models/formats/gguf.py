"""GGUF files: metadata and tensor table. Nothing in a header is trusted before it agrees with the file's size. No torch.

Layout, little-endian: magic, version, tensor count, metadata count; metadata as (key, type, value); tensors as (name, dims innermost
first, type, offset); padding up to the alignment; data. Several `-0000i-of-0000n.gguf` files may make up one model.
"""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path
from typing import Any

from hexad.common.errors import ModelError, WeightsError
from hexad.models.formats.stored import StoredTensor, check_layout, packed_nbytes

MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
MAX_ALIGNMENT = 2**20
MAX_ARRAY_ENTRIES = 2**23  # of all metadata arrays together: a vocabulary with scores, types and merges has a million or two

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_FORMAT_OF = {
    0: "float32", 1: "float16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0",
    10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k",
    24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16",
}  # fmt: skip
_UNREAD = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_SPLIT = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


class GGUFFile:
    """Metadata and tensor table of a GGUF model. Immutable after opening; holds no file handle."""

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: dict[str, StoredTensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Read and check the headers of `path`, and of its sibling parts if the model is split.

        Raises:
            WeightsError: unreadable, cut short, corrupt, of an unknown version or tensor type, or a part is missing.
        """
        metadata, tensors = _read(path)
        parts = metadata.get("split.count", 1)
        if not isinstance(parts, int) or parts <= 1:
            return cls(path, metadata, tensors)
        for part in _other_parts(path, parts):
            for name, tensor in _read(part)[1].items():
                if name in tensors:
                    raise WeightsError(f"tensor {name!r} is both in {tensors[name].path.name} and in {part.name}: remove one of the files")
                tensors[name] = tensor
        return cls(path, metadata, tensors)


def _other_parts(path: Path, count: int) -> list[Path]:
    match = _SPLIT.match(path.name)
    if match is None or count > 99_999 or int(match[2]) != 1:
        raise WeightsError(f"{path}: one of {count} parts; name the first one, called ...-00001-of-{count:05d}.gguf")
    parts = [path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(2, count + 1)]
    for part in parts:
        if not part.is_file():
            raise WeightsError(f"{path.parent}: part {part.name!r} of {count} is missing: fetch the model again")
    return parts


def _read(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).read()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:  # mmap of an empty file
        raise WeightsError(f"{path}: the file is empty: fetch it again") from None


class _Reader:
    """A cursor over one file; every read is checked against what is left."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0
        self.entries_left = MAX_ARRAY_ENTRIES

    def read(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        tensor_count, key_count = self._counts()
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._name("metadata key")
            if key in metadata:
                raise self._corrupt(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(self._scalar("I"), 0)
        infos = [self._tensor_info() for _ in range(tensor_count)]
        return metadata, self._place(infos, metadata.get("general.alignment", 32))

    def _counts(self) -> tuple[int, int]:
        if self.data[:4] != b"GGUF":
            raise WeightsError(f"{self.path}: not a GGUF file (it starts with {bytes(self.data[:4])!r})")
        self.at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            hint = "big-endian files are not read" if version & 0xFFFF == 0 else "versions 2 and 3 are read"
            raise WeightsError(f"{self.path}: GGUF version {version}: {hint}; convert it again")
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        # The shortest tensor entry takes 24 bytes, the shortest metadata entry 13.
        if tensor_count * 24 + key_count * 13 > self.size:
            raise self._corrupt(f"it claims {tensor_count:,} tensors and {key_count:,} metadata keys in {self.size:,} bytes")
        return tensor_count, key_count

    def _corrupt(self, what: str) -> WeightsError:
        return WeightsError(f"{self.path}: {what}: the file is cut short or corrupt, fetch it again")

    def _take(self, nbytes: int) -> int:
        """Advance by `nbytes`; returns where they start."""
        start = self.at
        if nbytes > self.size - start:
            raise self._corrupt(f"{nbytes:,} bytes wanted at byte {start:,} of {self.size:,}")
        self.at = start + nbytes
        return start

    def _scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        return layout.unpack_from(self.data, self._take(layout.size))[0]

    def _string(self) -> bytes:
        length = self._scalar("Q")
        start = self._take(length)
        return self.data[start : start + length]

    def _name(self, what: str) -> str:
        try:
            return self._string().decode()
        except UnicodeDecodeError:
            raise self._corrupt(f"a {what} is not UTF-8") from None

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string().decode(errors="replace")
        if kind != _ARRAY or depth >= MAX_ARRAY_DEPTH:
            raise self._corrupt(f"metadata type {kind} at depth {depth}")
        return self._array(depth)

    def _array(self, depth: int) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if count > self.entries_left:
            raise self._corrupt(f"a metadata array claims {count:,} entries (at most {MAX_ARRAY_ENTRIES:,} in all)")
        self.entries_left -= count
        if kind in _SCALARS:
            layout = struct.Struct("<" + _SCALARS[kind])
            start = self._take(count * layout.size)
            return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.data, start))
        if count * (8 if kind == _STRING else 12) > self.size - self.at:
            raise self._corrupt(f"an array claims {count:,} entries")
        if kind == _STRING:
            return self._strings(count)
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """The hot loop: vocabularies and merges are hundreds of thousands of strings."""
        out: list[str] = []
        data, at, size, length_of = self.data, self.at, self.size, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > size:
                raise self._corrupt(f"a string wanted at byte {at:,} of {size:,}")
            end = at + 8 + length_of(data, at)[0]
            if end > size:
                raise self._corrupt(f"a string of {end - at - 8:,} bytes at byte {at:,} of {size:,}")
            out.append(data[at + 8 : end].decode(errors="replace"))
            at = end
        self.at = at
        return out

    def _tensor_info(self) -> tuple[str, tuple[int, ...], str, int]:
        name = self._name("tensor name")
        dims = self._scalar("I")
        if dims > MAX_DIMS:
            raise self._corrupt(f"tensor {name!r} claims {dims} dimensions (at most {MAX_DIMS})")
        shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
        kind, offset = self._scalar("I"), self._scalar("Q")
        if kind not in _FORMAT_OF:
            shown = _UNREAD.get(kind, f"type {kind}")
            raise WeightsError(f"{self.path}: tensor {name!r} is stored as {shown}; read: {', '.join(_FORMAT_OF.values())}: requantise it")
        return name, shape, _FORMAT_OF[kind], offset

    def _place(self, infos: list[tuple[str, tuple[int, ...], str, int]], alignment: Any) -> dict[str, StoredTensor]:
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._corrupt(f"alignment {alignment!r} (a power of two up to {MAX_ALIGNMENT} wanted)")
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, shape, format_name, offset in infos:
            if name in tensors:
                raise self._corrupt(f"tensor {name!r} appears twice")
            if offset % alignment:
                raise self._corrupt(f"tensor {name!r} starts at {offset}, not a multiple of {alignment}")
            nbytes = packed_nbytes(name, shape, format_name, self.path)
            tensors[name] = StoredTensor(name, shape, format_name, self.path, start + offset, nbytes)
        check_layout(tensors.values(), self.path, self.size)
        return tensors


def find_gguf(path: Path) -> Path:
    """The GGUF file at `path`: itself, or the only model in the folder.

    Raises:
        ModelError: none, or several; the message lists them.
    """
    if path.is_file():
        return path
    files = [p for p in sorted(path.glob("*.gguf")) if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", p.name)]
    if len(files) == 1:
        return files[0]
    if not files:
        raise ModelError(f"{path}: no *.gguf file here")
    raise ModelError(f"{path}: several GGUF files ({', '.join(p.name for p in files[:6])}): name one of them")
