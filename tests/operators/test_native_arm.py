"""The native operators for 64-bit ARM: every source compiles with warnings as errors, and under an emulator the products are right.

A cross compiler is HEXAD_AARCH64_CXX (a command), aarch64-linux-gnu-g++, or the package `ziglang` (of the extra `dev`); an emulator is
HEXAD_AARCH64_RUN, qemu-aarch64 or qemu-aarch64-static. Where one is missing its test is skipped.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import shlex
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from native_library import block_of, random_rows

from hexad.operators.native import build
from hexad.operators.native.library import SOURCES

ISAS = tuple(build.targets("aarch64"))


def cross_compiler() -> list[str]:
    given = os.environ.get("HEXAD_AARCH64_CXX")
    if given:
        return shlex.split(given)
    if shutil.which("aarch64-linux-gnu-g++"):
        return ["aarch64-linux-gnu-g++"]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]
    pytest.skip("no compiler for 64-bit ARM: HEXAD_AARCH64_CXX, aarch64-linux-gnu-g++ or the package ziglang")


def emulator() -> list[str]:
    given = os.environ.get("HEXAD_AARCH64_RUN")
    found = [given] if given else [path for name in ("qemu-aarch64", "qemu-aarch64-static") if (path := shutil.which(name))]
    if not found:
        pytest.skip("no emulator of 64-bit ARM: HEXAD_AARCH64_RUN, qemu-aarch64 or qemu-aarch64-static")
    return shlex.split(found[0])


def call(command: list[str], **options) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, **options)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr[-4000:]}{done.stdout[-1000:]}"
    return done


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> list[str]:
    """Every translation unit, compiled once."""
    compiler, folder = cross_compiler(), tmp_path_factory.mktemp("arm")
    units = build.commands([*compiler, "-Werror"], "aarch64", ISAS, build.OPTIMISED, folder)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in [pool.submit(call, unit) for unit in units]:
            job.result()
    return [unit[-1] for unit in units]


def test_every_source_compiles_without_a_warning(objects, tmp_path) -> None:
    sources = {path.stem for path in build.SOURCES.glob("*.cpp")}
    others = {f"isa_{isa}" for isa in build.targets("x86_64")} - {"isa_portable"}
    assert {Path(path).stem for path in objects} == sources - others
    library = tmp_path / "library.so"
    call([*cross_compiler(), "-shared", "-nostdlib", *objects, "-o", str(library)])
    assert struct.unpack_from("<H", library.read_bytes(), 18) == (183,)  # of the ELF header: 64-bit ARM


def test_products_agree_with_float64_under_an_emulator(objects, tmp_path) -> None:
    run, program = emulator(), tmp_path / "native_cases"
    main = str(Path(__file__).with_name("native_cases.cpp"))
    call([*cross_compiler(), "-std=c++17", "-O1", "-static", "-pthread", main, *objects, "-o", str(program)])
    cases = tmp_path / "cases"
    seed = time.time_ns() % 2**31
    print("seed", seed)
    make = torch.Generator().manual_seed(seed)
    count = 0
    with cases.open("wb") as stream:
        for source, number in SOURCES.items():
            for rows, columns, tokens in ((1, 1, 1), (37, 2, 3), (64, 1, 6)):
                width = columns * max(32, block_of(source)) + (5 if block_of(source) == 1 else 0)
                stored, weight = random_rows(make, source, rows, width)
                for dtype, name in enumerate((torch.float32, torch.bfloat16)):
                    x = torch.randn(tokens, width, generator=make).to(name)
                    content = stored.view(torch.uint8).numpy().tobytes()
                    stream.write(struct.pack("<6q", number, rows, width, tokens, dtype, len(content)) + content)
                    stream.write(x.view(torch.uint8).numpy().tobytes() + (x.double() @ weight.T).numpy().tobytes())
                    count += 1
    for isa in ISAS:
        lines = call([*run, str(program), isa, str(cases)]).stdout.splitlines()
        assert lines[0] == isa and len(lines) == 1 + count
        errors = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines[1:]}
        assert max(errors.values()) < 1e-4, errors
