"""Compares the engine with itself on fresh random models and requests: `python scripts/soak_engine.py SECONDS [--seed N]`.

Prints the seed of each example that fails, to be run again alone with `--seed`. Exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / area) for area in ("acceptance", "engine", "cli", "orchestration")]

import test_preempt_everywhere as preempt  # noqa: E402
import test_same_answer as same  # noqa: E402
import torch  # noqa: E402
from whole_engine import KINDS, World  # noqa: E402


def checks(world: World, rng: random.Random) -> Iterator[tuple[str, Callable[[], None]]]:
    """Named comparisons over one model; each draws its own requests."""
    depth = rng.choice([1, 2])
    yield "small pool", lambda: preempt.test_b37_a_pool_that_holds_a_third_of_the_load(world, depth)
    yield "again and again", lambda: preempt.test_b37_preempted_again_and_again(world, rng.choice([2, 3, 5]))
    yield "every step in turn", lambda: preempt.test_b37_preempted_at_every_step_in_turn(world, depth)
    case = same.Case(world)
    yield "chunks", lambda: same.test_b15_chunks(case, rng.choice([1, 3, 7, 64]), depth)
    yield "cache", lambda: same.test_b15_cold_and_warm_cache(case, depth)
    yield "neighbours", lambda: same.test_b15_among_neighbours(case, rng.choice([7, 31]))
    for example in range(8):
        yield f"combined {example}", lambda: same.test_b15_b37_everything_combined(case, 0)


def run_example(seed: int) -> list[str]:
    """What went wrong with one seed."""
    kind = sorted(KINDS)[seed % len(KINDS)]
    failures = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        world = World(Path(folder), kind, seed)
        try:
            for name, check in checks(world, random.Random(seed)):
                try:
                    check()
                except Exception:
                    failures.append(f"seed {seed}, {kind}, {name}:\n{traceback.format_exc(limit=-2)[-4_000:]}")
        finally:
            world.executor.close()
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seconds", type=float, nargs="?", default=60.0)
    parser.add_argument("--seed", type=int, help="one example with this seed")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    end_s = time.monotonic() + args.seconds
    examples = failed = 0
    while (args.seed is not None and not examples) or (args.seed is None and time.monotonic() < end_s):
        failures = run_example(random.SystemRandom().randrange(2**31) if args.seed is None else args.seed)
        examples += 1
        failed += bool(failures)
        print(*failures, sep="\n", end="\n" * bool(failures), flush=True)
    print(f"{examples} examples, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
