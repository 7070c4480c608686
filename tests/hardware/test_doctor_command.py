import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from hexad.cli.doctor import app
from hexad.hardware import checks
from hexad.hardware.checks import FAIL, OK, WARN
from hexad.hardware.machine import Gpu, Machine, Processor, read_machine, read_processor
from hexad.hardware.nvml import Nvml
from hexad.hardware.telemetry import Telemetry

run = CliRunner()
GIB = 2**30
CPU = Processor("test", "x86_64", 4, 4, None, ("avx2", "avx512f"), 1, 16 * GIB, 8 * GIB)
GPU = Gpu(0, "NVIDIA H200", 140 * GIB, 139 * GIB, 1980, 1980, 100.0, 700.0, 30)
MACHINE = Machine(CPU, (), None, None, "Linux", "3.11")
WITH_GPU = replace(MACHINE, gpus=(GPU,), driver_version="580.1", driver_cuda="13.0")


def probe(monkeypatch, stdout="2.13.0|13.0|1|(9, 0)\n", code=0, stderr=""):
    class Done:
        returncode = code

    Done.stdout, Done.stderr = stdout, stderr
    monkeypatch.setattr(checks.subprocess, "run", lambda *args, **more: Done)


def test_json_has_machine_and_checks():
    result = run.invoke(app, ["--json"])
    found = json.loads(result.output)
    assert found["machine"]["processor"]["cores"] >= 1 and found["measured"] == {}
    assert {"python", "torch", "memory", "cache"} <= {check["name"] for check in found["checks"]}
    assert result.exit_code == (1 if any(check["status"] == FAIL for check in found["checks"]) else 0)


def test_people_get_a_table():
    assert "instruction sets" in run.invoke(app, []).output


def test_measuring_gives_ceilings():
    found = json.loads(run.invoke(app, ["--json", "--measure", "--device", "cpu", "--seconds", "0.05"]).output)["measured"]["cpu"]
    assert found["read_bytes_s"] > 1e8 and found["gemm_flops_s"]["fp32"] > 1e8
    assert {"1"} <= set(found["read_bytes_s_by_threads"])


def test_torch_that_fits_the_driver(monkeypatch):
    probe(monkeypatch)
    assert {f.status for f in checks.check_torch(WITH_GPU) if f.name in ("torch", "cuda")} == {OK}


@pytest.mark.parametrize(
    ("stdout", "code", "word"),
    [
        ("2.13.0+cpu|-|0|-\n", 0, "CPU build"),
        ("2.13.0|13.0|0|-\n", 0, "does not run with"),
        ("", 1, "importing it failed: libcudart missing"),
    ],
)
def test_torch_that_does_not_fit_fails_with_a_remedy(monkeypatch, stdout, code, word):
    probe(monkeypatch, stdout, code, "Traceback\nlibcudart missing\n")
    failed = [f for f in checks.check_torch(WITH_GPU) if f.status == FAIL]
    assert len(failed) == 1 and word in failed[0].detail and failed[0].fix


def test_low_memory_and_old_processors_are_warned_of():
    low = replace(MACHINE, processor=replace(CPU, memory_available_bytes=GIB // 2, instruction_sets=()))
    assert checks._memory(low).status == WARN and checks._memory(MACHINE).status == OK
    assert checks._instruction_sets(low).status == WARN
    busy = replace(WITH_GPU, gpus=(replace(GPU, memory_free_bytes=GIB),))
    assert checks._memory(busy).status == WARN and checks._memory(WITH_GPU).status == OK


def test_a_container_quota_names_the_variable_to_set(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = checks._quota(replace(MACHINE, processor=replace(CPU, quota_cores=2.0)))
    assert found.status == WARN and "OMP_NUM_THREADS=2" in found.fix


def test_folders_that_cannot_be_written_fail(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = checks._writable("cache", tmp_path / "x")
    assert found.status == FAIL and "HEXAD_CACHE" in found.fix


def test_missing_packages_name_the_command(monkeypatch):
    monkeypatch.setattr(checks, "_version", lambda package: None)
    found = {f.name: f for f in checks._packages()}
    assert found["torch"].status == FAIL and found["torch"].fix == "pip install torch"
    assert found["matplotlib"].status == WARN and "bench" in found["matplotlib"].fix


def test_a_machine_is_read_without_raising():
    machine = read_machine()
    assert machine.processor.cores >= 1 and machine.processor.memory_bytes >= machine.processor.memory_available_bytes > 0
    assert isinstance(json.dumps(machine.as_dict()), str)


def test_container_limits_cut_cores_and_memory(monkeypatch):
    from hexad.hardware import machine

    monkeypatch.setattr(machine, "_cgroup_quota", lambda: 1.5)
    monkeypatch.setattr(machine, "_cgroup_memory", lambda: (GIB, GIB // 4))
    found = read_processor()
    assert found.cores == 1 and found.memory_bytes == GIB and found.memory_available_bytes <= GIB * 3 // 4


def test_without_a_driver_nvml_is_just_not_available(monkeypatch):
    import ctypes

    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with Nvml() as nvml:
        assert not nvml.available


GROWS = """
import os, sys
print("up", flush=True)
sys.stdin.readline()
block = bytearray(os.urandom(2**20) * 64)
print(len(block), flush=True)
sys.stdin.readline()
"""


def test_telemetry_sees_memory_grow():
    with subprocess.Popen([sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdout.readline() == "up\n"
        with Telemetry(interval_s=0.01, pid=process.pid) as telemetry:
            before = telemetry.summary()["peak_rss_bytes"]
            process.stdin.write("\n")
            assert process.stdout.readline() == f"{2**26}\n"
            assert telemetry.summary()["peak_rss_bytes"] >= before + 2**25
            process.stdin.write("\n")
        process.wait()
        assert telemetry.summary()["peak_rss_bytes"] >= before + 2**25  # what was seen stays
