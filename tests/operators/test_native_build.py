"""Building the native library: cached by content, whole or absent, and never in the way of a machine without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hexad.operators.native import build


def test_no_compiler_is_said(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("HEXAD_CACHE", str(tmp_path))
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.cached_library()
    assert build.main() == 0


def test_a_failing_compiler_leaves_nothing(monkeypatch, tmp_path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'cannot compile this' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HEXAD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(build.BuildError, match="cannot compile this"):
        build.cached_library()
    assert list((tmp_path / "cache" / "native").iterdir()) == []


@pytest.mark.parametrize("environment", [{"HEXAD_NATIVE_ISA": "off"}, {"CXX": "no-such-compiler"}])
def test_torch_serves_without_the_library(environment, tmp_path) -> None:
    """A fresh process: the choice is made once a process."""
    code = (
        "import torch\n"
        "from hexad.operators.load import load_operators\n"
        "from hexad.operators.packed import PackedLinearArgs\n"
        "args = PackedLinearArgs(32, 16, False, 'q4_0', torch.float32, torch.float32, 'cpu')\n"
        "print([c.provider for c in load_operators().explain('packed_linear', args) if c.chosen])\n"
    )
    env = {**os.environ, "HEXAD_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "['torch']"


def test_unknown_instruction_set_is_refused(tmp_path) -> None:
    code = "from hexad.operators.native.library import probe\nprobe()"
    env = {**os.environ, "HEXAD_NATIVE_ISA": "banana"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode and ("'banana'" in done.stderr or "no native operators" in done.stderr)
