"""Plants bugs one at a time in a copy of the package and runs the tests that should notice: `python scripts/mutants.py [NAME ...]`.

Exit code 0: every bug was noticed. 1: a bug survived, or its tests could not say (`--baseline` shows whether they pass without it). 2: a
bug could not be planted because the text that it replaces is not there (once) any more: write it anew for the code as it is now.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS_FAILED = 1  # pytest's exit code; the others say that no test was run to its end
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Mutant:
    """One bug: `old`, found exactly once in `file`, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "window-of-a-chunk-off-by-one",
        "hexad/operators/attention.py",
        "mask &= positions > query - window",
        "mask &= positions >= query - window",
        ("tests/operators/test_reference_operators.py::test_b46_visible_keys_by_one_hot_values",),
    ),
    Mutant(
        "window-of-a-decode-off-by-one",
        "hexad/operators/attention.py",
        "max(0, lengths[row] - window) for row in rows",
        "max(0, lengths[row] - window + 1) for row in rows",
        ("tests/operators/test_reference_operators.py::test_b46_visible_keys_by_one_hot_values",),
    ),
    Mutant(
        "window-pages-freed-one-position-early",
        "hexad/orchestration/kv/groups.py",
        "max(0, start - self._window + 1) // self._block_size",
        "max(0, start - self._window + 2) // self._block_size",
        ("tests/orchestration/test_kv_groups.py",),
    ),
    Mutant(
        "reference-count-skipped",
        "hexad/orchestration/kv/pool.py",
        "self.refs[page] = refs + 1",
        "self.refs[page] = refs",
        ("tests/orchestration/test_kv_pool.py", "tests/orchestration/test_radix_tree.py"),
    ),
    Mutant(
        "unconfirmed-block-cached",
        "hexad/orchestration/kv/manager.py",
        "min(min(request.num_done, len(request.ids)) // self.block_size,",
        "min(min(request.num_computed, len(request.ids)) // self.block_size,",
        ("tests/orchestration/test_radix_tree.py",),
    ),
    Mutant(
        "block-reused-before-its-plan-retired",
        "hexad/orchestration/kv/pool.py",
        "if step > self.retired:\n            self._deferred",
        "if step > self.retired + 1:\n            self._deferred",
        ("tests/orchestration/test_kv_pool.py",),
    ),
    Mutant(
        "penalties-count-the-prompt",
        "hexad/engine/sampling/edits.py",
        "generated = valid & (place >= self.prompt_len[:, None])",
        "generated = valid",
        ("tests/engine/test_sampling.py::test_penalties_know_prompt_from_output",),
    ),
    Mutant(
        "penalties-forget-the-output-before-a-preemption",
        "hexad/orchestration/request.py",
        "prompt_len=self.prompt_len,\n            params=self.params,\n            choice=",
        "prompt_len=len(self.ids),\n            params=self.params,\n            choice=",
        ("tests/acceptance/test_preempt_everywhere.py::test_b37_preempted_at_every_step_in_turn[llama-1]",),
    ),
    Mutant(
        "stop-held-back-one-character-short",
        "hexad/orchestration/stop.py",
        "return self._release(self._automaton.depth[self._node])",
        "return self._release(max(0, self._automaton.depth[self._node] - 1))",
        ("tests/orchestration/test_output_stop.py",),
    ),
    Mutant(
        "padding-rows-drawn",
        "hexad/compose.py",
        "opened.path, vocab_size=num_token_ids)",
        "opened.path, vocab_size=opened.spec.vocab_size)",
        ("tests/acceptance/test_padded_vocabulary.py",),
    ),
)


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of what the tests need, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="hexad-mutant-") as folder:
        ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
        for name in ("hexad", "tests"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        yield Path(folder)


def plant(folder: Path, mutant: Mutant) -> None:
    """Replace the text.

    Raises:
        LookupError: it is not there, or more than once.
    """
    path = folder / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise LookupError(f"{mutant.name}: {mutant.file} has {mutant.old!r} {text.count(mutant.old)} times, not once")
    path.write_text(text.replace(mutant.old, mutant.new))


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """(pytest's exit code, or None if it ran out of time; the end of what it printed)."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    where = [sys.executable, "-c", "import hexad; print(hexad.__file__)"]
    found = subprocess.run(where, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(folder)), f"the tests would import {found.strip()}, not the copy"
    try:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, (done.stdout + done.stderr)[-2_000:]


def judge(mutant: Mutant) -> tuple[bool, str]:
    """Was it noticed? And a line that says so."""
    started = time.monotonic()
    with copied() as folder:
        plant(folder, mutant)
        code, output = run_tests(folder, mutant.tests)
    seconds = f"{time.monotonic() - started:.1f} s"
    if code == TESTS_FAILED:
        return True, f"killed    {mutant.name} ({seconds})"
    if code == 0:
        return False, f"SURVIVED  {mutant.name} ({seconds}): {', '.join(mutant.tests)} pass with it"
    how = f"no end after {TIMEOUT_S:g} s" if code is None else f"pytest ended with code {code}\n{output}"
    return False, f"UNTESTED  {mutant.name}: {how}"


def baseline(mutants: Sequence[Mutant]) -> tuple[bool, str]:
    """The same tests on the code as it is: a test that always fails notices nothing."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with copied() as folder:
        code, output = run_tests(folder, tests)
    return code == 0, "unchanged code passes" if code == 0 else f"UNCHANGED CODE FAILS (code {code})\n{output}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these bugs")
    parser.add_argument("--baseline", action="store_true", help="run the tests on the code as it is, too")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    args = parser.parse_args(argv)
    known = [mutant.name for mutant in MUTANTS]
    if unknown := set(args.names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    chosen = [mutant for mutant in MUTANTS if not args.names or mutant.name in args.names]
    with ThreadPoolExecutor(args.jobs) as pool:
        tasks = [pool.submit(judge, mutant) for mutant in chosen]
        if args.baseline:
            tasks.append(pool.submit(baseline, chosen))
        verdicts: list[bool] = []
        for task in tasks:
            try:
                good, line = task.result()
            except LookupError as error:
                print(error, flush=True)
                return 2
            print(line, flush=True)
            verdicts.append(good)
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
