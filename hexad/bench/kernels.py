"""`hexad bench kernels`: every provider of every operator at a model's shapes, against the calibrated bound."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hexad.bench.kernel_cases import Case, cases
from hexad.hardware.registry import Device
from hexad.hardware.roofline import Work, bound
from hexad.models.spec import ModelSpec
from hexad.operators.load import load_operators

log = logging.getLogger(__name__)
_CACHE_BYTES = 280 * 2**20  # copies of the inputs are rotated until together they exceed any cache
_MAX_COPIES = 64
_COMPUTE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
Row = dict[str, Any]


def measure_kernels(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    calibrated: Device,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    ops: Sequence[str] = (),
    seconds: float = 0.2,
    packed: Path | None = None,
    save: Callable[[list[Row]], None] = lambda _rows: None,
) -> list[Row]:
    """Time every case with every provider that supports it; `save` hears of the rows so far.

    Returns rows of op, label, provider, chosen (the one that the registry takes), us, gb_s, tflop_s, share (of the bound).
    """
    rows: list[Row] = []
    with torch.inference_mode():
        for case in cases(spec, dtype, device, batches, contexts, packed):
            if not ops or case.op in ops:
                rows += measure_case(case, device, calibrated, seconds)
                save(rows)
    return rows


def measure_case(case: Case, device: torch.device, calibrated: Device, seconds: float) -> list[Row]:
    """One row for each provider that supports the case."""
    registry = load_operators()
    rows = []
    for candidate in registry.explain(case.op, case.args):
        if candidate.reasons:
            continue
        try:
            bound_op = registry.bind(case.op, case.args, {case.op: candidate.provider})
            copies = _copies(case, bound_op.prepare)
            takes = getattr(bound_op.call, "takes", None)
            if takes is not None and not candidate.chosen and not takes(*copies[0][0]):
                continue  # it leaves this case to another provider
            seconds_each = time_calls([_call(bound_op.call, case, copy) for copy in copies], device, seconds)
        except Exception as error:  # whatever a library may end with: the others are timed all the same
            if candidate.chosen:
                raise
            log.warning("%s does not compute %s %s: %s: %s", candidate.provider, case.op, case.label, type(error).__name__, error)
            continue
        floor = bound(Work(case.nbytes, 0.0, {_COMPUTE[getattr(case.args, "dtype", torch.float32)]: case.flops}), calibrated).time_s
        rows.append(
            {
                "op": case.op,
                "label": case.label,
                "provider": candidate.provider,
                "chosen": candidate.chosen,
                "us": seconds_each * 1e6,
                "gb_s": case.nbytes / seconds_each / 1e9,
                "tflop_s": case.flops / seconds_each / 1e12,
                "share": floor / seconds_each,
            }
        )
    return rows


def _copies(case: Case, prepare: Callable[[Any], Any]) -> list[tuple[tuple[Any, ...], Any]]:
    """(inputs, prepared parameters), as many as it takes to exceed the caches."""
    count = max(1, min(_MAX_COPIES, int(_CACHE_BYTES // max(case.nbytes, 1)) + 1))
    return [(case.inputs(), prepare(case.params()) if case.params else None) for _ in range(count)]


def _call(kernel: Callable[..., Any], case: Case, copy: tuple[tuple[Any, ...], Any]) -> Callable[[], Any]:
    inputs, prepared = copy
    if case.params is None:
        return lambda: kernel(*inputs)
    return lambda: kernel(*inputs[: case.before], prepared, *inputs[case.before :])


def time_calls(calls: Sequence[Callable[[], Any]], device: torch.device, seconds: float) -> float:
    """Seconds a call, the best of several rounds over all of `calls` in turn; on a GPU as a captured graph where that is possible."""
    for call in calls[:2]:
        call()
    if device.type == "cuda":
        return _time_gpu(calls, seconds)
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        for call in calls:
            call()
        now = time.perf_counter()
        best = min(best, (now - start) / len(calls))
        if now >= end:
            return best


def _time_gpu(calls: Sequence[Callable[[], Any]], seconds: float) -> float:
    event: Any = torch.cuda.Event
    replay = _captured(calls)
    start, stop = event(enable_timing=True), event(enable_timing=True)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3 / len(calls))
    return best


def _captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    def every() -> None:
        for call in calls:
            call()

    every()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            every()
    except RuntimeError:  # something in there waits for the device: time it as it is
        torch.cuda.synchronize()
        return every
    return lambda: graph.replay()
