"""Compile the native operators with the system's C++ compiler, once per source, compiler and machine type. No torch.

    python -m hexad.operators.native.build              # compile now instead of at the first start
    python -m hexad.operators.native.build --sanitize   # every instruction set with AddressSanitizer and UBSan, for tests
    python -m hexad.operators.native.build --threads    # with ThreadSanitizer

The library lies in the cache (HEXAD_CACHE, default ~/.cache/hexad) under a name that is a hash of sources and flags; it appears there
whole or not at all, so that several processes may build at once. A machine without a compiler is no error here: `build` says why there
is no library, and the operators of torch serve.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hexad.common.cache import cache_dir

SOURCES = Path(__file__).parent / "src"
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300.0

_COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-pthread")
_WARNINGS = (
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
    "-Wno-uninitialized",
    "-Wno-unknown-warning-option",  # clang does not know the next one
    "-Wno-maybe-uninitialized",
)
_AVX512 = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_PORTABLE: dict[str, tuple[str, ...]] = {"portable": ("-O2",)}  # -O3 takes three times as long to compile
_TARGETS: dict[str, dict[str, tuple[str, ...]]] = {  # machine type -> instruction set -> flags
    "x86_64": {
        **_PORTABLE,
        "avx2": ("-O2", "-mavx2", "-mfma", "-mf16c"),
        "avx512": _AVX512,
        "avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
        "amx": (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
    },
    "aarch64": {**_PORTABLE, "neon": ()},
}
_MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}  # other names of theirs
_NEEDS = {  # as the system names them, best first
    "amx": {"amx_bf16", "amx_tile", "avx512_bf16", "avx512_vnni", "avx512bw", "avx512vl", "avx512dq"},
    "avx512bf16": {"avx512_bf16", "avx512_vnni", "avx512bw", "avx512vl", "avx512dq"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx2": {"avx2", "fma", "f16c"},
}
OPTIMISED = ("-O3", "-DNDEBUG")
SANITISED = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize=alignment",
    "-fno-sanitize-recover=undefined",
)
THREAD_SANITISED = ("-O1", "-g", "-fsanitize=thread")
ALL = "all"


class BuildError(Exception):
    """There is no library; the message says why."""


def cached_library(isa: str = "", flags: tuple[str, ...] = OPTIMISED) -> Path:
    """The library's path, built if it is not there.

    Args:
        isa: the instruction set that is compiled; "": the best one that this machine has; "all": every one of its machine type.

    Raises:
        BuildError: no compiler, or it failed (its first lines are in the message).
    """
    isas = _chosen(isa)
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None or shutil.which(compiler) is None:
        raise BuildError(f"no C++ compiler ({compiler or ', '.join(COMPILERS)}) is installed")
    target = _cache() / f"hexad-{_key(compiler, isas, flags)}.so"
    if not target.is_file():
        try:
            _build(compiler, isas, flags, target)
        except OSError as error:
            raise BuildError(f"cannot write {target.parent}: {error.strerror}; set HEXAD_CACHE to a folder that can be written") from None
    return target


def _cache() -> Path:
    return cache_dir() / "native"


def _machine() -> str:
    return _MACHINES.get(platform.machine(), platform.machine())


def targets(machine: str) -> dict[str, tuple[str, ...]]:
    """Flags of each instruction set of a machine type, the plainest first."""
    return _TARGETS.get(machine, _PORTABLE)


def _chosen(isa: str) -> tuple[str, ...]:
    """Instruction sets to compile. One suffices, and each costs seconds of the first start."""
    machine = _machine()
    if isa == ALL:
        return tuple(targets(machine))
    if isa in targets(machine):
        return (isa,)
    if machine != "x86_64":
        return (list(targets(machine))[-1],)
    found = _processor_flags()
    return (next((name for name, needed in _NEEDS.items() if needed <= found), "portable"),)


def _processor_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def _key(compiler: str, isas: tuple[str, ...], flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256("\0".join((compiler, platform.machine(), *isas, *_COMMON, *flags, repr(_TARGETS))).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _units(machine: str, isas: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Translation units and the flags of each: an instruction set's code must not leak into another's. The slowest come first."""
    defines = tuple(f"-DHX_WITH_{isa.upper()}" for isa in isas)
    common = {
        path.stem: defines if path.stem == "api" else () for path in sorted(SOURCES.glob("*.cpp")) if not path.stem.startswith("isa_")
    }
    return {f"isa_{isa}": targets(machine)[isa] for isa in isas} | common


def commands(compiler: Sequence[str], machine: str, isas: tuple[str, ...], flags: tuple[str, ...], folder: Path) -> list[list[str]]:
    """What compiles each translation unit for `machine`; its object, in `folder`, is the last word."""
    return [
        [*compiler, *_COMMON, *_WARNINGS, *flags, *extra, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(folder / f"{name}.o")]
        for name, extra in _units(machine, isas).items()
    ]


def _build(compiler: str, isas: tuple[str, ...], flags: tuple[str, ...], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
        units = commands([compiler], _machine(), isas, flags, Path(folder))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for job in [pool.submit(_call, unit) for unit in units]:
                job.result()
        library = Path(folder) / target.name
        _call([compiler, "-shared", "-pthread", *flags, *(unit[-1] for unit in units), "-o", str(library)])
        library.replace(target)


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise BuildError(f"the compiler took more than {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        first = "\n".join((done.stderr or done.stdout).splitlines()[:8])
        raise BuildError(f"{command[0]} failed with code {done.returncode}:\n{first}")


def main(arguments: Sequence[str] = ()) -> int:
    """Compile and print the path. Without arguments it never fails: torch serves where there is no library."""
    flags = {"--sanitize": SANITISED, "--threads": THREAD_SANITISED}
    unknown = [argument for argument in arguments if argument not in flags]
    if unknown or len(arguments) > 1:
        print(f"usage: python -m hexad.operators.native.build [{' | '.join(flags)}]", file=sys.stderr)
        return 2
    try:
        print(cached_library(ALL, flags[arguments[0]]) if arguments else cached_library())
    except BuildError as error:
        print(f"native operators are not built, torch serves instead: {error}", file=sys.stderr)
        return 1 if arguments else 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
