import pytest

from hexad.common.errors import ConfigError, OutOfMemoryError
from hexad.hardware.memory import GIB, MemoryBudget
from hexad.hardware.registry import DEVICES, Device, Figure, find_device, match_device
from hexad.hardware.roofline import Work, bound, bound_of_steps, impossible

TOY = Device("toy", "gpu", Figure(1e9, "-"), Figure(100.0, "-"), {"bf16": Figure(1000.0, "-")}, Figure(10.0, "-"))


@pytest.mark.parametrize(
    ("work", "seconds", "binds"),
    [
        (Work(weight_bytes=200, flops={"bf16": 1000}), 2.0, "weights"),
        (Work(weight_bytes=200, flops={"bf16": 3000}), 3.0, "compute"),
        (Work(weight_bytes=200, kv_bytes=500), 7.0, "kv"),
        (Work(weight_bytes=100, kv_bytes=100, attention_flops={"bf16": 5000}), 6.0, "attention"),
        (Work(weight_bytes=100, link_bytes=50), 6.0, "link"),
        (Work(weight_bytes=100, flops={"fp8": 3000}), 3.0, "compute"),  # no fp8 on this device: bf16
    ],
)
def test_bound(work, seconds, binds):
    found = bound(work, TOY)
    assert found.time_s == pytest.approx(seconds)
    assert found.binds == binds


def test_bound_of_steps_adds_up():
    one, two = Work(weight_bytes=100), Work(kv_bytes=100)
    assert bound_of_steps([(one, 3), (two, 2)], TOY).time_s == pytest.approx(5.0)


def test_impossible_results_are_named():
    assert impossible(100.0, 1.0, 100.0) is None
    assert "impossible" in impossible(100.0, 0.5, 100.0)
    assert impossible(1.0, 0.0, 100.0) is not None


def test_every_figure_of_the_registry_has_a_source_and_sane_size():
    for device in DEVICES.values():
        figures = [device.memory_bytes, device.read_bytes_s, *device.rates.values()]
        assert all(len(f.source) > 10 and f.value > 0 for f in figures), device.name
        assert 1e9 < device.memory_bytes.value < 1e12 and 1e10 < device.read_bytes_s.value < 1e13
        assert device.rate("bf16") >= device.rate("fp32") and device.rate("fp8") > 0


def test_devices_are_found_by_any_of_their_names():
    assert find_device("rtx 4090") is find_device("RTX-4090") is find_device("4090")
    assert match_device("NVIDIA H200") is find_device("H200")
    assert match_device("NVIDIA A100-SXM4-40GB") is find_device("A100-40GB")
    assert match_device("NVIDIA L40S") is find_device("l40s")
    assert match_device("Quadro 4000") is None
    with pytest.raises(ConfigError, match="H200"):
        find_device("H220")


def test_budget_counts_down_and_names_the_sum():
    budget = MemoryBudget(10 * GIB, 0.9, 4 * GIB, GIB)
    assert budget.kv_bytes == 4 * GIB
    assert budget.blocks(2**20) == 4096 and budget.sequences(GIB) == 4
    budget.check()
    full = MemoryBudget(10 * GIB, 0.9, 9 * GIB, GIB)
    assert full.sequences(1) == 0 and full.blocks(1) == 0
    with pytest.raises(OutOfMemoryError, match=r"9\.00 GiB"):
        full.check()


def test_these_files_need_no_torch():
    import subprocess
    import sys

    code = (
        "import sys, hexad.hardware.registry, hexad.hardware.roofline, hexad.hardware.memory, hexad.hardware.machine,"
        "hexad.hardware.checks, hexad.hardware.telemetry, hexad.bench.planning, hexad.cli.plan, hexad.cli.doctor;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
