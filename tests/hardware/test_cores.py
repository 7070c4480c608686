"""Lists of cores, and threads that keep to them: the native pool's one each, torch's on all of them, no other thread touched."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hexad.common.config import HexadConfig
from hexad.common.errors import ConfigError
from hexad.hardware.cores import parse_cores, pinned_cores

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin threads")


@pytest.fixture
def eight(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3, 8, 9, 10, 12})


def test_lists_of_cores(eight) -> None:
    assert parse_cores("0") == (0,)
    assert parse_cores("0-3,8") == (0, 1, 2, 3, 8)
    assert parse_cores(" 9 , 0-1") == (9, 0, 1)
    assert pinned_cores(None, 4) == ()
    assert pinned_cores("2,8-10", None) == (2, 8, 9, 10)
    assert pinned_cores("2,8-10", 2) == (2, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no core or range"),
        ("1,,2", "no core or range"),
        ("3-1", "no core or range"),
        ("-1", "no core or range"),
        ("0-999999", "no core or range"),
        ("a", "0-3,8"),
        ("1,4", r"cannot use core 4; it has 0-3,8-10,12"),
        ("0-2,1", "core 1 twice"),
    ],
)
def test_bad_lists(eight, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_cores(text)


def test_more_threads_than_cores(eight) -> None:
    with pytest.raises(ConfigError, match=r"threads = 3.*has 2 cores"):
        pinned_cores("0,1", 3)


def test_pinning_is_off_by_default() -> None:
    assert HexadConfig().device.cpu_pin is None


PIN = """
import os, sys, threading
import torch
from pathlib import Path
from hexad.engine.executor.device_thread import DeviceThread
from hexad.engine.executor.cpu_threads import start_threads
from hexad.operators.native.library import PackedWeight, probe

cores = [int(core) for core in sys.argv[1].split(",")]
thread = DeviceThread("device", lambda: start_threads(len(cores), cores))

def compute():
    if probe()[0] is not None:
        probe()[0].set_threads(len(cores))
        weight = PackedWeight("q8_0", 512, 64)
        weight.fill(0, torch.zeros(512, 68, dtype=torch.uint8))
        weight.linear(torch.ones(4, 64), torch.float32)
    return threading.get_native_id()

device = thread.run(compute)
def allowed(task):
    return next(l for l in (task / "status").read_text().splitlines() if l.startswith("Cpus_allowed_list")).split()[1]
tasks = {int(task.name): allowed(task) for task in Path("/proc/self/task").iterdir()}
print(probe()[0] is not None, tasks.pop(os.getpid()), tasks.pop(device), *sorted(tasks.values()), sep=";")
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
def test_threads_keep_to_their_cores() -> None:
    usable = sorted(os.sched_getaffinity(0))
    cores = usable[::-1][:3]
    command = [sys.executable, "-c", PIN, ",".join(map(str, cores))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    native, main, device, *others = done.stdout.strip().split(";")
    with open("/proc/self/status") as status:
        unpinned = next(line.split()[1] for line in status if line.startswith("Cpus_allowed_list"))
    assert main == unpinned
    assert device == str(cores[0])
    if native == "True":
        assert {str(core) for core in cores[1:]} <= set(others)
