"""The native thread pool by itself, under ThreadSanitizer where the compiler has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from hexad.operators.native.build import COMPILERS, SOURCES

HERE = Path(__file__).parent


@pytest.mark.parametrize("flags", [["-fsanitize=thread", "-g", "-O1"], ["-O2"]], ids=["thread-sanitizer", "plain"])
def test_every_chunk_runs_once(flags: list[str], tmp_path) -> None:
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None or shutil.which(compiler) is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "pool_stress"
    sources = [str(HERE / "pool_stress.cpp"), str(SOURCES / "pool.cpp")]
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-pthread", *flags, f"-I{SOURCES}", *sources, "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("this compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    seed = str(time.time_ns() % 2**31)
    print("seed", seed)
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    done = subprocess.run([str(program), seed], capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0 and done.stdout == "done\n", done.stdout + done.stderr[-4000:]
