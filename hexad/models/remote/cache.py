"""The local model cache: one folder a model, complete or absent. Safe with several processes. No torch.

<cache>/models/<slug>/            the files, and hexad.json, which is written last
<cache>/models/.<slug>.partial/   a fetch in progress, or interrupted; renamed into place when complete
<cache>/models/.<slug>.lock       held while fetching
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, BinaryIO, Protocol

import msgspec

from hexad.common.cache import cache_dir
from hexad.common.errors import ModelError

MANIFEST = "hexad.json"
COPY_BYTES = 2**20


class Progress(Protocol):
    """Hears how a fetch goes: `what` is a file or step, `total_bytes` None while unknown."""

    def __call__(self, what: str, done_bytes: int, total_bytes: int | None) -> None: ...


def silent(what: str, done_bytes: int, total_bytes: int | None) -> None:
    """No progress shown."""


class CachedFile(msgspec.Struct, frozen=True):
    """One file of a cached model, by its path inside the folder."""

    name: str
    nbytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a cache folder holds, and where it came from."""

    source: str
    revision: str | None = None
    files: tuple[CachedFile, ...]
    main: str = ""  # the .gguf file, or "" for a folder of Hugging Face files


def models_dir() -> Path:
    return cache_dir() / "models"


def slug(source: str, revision: str | None) -> str:
    """A folder name for a source: readable, and unique through a digest of the whole."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", source).strip("-.")[:80]
    digest = hashlib.sha256(f"{source}\0{revision or ''}".encode()).hexdigest()[:8]
    return f"{readable}-{digest}"


def obtain(source: str, revision: str | None, fill: Callable[[Path], Manifest]) -> tuple[Path, Manifest]:
    """The cached folder of a source; `fill` fetches it into an empty or partly filled folder if it is not here.

    Raises:
        ModelError: what `fill` raises, or the cache cannot be written.
    """
    folder = models_dir() / slug(source, revision)
    manifest = read_manifest(folder)
    if manifest is not None:
        return folder, manifest
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock")):
            manifest = read_manifest(folder)
            return folder, manifest if manifest is not None else _fill(folder, fill)
    except OSError as error:
        raise ModelError(f"cannot write the model cache {folder.parent}: {error}; set HEXAD_CACHE to a folder with enough room") from None


def _fill(folder: Path, fill: Callable[[Path], Manifest]) -> Manifest:
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(exist_ok=True)
    try:
        manifest = fill(partial)
    finally:
        if not any(partial.iterdir()):  # nothing to continue from
            partial.rmdir()
    (partial / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    if folder.exists():  # was there, but damaged
        shutil.rmtree(folder)
    partial.rename(folder)
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest, if the folder is complete: every file there with its size."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        complete = all((folder / f.name).stat().st_size == f.nbytes for f in manifest.files)
    except (OSError, msgspec.DecodeError):
        return None
    return manifest if complete else None


def append_checked(source: IO[bytes], target: Path, progress: Callable[[int], None]) -> tuple[int, str]:
    """Append a stream to a file; returns (bytes, sha256) of what was appended."""
    digest, count = hashlib.sha256(), 0
    with target.open("ab") as out:
        while block := source.read(COPY_BYTES):
            out.write(block)
            digest.update(block)
            count += len(block)
            progress(count)
    return count, digest.hexdigest()


def hash_file(path: Path) -> str:
    """sha256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process at a time; the others wait. The lock dies with its process."""
    with path.open("a+b") as file:
        _lock(file)
        try:
            yield
        finally:
            _unlock(file)


try:
    import fcntl

    def _lock(file: BinaryIO) -> None:
        fcntl.flock(file, fcntl.LOCK_EX)

    def _unlock(file: BinaryIO) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)

except ImportError:  # Windows
    import msvcrt

    def _lock(file: BinaryIO) -> None:
        while True:
            try:
                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)  # type: ignore[attr-defined,unused-ignore]
                return
            except OSError:  # gives up after ten seconds by itself
                continue

    def _unlock(file: BinaryIO) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined,unused-ignore]
