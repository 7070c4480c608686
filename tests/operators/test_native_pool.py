"""The native thread pool by itself: its chunks, under ThreadSanitizer where the compiler has it, and the cores that its threads take."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hexad.operators.native.build import COMPILERS, SOURCES

HERE = Path(__file__).parent
WRAPPED = "-Wl,--wrap=sched_getcpu,--wrap=sched_getaffinity,--wrap=sched_setaffinity"


def compiled(name: str, flags: list[str], folder: Path) -> Path:
    """The program tests/operators/NAME.cpp with the pool."""
    compiler = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None or shutil.which(compiler) is None:
        pytest.skip("no C++ compiler")
    sources = [str(HERE / f"{name}.cpp"), str(SOURCES / "pool.cpp"), str(SOURCES / "cores.cpp")]
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-pthread", *flags, f"-I{SOURCES}", *sources, "-o", str(folder / name)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("this compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    return folder / name


def fresh_seed() -> int:
    seed = time.time_ns() % 2**31
    print("seed", seed)
    return seed


@pytest.mark.parametrize("flags", [["-fsanitize=thread", "-g", "-O1"], ["-O2"]], ids=["thread-sanitizer", "plain"])
def test_every_chunk_runs_once(flags: list[str], tmp_path) -> None:
    program = compiled("pool_stress", flags, tmp_path)
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    command = [str(program), str(fresh_seed())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0 and done.stdout == "done\n", done.stdout + done.stderr[-4000:]


@pytest.fixture(scope="module")
def cores(tmp_path_factory):
    """(words of a command, its input) -> its lines."""
    if not sys.platform.startswith("linux"):
        pytest.skip("threads choose cores on Linux alone")
    program = compiled("pool_cores", ["-O1", WRAPPED], tmp_path_factory.mktemp("cores"))

    def call(*words: object, text: str = "") -> list[str]:
        command = [str(program), *map(str, words)]
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()

    return call


def listed(numbers) -> str:
    return ",".join(map(str, numbers)) or "-"


@pytest.mark.parametrize(
    ("core", "allowed", "taken", "chosen"),
    [
        (0, (0, 1), (0,), 1),
        (4, (4, 5), (4,), 5),  # neither is below the number of cores
        (5, (4, 5), (5,), 4),
        (2, (0, 2, 7), (2,), 7),
        (7, (0, 2, 7), (7, 0), 2),
        (7, (0, 2, 7), (7, 0, 2), -1),
        (3, (4, 5), (3,), 4),  # on a core that was taken away meanwhile
        (0, (0,), (), -1),
        (0, (), (), -1),
    ],
)
def test_the_next_core_is_one_that_the_process_has(cores, core, allowed, taken, chosen) -> None:
    assert cores("next", text=f"{core} {listed(allowed)} {listed(taken)}\n") == [str(chosen)]


def test_any_free_core_is_found_before_none_is_said(cores) -> None:
    rng = random.Random(fresh_seed())
    cases = []
    for _ in range(500):
        allowed = sorted(rng.sample(range(1024), rng.randint(1, 12)))
        taken = rng.sample(allowed, rng.randint(0, len(allowed)))
        cases.append((rng.choice([*allowed, rng.randrange(1024)]), allowed, taken))
    found = cores("next", text="".join(f"{core} {listed(allowed)} {listed(taken)}\n" for core, allowed, taken in cases))
    assert len(found) == len(cases)
    for (core, allowed, taken), line in zip(cases, found, strict=True):
        free = [other for other in allowed if other not in taken and other != core]
        following = [other for other in free if other > core] + free
        assert int(line) == (following[0] if free else -1), (core, allowed, taken)


@pytest.mark.parametrize(("allowed", "threads"), [((4, 5), 2), ((0, 2, 7), 3), ((63, 64, 1000), 3), ((4, 5), 4), ((9,), 2)])
def test_threads_part_where_there_are_cores(cores, allowed, threads) -> None:
    """A process that is held to cores with high numbers; all its threads wake on the first of them."""
    [line] = cores("pool", listed(allowed), threads)
    taken = [int(word) for word in line.split()]  # words if a thread was left with one core
    assert len(taken) == threads and len(set(taken)) == min(threads, len(allowed)) and set(taken) <= set(allowed), line
