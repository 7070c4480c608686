"""Models at https:// (standard library), s3:// and gs:// (fsspec): a .gguf file, or a folder of Hugging Face files. No torch.

Downloads resume: an interrupted file continues where it stopped if the server still has the same one. `#sha256=...` behind a file's
address is checked; without it the length is, and the file's own header afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hexad.common.errors import ModelError
from hexad.models.formats.safetensors import INDEX_NAME
from hexad.models.remote.cache import COPY_BYTES, CachedFile, Manifest, Progress, hash_file

ATTEMPTS = 5
BACKOFF_S = 0.2  # before the second attempt; doubles
TIMEOUT_S = 30.0
_OPTIONAL = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip


class MissingFileError(Exception):
    """The server has no such file."""


def fill(folder: Path, source: str, progress: Progress) -> Manifest:
    """Fetch the file or folder at `source` into `folder`.

    Raises:
        ModelError: unreachable, incomplete after several attempts, or another checksum than the one given.
    """
    address, _, fragment = source.partition("#")
    path = urllib.parse.urlsplit(address).path
    if path.endswith(".gguf"):
        name = urllib.parse.unquote(path.rsplit("/", 1)[1])
        try:
            file = _fetch(address, folder, name, progress)
        except MissingFileError:
            raise ModelError(f"{address}: there is no such file: check the address") from None
        expected = fragment.removeprefix("sha256=").lower() if fragment.startswith("sha256=") else None
        if expected is not None and expected != file.sha256:
            (folder / name).unlink()
            raise ModelError(f"{address}: sha256 is {file.sha256}, but {expected} was asked for: another file, nothing was kept")
        return Manifest(source=source, files=(file,), main=name)
    return Manifest(source=source, files=tuple(_fetch_folder(address.rstrip("/"), folder, progress)))


def _fetch_folder(base: str, folder: Path, progress: Progress) -> list[CachedFile]:
    try:
        files = [_fetch(f"{base}/config.json", folder, "config.json", progress)]
    except MissingFileError:
        raise ModelError(f"{base}: neither a .gguf file nor a folder with config.json: give the address of one of the two") from None
    for name in _OPTIONAL:
        with contextlib.suppress(MissingFileError):
            files.append(_fetch(f"{base}/{name}", folder, name, progress))
    try:
        index = _fetch(f"{base}/{INDEX_NAME}", folder, INDEX_NAME, progress)
        weights = _shards(folder / INDEX_NAME)
        files.append(index)
    except MissingFileError:
        weights = ["model.safetensors"]
    for name in weights:
        try:
            files.append(_fetch(f"{base}/{name}", folder, name, progress))
        except MissingFileError:
            raise ModelError(f"{base}: {name} is missing there: the model is incomplete") from None
    return files


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(msgspec.json.decode(index.read_bytes())["weight_map"].values()))
    except (msgspec.DecodeError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index.name}: not a valid shard index ({error})") from None
    if not all(isinstance(n, str) and n and Path(n).name == n for n in names):
        raise ModelError(f"{index.name}: a shard name leaves the folder")
    return names


def _fetch(address: str, folder: Path, name: str, progress: Progress) -> CachedFile:
    """One file, resumed if a part of it is there."""
    if not name or Path(name).name != name or name.startswith("."):
        raise ModelError(f"{address}: {name!r} is not a file name")
    target = folder / name
    if target.exists():  # complete: it only gets this name at the end
        return CachedFile(name, target.stat().st_size, hash_file(target))
    part = folder / f"{name}.part"
    opener: Callable[..., _Transfer] = _http_transfer if address.startswith(("https://", "http://")) else _fsspec_transfer
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _transfer_into(opener, address, part, name, progress)
            break
        except (OSError, http.client.HTTPException) as error:
            if attempt == ATTEMPTS:
                raise ModelError(
                    f"{address}: not reachable, or cut off {ATTEMPTS} times ({error}); what came is kept: running this again continues"
                ) from None
            time.sleep(BACKOFF_S * 2 ** (attempt - 1))
    part.with_suffix(".tag").unlink(missing_ok=True)
    digest = hash_file(part)
    part.rename(target)
    return CachedFile(name, target.stat().st_size, digest)


class _Transfer:
    """An open download: `start` is where the stream begins, `total` the whole file's size if known, `tag` its version."""

    def __init__(self, stream: BinaryIO, start: int, total: int | None, tag: str) -> None:
        self.stream, self.start, self.total, self.tag = stream, start, total, tag


def _transfer_into(opener: Callable[..., _Transfer], address: str, part: Path, name: str, progress: Progress) -> None:
    tag_file = part.with_suffix(".tag")
    have = part.stat().st_size if part.exists() and tag_file.exists() else 0
    transfer = opener(address, have, tag_file.read_text() if have else "")
    with contextlib.closing(transfer.stream):
        tag_file.write_text(transfer.tag)
        with part.open("r+b" if transfer.start else "wb") as out:
            out.seek(transfer.start)
            done = transfer.start
            progress(name, done, transfer.total)
            while block := transfer.stream.read(COPY_BYTES):
                out.write(block)
                done += len(block)
                progress(name, done, transfer.total)
            out.truncate()
    if transfer.total is not None and done != transfer.total:
        raise ConnectionError(f"{done:,} of {transfer.total:,} bytes came")


def _http_transfer(address: str, have: int, tag: str) -> _Transfer:
    request = urllib.request.Request(address, headers={"User-Agent": "hexad", "Accept-Encoding": "identity"})
    if have and tag:  # without a tag the server could not tell whether the file is still the same
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", tag)
    try:
        response: Any = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (404, 410):
            raise MissingFileError(address) from None
        if error.code == 416:  # the part is not shorter than the file: start again
            return _http_transfer(address, 0, "")
        if error.code in (401, 403):
            raise ModelError(f"{address}: the server refuses access ({error.code})") from None
        raise ConnectionError(f"status {error.code}") from None
    start = have if response.status == 206 else 0
    length = response.headers.get("Content-Length")
    total = start + int(length) if length and length.isdigit() else None
    version = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
    return _Transfer(response, start, total, "" if version.startswith("W/") else version)


def _fsspec_transfer(address: str, have: int, tag: str) -> _Transfer:
    scheme = address.split(":", 1)[0]
    try:
        import fsspec  # type: ignore[import-untyped,unused-ignore]

        files, path = fsspec.core.url_to_fs(address)
        info = files.info(path)
    except ImportError as error:
        raise ModelError(
            f"{scheme}:// needs another package: pip install hexad[hub] {'s3fs' if scheme == 's3' else 'gcsfs'} ({error})"
        ) from None
    except FileNotFoundError:
        raise MissingFileError(address) from None
    version = hashlib.sha256(f"{info.get('ETag') or info.get('etag') or info.get('mtime')}/{info['size']}".encode()).hexdigest()
    start = have if have <= info["size"] and tag == version else 0
    stream = files.open(path, "rb")
    stream.seek(start)
    return _Transfer(stream, start, int(info["size"]), version)
