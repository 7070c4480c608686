"""Models of the Hugging Face Hub: `hf:org/name`, through huggingface_hub and its cache. No torch.

The hub's own cache is used, so that models fetched by other tools are found; with HEXAD_CACHE set, a folder in there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hexad.common.cache import cache_dir
from hexad.common.errors import ModelError
from hexad.models.remote.cache import Progress

_REPO = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.txt"]
_IGNORED = ["*/*", "*.bin", "*.pt", "*.pth"]  # sub-folders hold other formats of the same weights


def fetch(spec: str, revision: str | None, progress: Progress) -> tuple[Path, str]:
    """(path, display name) of `org/name`, `org/name/file.gguf` or `org/name:QUANT` (its GGUF file of that name).

    Raises:
        ModelError: a bad name, no such repository or file, no access, or no network.
    """
    repo, file, tag = _parse(spec)
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError:
        raise ModelError("hf: sources need huggingface_hub: pip install hexad[hub], or give a local path") from None
    progress(repo, 0, None)
    try:
        if tag is not None:
            file = _file_of_tag(hub, repo, tag, revision)
        if file is not None:
            return Path(hub.hf_hub_download(repo, file, revision=revision, cache_dir=_hub_cache())), Path(file).stem
        return _snapshot(hub, repo, revision), repo.split("/", 1)[1]
    except errors.GatedRepoError:
        raise ModelError(f"hf:{repo} is gated: accept its terms on the hub, and set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(f"hf:{repo}: no such repository (or it is private: set HF_TOKEN)") from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"hf:{repo} has no revision {revision!r}") from None
    except errors.EntryNotFoundError as error:
        raise ModelError(f"hf:{repo}: no such file, or the hub cannot be reached ({str(error)[:200]})") from None
    except ModelError:
        raise
    except Exception as error:  # connection errors of whichever HTTP library it uses
        raise ModelError(
            f"hf:{repo} could not be fetched ({type(error).__name__}: {str(error)[:200]}); check the network, or give a path"
        ) from None


def is_repo(name: str) -> bool:
    """Whether `name` looks like org/name."""
    return bool(_REPO.match(name))


def local_models() -> list[tuple[str, Path, int]]:
    """(source, path, bytes) of what the hub's cache holds; empty without the library."""
    try:
        import huggingface_hub as hub

        found = hub.scan_cache_dir(_hub_cache())
    except Exception:  # no library, or no cache yet
        return []
    models = []
    for repo in found.repos:
        for revision in sorted(repo.revisions, key=lambda r: -r.last_modified)[:1]:
            names = [f.file_name for f in revision.files]
            if repo.repo_type == "model" and any(n.endswith((".safetensors", ".gguf")) for n in names):
                models.append((f"hf:{repo.repo_id}", Path(revision.snapshot_path), int(revision.size_on_disk)))
    return models


def _hub_cache() -> str | None:
    return str(cache_dir() / "hub") if os.environ.get("HEXAD_CACHE") else None


def _parse(spec: str) -> tuple[str, str | None, str | None]:
    """(repository, file, quantisation tag)."""
    path, _, tag = spec.partition(":")
    parts = path.split("/", 2)
    repo = "/".join(parts[:2])
    if not is_repo(repo) or (len(parts) == 3 and (not parts[2].endswith(".gguf") or ".." in parts[2])):
        raise ModelError(f"hf:{spec[:120]} is not a repository: write hf:org/name, hf:org/name/file.gguf or hf:org/name:Q4_K_M")
    return repo, parts[2] if len(parts) == 3 else None, tag or None


def _file_of_tag(hub: Any, repo: str, tag: str, revision: str | None) -> str:
    files: list[str] = [f for f in hub.list_repo_files(repo, revision=revision) if f.endswith(".gguf")]
    hits = [f for f in files if re.search(rf"(^|[._-]){re.escape(tag)}\.gguf$", f, re.IGNORECASE)]
    if len(hits) != 1:
        raise ModelError(f"hf:{repo} has {len(hits)} GGUF files for {tag!r}; it has: {', '.join(files[:12]) or 'none'}")
    return hits[0]


def _snapshot(hub: Any, repo: str, revision: str | None) -> Path:
    folder = Path(
        hub.snapshot_download(repo, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED, cache_dir=_hub_cache())
    )
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"hf:{repo} has no *.safetensors files; for a GGUF file, name it: hf:{repo}/FILE.gguf or hf:{repo}:Q4_K_M")
    return folder
