"""CPU time of the core loop per step, all included but the executor: `python -m hexad.bench.core_loop [--out FILE]`.

Every sequence decodes one token a step. The executor is an instant one and its own time is taken out; what remains is the work that a
GPU step of the same length would have to hide: schedule, update, making the news, encoding it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hexad.bench.results import host_result, save
from hexad.common.clock import SystemClock
from hexad.common.params import SamplingParams
from hexad.common.wire import Codec
from hexad.engine.executor.seam import LoadReport, Masks
from hexad.engine.plan import KVBudget, KVGroupSpec, KVLayout, RowResult, StepPlan, StepResult, TokenSegment
from hexad.orchestration.core import CoreLoop
from hexad.orchestration.messages import Outputs, Submit, ToClient
from hexad.orchestration.metrics import StepMetrics
from hexad.orchestration.scheduler import Scheduler
from hexad.orchestration.settings import SchedulerSettings

SIZES = (16, 256, 1024)
PROMPT_TOKENS = 100
BLOCK_SIZE = 64
GOAL_MS_AT_256 = 1.5


class Stopwatch:
    """Adds up the seconds spent inside the calls that it wraps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

        return timed


class InstantExecutor:
    """Answers at once with token 7 for every row that samples."""

    depth = 2

    def load(self) -> LoadReport:
        return LoadReport(device="none", dtype="none", weight_bytes=0, phases_s={}, operators={})

    def kv_bytes(self) -> KVBudget:
        raise AssertionError("the benchmark sizes the pool")

    def allocate(self, layout: KVLayout) -> None:
        """Nothing to allocate."""

    def execute(self, plan: StepPlan) -> InstantStep:
        return InstantStep(plan)

    def close(self) -> None:
        """Nothing to close."""


class InstantStep:
    """Handle and pending result in one."""

    def __init__(self, plan: StepPlan) -> None:
        self.step_id = plan.step_id
        rows = tuple(RowResult(rid=row.rid, tokens=(7,) if row.samples else ()) for row in plan.rows)
        self._result = StepResult(step_id=plan.step_id, rows=rows)

    def sample(self, masks: Masks | None = None) -> InstantStep:
        return self

    def drafts(self) -> dict[int, tuple[int, ...]]:
        return {}

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> StepResult:
        return self._result


def measure(num_seqs: int, num_steps: int) -> dict[str, Any]:
    """Milliseconds per step with `num_seqs` running sequences."""
    core, watch = _make(num_seqs, num_steps)
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + 1000, ignore_eos=True)
    for index in range(num_seqs):
        prompt = (TokenSegment(tuple((index * 31 + i) % 1000 for i in range(PROMPT_TOKENS))),)
        core.submit(Submit(request_id=f"request-{index:06d}", prompt=prompt, params=params), b"front")
    codec: Codec[ToClient] = Codec(ToClient)
    while core.stats()["num_running"] != num_seqs or core.stats()["num_waiting"]:
        core.step()
    for _ in range(20):
        core.step()
    gc.collect()
    gc.freeze()
    watch.seconds.clear()
    samples, encode_s, outputs = [], 0.0, 0
    cpu_started = time.process_time()
    for _ in range(num_steps):
        before_s = watch.seconds.get("executor", 0.0)
        started = time.perf_counter()
        news = core.step()
        middle = time.perf_counter()
        for items in news.values():
            codec.encode(Outputs(tuple(items)))
            outputs += len(items)
        ended = time.perf_counter()
        encode_s += ended - middle
        samples.append(ended - started - (watch.seconds.get("executor", 0.0) - before_s))
    cpu_s = time.process_time() - cpu_started - watch.seconds["executor"]
    gc.unfreeze()
    assert outputs == num_seqs * num_steps, f"{outputs} outputs in {num_steps} steps"
    return _report(num_seqs, samples, cpu_s, encode_s, watch.seconds)


def _make(num_seqs: int, num_steps: int) -> tuple[CoreLoop, Stopwatch]:
    watch = Stopwatch()
    length = PROMPT_TOKENS + num_steps + 1000
    layout = KVLayout(
        num_blocks=num_seqs * (length // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        groups=(KVGroupSpec(kind="full", num_layers=1),),
    )
    settings = SchedulerSettings(max_num_seqs=num_seqs, max_num_batched_tokens=max(8192, num_seqs), max_model_len=length + 100)
    scheduler = Scheduler(settings, layout, SystemClock())
    executor = InstantExecutor()
    for target, name, label in (
        (scheduler, "schedule", "schedule"),
        (scheduler, "update", "update"),
        (executor, "execute", "executor"),
    ):
        setattr(target, name, watch.wrap(label, getattr(target, name)))
    return CoreLoop(executor, scheduler, SystemClock(), vocab_size=1000, observers=(StepMetrics(),)), watch


def _report(num_seqs: int, samples: list[float], cpu_s: float, encode_s: float, seconds: dict[str, float]) -> dict[str, Any]:
    steps = len(samples)
    ordered = sorted(samples)
    parts = {"schedule": seconds["schedule"], "update": seconds["update"], "encode": encode_s}
    parts["rest"] = sum(samples) - sum(parts.values())
    return {
        "num_seqs": num_seqs,
        "steps": steps,
        "cpu_ms": round(cpu_s / steps * 1e3, 4),
        "mean_ms": round(statistics.fmean(samples) * 1e3, 4),
        "p50_ms": round(ordered[steps // 2] * 1e3, 4),
        "p99_ms": round(ordered[int(steps * 0.99)] * 1e3, 4),
        "parts_ms": {name: round(part / steps * 1e3, 4) for name, part in parts.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="running sequences")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    result = host_result("core_loop", [measure(size, args.steps) for size in args.sizes])
    result["load"]["goal"] = f"cpu_ms under {GOAL_MS_AT_256} at 256"
    print(json.dumps(result, indent=1))
    save(result, args.out)


if __name__ == "__main__":
    main()
