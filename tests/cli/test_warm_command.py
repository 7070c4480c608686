"""`hexad warm`: the CPU's library here, and kernels for a card that is not here."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_model import make_model

from hexad.cli.warm import parse_arch
from hexad.common.errors import ConfigError


def warm(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hexad", "warm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_on_a_cpu_the_library_is_built(model: Path) -> None:
    done = warm(str(model), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert re.search(r"native operators \(\w+\): (built in [\d.]+ s|in the cache already); /.*\.so", done.stdout)
    off = warm(str(model), "--device", "cpu", HEXAD_NATIVE_ISA="off")
    assert (off.returncode, "nothing to compile" in off.stdout) == (0, True)


def test_without_a_compiler_it_fails_and_says_what_to_install(model: Path, tmp_path: Path) -> None:
    done = warm(str(model), "--device", "cpu", HEXAD_CACHE=str(tmp_path), CXX="no-such-compiler")
    assert done.returncode == 1
    assert "no-such-compiler" in done.stderr and "install g++" in done.stderr and "Traceback" not in done.stderr


def test_kernels_for_a_card_that_is_not_here(model: Path, tmp_path: Path) -> None:
    """The second run finds everything in the cache, launch stubs included."""
    pytest.importorskip("triton")
    options = [str(model), "--arch", "sm_90", "--max-num-seqs", "2", "--max-num-batched-tokens", "16"]
    first = warm(*options, TRITON_CACHE_DIR=str(tmp_path))
    assert first.returncode == 0, first.stderr
    counts = re.search(r"(\d+) kernels for sm_90 \(any card, NVIDIA H200\): (\d+) compiled, (\d+) in the cache", first.stdout)
    assert counts is not None, first.stdout
    assert int(counts[1]) == int(counts[2]) + int(counts[3]) and int(counts[2]) >= 8
    assert f"[{counts[1]}/{counts[1]}]" in first.stderr
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert sum(path.suffix == ".cubin" for path in files) == int(counts[2])
    assert any(path.name.startswith("cuda_utils") for path in files)
    second = warm(*options, "--quiet", TRITON_CACHE_DIR=str(tmp_path))
    assert f"0 compiled, {counts[1]} in the cache" in second.stdout and second.stderr == ""
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(("text", "value"), [("sm_90", 90), ("sm90a", 90), ("8.0", 80), ("SM_89", 89), ("120", 120)])
def test_names_of_cards(text: str, value: int) -> None:
    assert parse_arch(text) == value


@pytest.mark.parametrize("text", ["h100", "sm_75", "9", ""])
def test_cards_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="sm_80"):
        parse_arch(text)


def test_a_card_and_a_cpu_exclude_each_other(model: Path) -> None:
    done = warm(str(model), "--device", "cpu", "--arch", "sm_90")
    assert done.returncode == 2 and "--arch names a card" in done.stderr


def test_what_is_warmed_is_what_a_start_looks_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tensors with memory, laid out as a step's are, ask for the kernel that tensors without memory compiled."""
    pytest.importorskip("triton")
    from hexad.engine.step_inputs import _send
    from hexad.operators.args import NormArgs
    from hexad.operators.triton import ahead, rows
    from hexad.operators.triton.launch import Target

    if rows.target().capability:
        pytest.skip("with a card here the GPU tests show it")
    monkeypatch.setattr(ahead.knobs.cache, "dir", str(tmp_path))
    with ahead.gathering(Target(90, 132, "a card")) as jobs:
        call = rows.bind_rms_norm(NormArgs(64, 1e-5, torch.bfloat16, "cuda"))
        call(torch.empty(3, 64, dtype=torch.bfloat16, device="meta"), torch.empty(64, dtype=torch.bfloat16, device="meta"))
    (job,) = jobs.values()
    heard: list[bool] = []
    ahead.compile_jobs([job], 90, lambda _index, done: heard.append(done.cached))
    real = tuple(torch.zeros(arg.shape, dtype=arg.dtype) for arg in job.args)
    ahead.compile_jobs([ahead.Job(job.launcher, job.grid, real)], 90, lambda _index, done: heard.append(done.cached))
    assert heard[0] is False and len(list(tmp_path.rglob("*.cubin"))) == 1
    import numpy as np

    lengths = [np.arange(n, dtype=np.int32) for n in (3, 5, 1)]
    sent = _send(lengths, torch.device("meta"))
    assert [tensor.shape[0] for tensor in sent] == [3, 5, 1] and all(tensor.storage_offset() * 4 % 16 == 0 for tensor in sent)


def test_launch_stubs_name_the_driver_whatever_the_compiler_leaves_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ubuntu's compilers link with --as-needed: a stub without the driver's name cannot be loaded, and is built again at each start."""
    pytest.importorskip("triton")
    if shutil.which("gcc") is None or shutil.which("readelf") is None:
        pytest.skip("no C compiler")
    from hexad.operators.triton import ahead, rows
    from hexad.operators.triton.launch import Target

    if rows.target().capability:
        pytest.skip("with a card here the GPU tests show it")
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nexec gcc -Wl,--as-needed "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(ahead.knobs.cache, "dir", str(tmp_path / "cache"))
    with ahead.gathering(Target(90, 132, "a card")) as jobs:
        from hexad.operators.args import NormArgs

        call = rows.bind_rms_norm(NormArgs(64, 1e-5, torch.bfloat16, "cuda"))
        call(torch.empty(3, 64, dtype=torch.bfloat16, device="meta"), torch.empty(64, dtype=torch.bfloat16, device="meta"))
    ahead.compile_jobs(list(jobs.values()), 90, lambda _index, _done: None)
    stubs = list((tmp_path / "cache").rglob("*.so"))
    assert len(stubs) == 2
    for stub in stubs:
        needed = subprocess.run(["readelf", "-d", str(stub)], capture_output=True, text=True, check=True).stdout
        assert re.search(r"NEEDED.*libcuda\.so\.1", needed), needed


def test_composites_are_warmed_as_a_start_binds_them(model: Path) -> None:
    """On a card, sums and gates are part of the products: so they must be when the kernels are gathered without one."""
    pytest.importorskip("triton")
    from hexad import compose
    from hexad.cli.warm import _assumed
    from hexad.common.config import HexadConfig
    from hexad.engine.warm import run_steps
    from hexad.hardware.machine import read_machine
    from hexad.operators.triton import ahead
    from hexad.operators.triton.launch import Target
    from hexad.orchestration.decide import resolve

    config = HexadConfig().with_values({"model.model": str(model), "scheduler.max_num_seqs": 2})
    opened = compose.open_model(config)
    config, _ = resolve(config, opened.spec, _assumed(read_machine(), 90))
    assert opened.path is not None
    with ahead.gathering(Target(90, 132, "a card")) as jobs:
        run_steps(config, opened.spec, opened.path)
    products = [job.launcher._constants for job in jobs.values() if "RESIDUAL" in job.launcher._constants]
    assert any(constants["RESIDUAL"] for constants in products)
    assert any(constants.get("ACTIVATION") for constants in products)
