"""Result files: one run each, `{"load", "model", "format", "device", "tree", "command", "versions", "calibration", "metrics"}`.

A file is written whole or not at all, and again after every step of a sweep, so that an interrupted run leaves a valid file with
`"partial": true`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hexad
from hexad.bench.loads import Load
from hexad.common.config import HexadConfig
from hexad.common.errors import ConfigError
from hexad.hardware.machine import read_processor

_VERSIONS = ("torch", "triton", "numpy", "transformers", "tokenizers", "msgspec", "pyzmq", "uvicorn")


def tree_hash(folder: Path | None = None) -> str:
    """The hash that git gives the package folder: what `git rev-parse HEAD:hexad` prints for a clean checkout of the same files.

    Works without git and from an installed package; compiled files and caches are left out.
    """
    return _tree(folder or Path(hexad.__file__).parent).hex()


def _tree(folder: Path) -> bytes:
    entries: list[tuple[bytes, bytes]] = []
    for path in folder.iterdir():
        if path.name == "__pycache__" or path.suffix in (".pyc", ".so", ".pyd") or path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            digest = _tree(path)
            if digest != _EMPTY_TREE:  # git knows no empty folders
                entries.append((path.name.encode() + b"/", b"40000 " + path.name.encode() + b"\0" + digest))
            continue
        entries.append((path.name.encode(), _mode(path) + b" " + path.name.encode() + b"\0" + _blob(path)))
    body = b"".join(entry for _, entry in sorted(entries))
    return _sha1(b"tree", body)


def _mode(path: Path) -> bytes:
    if path.is_symlink():
        return b"120000"
    return b"100755" if path.stat().st_mode & stat.S_IXUSR else b"100644"


def _blob(path: Path) -> bytes:
    return _sha1(b"blob", os.readlink(path).encode() if path.is_symlink() else path.read_bytes())


def _sha1(kind: bytes, body: bytes) -> bytes:
    return hashlib.sha1(kind + b" " + str(len(body)).encode() + b"\0" + body, usedforsecurity=False).digest()


_EMPTY_TREE = _sha1(b"tree", b"")


def versions() -> dict[str, str]:
    """Versions of Python, this package and the libraries that matter for speed."""
    found = {"python": platform.python_version(), "hexad": hexad.__version__, "os": f"{platform.system()} {platform.release()}"}
    for package in _VERSIONS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command_line() -> str:
    """The command that was given; of absolute paths the last part alone, so that a result says nothing of the machine's folders."""
    program = Path(sys.argv[0]).name
    return " ".join(["hexad" if program == "__main__.py" else program, *(_without_folder(word) for word in sys.argv[1:])])


def _without_folder(word: str) -> str:
    option, separator, value = word.partition("=")
    if separator and value.startswith("/"):
        return f"{option}={Path(value).name}"
    return Path(word).name if word.startswith("/") else word


def new_result(kind: str, load: Load | None, model: str, weight_format: str) -> dict[str, Any]:
    """A result without metrics, marked partial until `finish`."""
    return {
        "kind": kind,
        "load": load.as_dict() if load else {"name": kind},
        "model": model,
        "format": weight_format,
        "device": {},
        "tree": tree_hash(),
        "command": command_line(),
        "versions": versions(),
        "calibration": None,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "partial": True,
        "flags": [],
        "metrics": {},
    }


def host_result(kind: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A whole result of a measurement that needs neither model nor device: one entry per `num_seqs` of each number in `rows`."""
    processor = read_processor()
    names = [name for name in rows[0] if name != "num_seqs"]
    return {
        **new_result(kind, None, "none", "none"),
        "device": {"name": processor.name, "cores": processor.cores},
        "partial": False,
        "metrics": {name: {str(row["num_seqs"]): row[name] for row in rows} for name in names},
    }


def shown_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Engine options as a result may show them: without the server's, among which are keys."""
    keys = HexadConfig.keys()
    private = {name.partition(".")[2] for name in keys if name.startswith("server.")}
    return {key: value for key, value in options.items() if key.partition(".")[2] not in private and key not in private}


def save(result: dict[str, Any], path: Path | None) -> None:
    """Write `result` atomically; nothing for None."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    temporary.replace(path)
    _written.add(path)


_begun: list[tuple[dict[str, Any], Path]] = []  # results of this command that an interrupt must leave behind
_written: set[Path] = set()


def begin(result: dict[str, Any], path: Path | None) -> None:
    """From now on an interrupt leaves `result` at `path`, however little is in it.

    Raises:
        ConfigError: `path` is a folder.
        OSError: its folder cannot be made or written to.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--json {path} is a folder: name a file, such as {path / 'result.json'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass  # better now than after the run
    _begun.append((result, path))


def keep_begun() -> list[Path]:
    """After an interrupt: write what was begun and never saved, but not over an earlier run's file; names the files of this run."""
    for result, path in _begun:
        if path not in _written and not path.exists():
            save(result, path)
    return [path for _, path in _begun if path in _written]


def forget_begun() -> None:
    """A new command begins: what earlier ones in this process left is none of its business."""
    _begun.clear()
    _written.clear()


def is_result(value: Any) -> bool:
    """Whether a parsed file was written by `hexad bench`."""
    return isinstance(value, dict) and isinstance(value.get("metrics"), dict) and isinstance(value.get("load"), dict) and "kind" in value


def load_results(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Results by file name; files that are valid JSON but of another kind are left out.

    Raises:
        ConfigError: a file that cannot be read, or not one result among them.
    """
    found = {}
    for path in paths:
        try:
            value = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as a result: {error}") from None
        if is_result(value):
            found[path.stem] = value
    if not found:
        raise ConfigError("none of these files is a result of `hexad bench`")
    return found


def load_result(path: Path) -> dict[str, Any]:
    """Read a result file.

    Raises:
        ConfigError: not a result of `hexad bench`.
    """
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a result: {error}") from None
    if not is_result(result):
        raise ConfigError(f"{path} is not a result of `hexad bench`: it has no load and metrics")
    return result
