"""Headers of safetensors files, one or sharded. Nothing in a header is trusted before it agrees with the file's size. No torch.

Layout: u64 little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data without holes.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from hexad.common.errors import WeightsError
from hexad.models.formats.stored import StoredTensor, check_layout, packed_nbytes

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 2**20
MAX_INDEX_BYTES = 256 * 2**20

_FORMAT_OF = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file by name.

    Raises:
        WeightsError: the file is unreadable, cut short, or its header contradicts itself or the file's size.
    """
    size, blob = _header_bytes(path)
    try:
        entries = msgspec.json.decode(blob, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        decoded = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"{path}: the safetensors header is not valid ({error}): the file is corrupt, fetch it again") from None
    start = 8 + len(blob)
    tensors = {name: _checked(path, name, entry, start) for name, entry in decoded.items()}
    check_layout(tensors.values(), path, size)
    used = sum(t.nbytes for t in tensors.values())
    if start + used != size:
        raise WeightsError(
            f"{path}: {size - start:,} bytes of data, but the tensors of its header take {used:,}: corrupt file, fetch it again"
        )
    return tensors


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Tensors of a model folder: what `model.safetensors.index.json` lists, else `model.safetensors`, else every *.safetensors file.

    Raises:
        WeightsError: no such file, a shard or a tensor of the index is missing (named), or the same tensor is in two files.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        return _read_sharded(index)
    single = folder / "model.safetensors"
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise WeightsError(f"{folder}: no *.safetensors file here (pickled weights are not read): convert them to safetensors")
    return _merge(paths)


def _read_sharded(index: Path) -> dict[str, StoredTensor]:
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise WeightsError(f"{index}: larger than {MAX_INDEX_BYTES:,} bytes, which no index is")
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise WeightsError(f"{index}: not a valid shard index ({error}): fetch it again") from None
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard or shard in ("", ".", ".."):
            raise WeightsError(f"{index}: shard name {shard!r} leaves the folder")
        if not (index.parent / shard).is_file():
            raise WeightsError(f"{index.parent}: shard {shard!r} of {len(shards)} is missing: fetch the model again")
    tensors = _merge([index.parent / shard for shard in shards])
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise WeightsError(f"{index}: tensor {name!r} is not in {shard}: the shards do not belong together, fetch them again")
    return tensors


def _merge(paths: list[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise WeightsError(f"tensor {name!r} is both in {tensors[name].path.name} and in {path.name}: remove one of the files")
            tensors[name] = tensor
    return tensors


def _header_bytes(path: Path) -> tuple[int, bytes]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise WeightsError(f"{path}: {size:,} bytes, but its header claims {length:,}: cut short or not a safetensors file")
            return size, file.read(length)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from None


def _checked(path: Path, name: str, entry: _Entry, start: int) -> StoredTensor:
    """The entry as a StoredTensor, once dtype, shape and offsets agree."""
    format_name = _FORMAT_OF.get(entry.dtype)
    if format_name is None:
        raise WeightsError(f"{path}: tensor {name!r} has dtype {entry.dtype!r}; known: {', '.join(_FORMAT_OF)}")
    shape = tuple(entry.shape)
    nbytes = packed_nbytes(name, shape, format_name, path)
    begin, end = entry.data_offsets
    if begin < 0 or end - begin != nbytes:
        raise WeightsError(
            f"{path}: tensor {name!r} of shape {list(shape)} and dtype {entry.dtype} takes {nbytes:,} bytes, "
            f"but its offsets are {begin}..{end}: corrupt file, fetch it again"
        )
    return StoredTensor(name, shape, format_name, path, start + begin, nbytes)
