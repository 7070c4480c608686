"""CPU time that the scheduler takes per step, alone: `schedule()` and `update()` with canned results, all requests decoding. No torch.

`python -m hexad.bench.scheduler [--out FILE]` prints and saves JSON for 16, 256 and 1,024 running sequences.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hexad.bench.results import host_result, save
from hexad.common.clock import SystemClock
from hexad.common.params import SamplingParams
from hexad.engine.plan import KVGroupSpec, KVLayout, RowResult, StepPlan, StepResult, TokenSegment
from hexad.orchestration.messages import Submit
from hexad.orchestration.scheduler import Scheduler, SchedulerSettings

SIZES = (16, 256, 1_024)
BLOCK_SIZE = 16
PROMPT_TOKENS = 64
FULL_GROUP = (KVGroupSpec(kind="full", num_layers=1),)


def measure(num_seqs: int, *, steps: int = 600, warmup: int = 100, groups: Sequence[KVGroupSpec] = FULL_GROUP) -> dict[str, Any]:
    """CPU milliseconds per step of `num_seqs` decodes at depth 2, prefix caching on: median, 99th percentile, and its two parts."""
    scheduler = _loaded(num_seqs, steps + warmup + 8, tuple(groups))
    in_flight: deque[StepPlan] = deque()
    schedule_s: list[float] = []
    update_s: list[float] = []
    gc.collect()
    for step in range(steps + warmup):
        begin = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        assert plan is not None
        in_flight.append(plan)
        if len(in_flight) < 2:
            continue
        oldest = in_flight.popleft()
        result = _canned(oldest, step)
        start = time.thread_time()
        scheduler.update(oldest, result)
        done = time.thread_time()
        if step >= warmup:
            schedule_s.append(planned - begin)
            update_s.append(done - start)
    totals = sorted(a + b for a, b in zip(schedule_s, update_s, strict=True))
    return {
        "num_seqs": num_seqs,
        "num_groups": len(groups),
        "steps": len(totals),
        "step_ms_median": 1e3 * statistics.median(totals),
        "step_ms_p99": 1e3 * totals[int(0.99 * (len(totals) - 1))],
        "schedule_ms_median": 1e3 * statistics.median(schedule_s),
        "update_ms_median": 1e3 * statistics.median(update_s),
    }


def _loaded(num_seqs: int, steps: int, groups: tuple[KVGroupSpec, ...]) -> Scheduler:
    """A scheduler whose requests have all had their prompts computed and have `steps` tokens to go."""
    blocks = -(-(PROMPT_TOKENS + steps + 2) // BLOCK_SIZE)
    layout = KVLayout(num_blocks=num_seqs * blocks * len(groups), block_size=BLOCK_SIZE, groups=groups)
    settings = SchedulerSettings(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(2_048, num_seqs),
        max_model_len=PROMPT_TOKENS + steps + 1,
    )
    scheduler = Scheduler(settings, layout, SystemClock())
    params = SamplingParams(max_tokens=steps, ignore_eos=True)
    for index in range(num_seqs):
        ids = tuple((index * 7_919 + position) % 32_000 for position in range(PROMPT_TOKENS))
        scheduler.add(Submit(request_id=str(index), prompt=(TokenSegment(ids),), params=params))
    while True:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan, _canned(plan, 0))
        if plan.num_tokens == num_seqs == len(plan.rows):
            return scheduler


def _canned(plan: StepPlan, token: int) -> StepResult:
    tokens = (token,)
    return StepResult(step_id=plan.step_id, rows=tuple([RowResult(rid=row.rid, tokens=tokens if row.samples else ()) for row in plan.rows]))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the usual sizes, print JSON, save it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="file to write")
    parser.add_argument("--seqs", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args(argv)
    result = host_result("scheduler", [measure(num_seqs, steps=args.steps) for num_seqs in args.seqs])
    print(json.dumps(result, indent=1))
    save(result, args.out)


if __name__ == "__main__":
    main()
