"""`hexad bench profile`: where a step's time goes, per operator, and which floor to work on.

Operators are wrapped as they are bound, so that each call is known by its name, provider and static arguments. On a CPU a call is timed
as it is. On a GPU the device time of its kernels counts, from steps without graphs (in graphs the calls are not seen), while the step's
own time is that of another run, with graphs and without a profiler; `--trace` shows the idle time between its kernels.
What a step takes beyond its operators is host time and gaps.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hexad.bench.spans import RANGE, Span, device_spans, host_spans
from hexad.hardware.registry import Device
from hexad.hardware.roofline import Work, bound
from hexad.models.costs import ModelCosts, Rows
from hexad.models.formats.stored import FORMATS as STORED_FORMATS
from hexad.operators.registry import Bound, Registry

WHOLE = ("decoder_stack",)
_COMPUTE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass
class OpTime:
    """All calls of one operator with one provider."""

    op: str
    provider: str
    calls: int = 0
    seconds: float = 0.0
    nbytes: float = 0.0  # parameters and activations read and written
    flops: float = 0.0


@dataclass
class Recorder:
    """Collects while `on`; `on_gpu` leaves the timing to the profiler."""

    on_gpu: bool
    costs: ModelCosts | None = None  # for operators that are the whole network
    on: bool = False
    depth: int = 0
    times: dict[str, OpTime] = field(default_factory=dict)

    def wrap(self, bound_op: Bound, args: Any) -> Bound:
        """The same operator, recorded."""
        name = f"{bound_op.op}/{bound_op.provider}"

        def call(*inputs: Any) -> Any:
            if not self.on or self.depth:  # a composite counts, not its parts
                return bound_op.call(*inputs)
            return self._record(name, bound_op, args, inputs)

        return replace(bound_op, call=call)

    def _record(self, name: str, bound_op: Bound, args: Any, inputs: tuple[Any, ...]) -> Any:
        entry = self.times.setdefault(name, OpTime(bound_op.op, bound_op.provider))
        self.depth += 1
        start = time.perf_counter()
        try:
            if self.on_gpu:
                with torch.profiler.record_function(RANGE + name):
                    result = bound_op.call(*inputs)
            else:
                result = bound_op.call(*inputs)
        finally:
            self.depth -= 1
        entry.seconds += 0.0 if self.on_gpu else time.perf_counter() - start
        entry.calls += 1
        if bound_op.op in WHOLE and self.costs is not None:
            nbytes, flops = stack_work(self.costs, inputs)
        else:
            nbytes, flops = traffic_bytes(bound_op.op, args, inputs, result), call_flops(bound_op.op, args, inputs)
        entry.nbytes += nbytes
        entry.flops += flops
        return result


@contextmanager
def recording(registry: Registry, recorder: Recorder) -> Iterator[None]:
    """While this lasts, what `registry` binds is recorded."""
    plain = registry.bind

    def bind(op: str, args: Any, prefer: Any = None) -> Bound:
        return recorder.wrap(plain(op, args, prefer), args)

    registry.bind = bind  # type: ignore[method-assign]
    try:
        yield
    finally:
        registry.bind = plain  # type: ignore[method-assign]


def stack_work(costs: ModelCosts, inputs: tuple[Any, ...]) -> tuple[float, float]:
    """(bytes, operations) of a whole decoder without its head: `decoder_stack(token_ids, positions, groups, kv_layers, ...)`."""
    tokens, batch = inputs[0].shape[0], inputs[2][0]
    rows = max(len(batch.seq_lens), 1)
    new = max(tokens // rows, 1)
    work = costs.step([Rows(rows, new, max(_context(batch) - new, 0), samples=False)])
    return work.read_bytes - costs.head_bytes(), sum(work.flops.values()) + sum(work.attention_flops.values())


def _context(batch: Any) -> float:
    """Mean visible length of a batch's rows; its longest where asking would wait for the device."""
    lengths = batch.seq_lens
    return float(lengths.float().mean().item()) if lengths.device.type == "cpu" and len(lengths) else float(batch.max_seq_len)


def traffic_bytes(op: str, args: Any, inputs: tuple[Any, ...], result: Any) -> float:
    """Bytes of the tensors that a call reads and writes; of attention's pages, those that the batch names."""
    if op == "packed_linear":
        elements, nbytes = STORED_FORMATS[args.format]
        return float(args.out_features * args.in_features * nbytes / elements) + _nbytes(inputs[0]) + _nbytes(result)
    if op == "paged_attention":
        q, kv, batch = inputs[:3]
        per_token = 2.0 * kv.k.shape[2] * kv.k.shape[3] * kv.k.element_size()
        return float(_context(batch) * len(batch.seq_lens) * per_token + 2 * q.numel() * q.element_size())
    if op == "embedding":
        return 2.0 * _nbytes(result)
    if op == "rope_kv_write":
        return 2.0 * _nbytes(inputs[0])
    return _nbytes(inputs) + _nbytes(result)


def _nbytes(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float(value.numel() * value.element_size())
    if isinstance(value, tuple | list):
        return sum(_nbytes(item) for item in value)
    return float(getattr(value, "nbytes", 0) or 0)


def call_flops(op: str, args: Any, inputs: tuple[Any, ...]) -> float:
    """Operations of a call: products of linear layers (composites too) and of attention; the rest is bound by bytes."""
    if hasattr(args, "in_features"):
        return float(2 * inputs[0].shape[0] * args.in_features * args.out_features)
    if op == "paged_attention":
        batch = inputs[2]
        tokens, rows = inputs[0].shape[0], max(len(batch.seq_lens), 1)
        queries = tokens / rows
        return float(4 * args.heads * args.head_dim * tokens * max(batch.max_seq_len - queries / 2, 1))
    return 0.0


def device_times(profiler: Any, times: dict[str, OpTime]) -> float:
    """Put the kernels' times into `times`, each in the operator during whose call it was launched; returns the device time of everything.

    Sums of torch's own miss kernels that no torch operator launched, which most are here.
    """
    host, busy_s = host_spans(profiler), 0.0
    launched = {span.launch: span.start_ns for span in host if span.launch and "Launch" in span.name}
    calls = sorted((span for span in host if span.name.startswith(RANGE)), key=_start)
    for span in device_spans(profiler):
        seconds = (span.end_ns - span.start_ns) / 1e9
        busy_s += seconds
        at = launched.get(span.launch, -1)
        place = bisect_right(calls, at, key=_start) - 1
        if place >= 0 and at <= calls[place].end_ns and (name := calls[place].name.removeprefix(RANGE)) in times:
            times[name].seconds += seconds
    return busy_s


def _start(span: Span) -> int:
    return span.start_ns


def decode_window(face: Any, batch: int, prompt: int, steps: int, begin: Callable[[], Any], end: Callable[[], Any]) -> dict[str, Any]:
    """Run a full batch; between `begin()` and `end()` (which waits for the device) it decodes `steps` steps or a few more."""
    from hexad.bench.loads import random_prompts

    face.run(random_prompts(batch, prompt, face.vocab_size, seed=2), 4)
    window = _Window(2 * batch, steps * batch, begin, end)
    face.run(random_prompts(batch, prompt, face.vocab_size, seed=1), steps + 8, tick=window.tick)
    return window.measured(batch) | {"context": prompt + 2 + steps / 2}


def stream_window(face: Any, batch: int, prompt: int, steps: int, begin: Callable[[], Any], end: Callable[[], Any]) -> dict[str, Any]:
    """The same with `batch` streams, each of which sends a new request when one ends: steps mix prompts and decoding.

    A step counts when all streams got a token on the average.
    """
    from hexad.bench.loads import random_prompts

    window = _Window(batch * steps, steps * batch, begin, end)
    prompts = random_prompts(4 * batch, prompt, face.vocab_size, seed=1)
    face.run(prompts, steps, concurrency=batch, tick=window.tick)
    return window.measured(batch) | {"context": prompt + steps / 2}


class _Window:
    """Calls `begin` once `skipped` tokens are there, and `end` after `counted` more."""

    def __init__(self, skipped: int, counted: int, begin: Callable[[], Any], end: Callable[[], Any]) -> None:
        self.skipped, self.counted, self.begin, self.end = skipped, counted, begin, end
        self.first: tuple[float, int] | None = None
        self.last: tuple[float, int] | None = None

    def tick(self, _finished: int, tokens: int) -> None:
        if self.first is None and tokens >= self.skipped:
            self.begin()
            self.first = time.perf_counter(), tokens
        elif self.first is not None and self.last is None and tokens >= self.first[1] + self.counted:
            self.end()
            self.last = time.perf_counter(), tokens

    def measured(self, batch: int) -> dict[str, Any]:
        assert self.first is not None and self.last is not None, "the run was too short"
        return {"steps": (self.last[1] - self.first[1]) / batch, "wall_s": self.last[0] - self.first[0], "batch": batch}


def profile_decode(face: Any, recorder: Recorder, batch: int, prompt: int, steps: int) -> dict[str, Any]:
    """Decode steps of a full batch: seconds a step, and operators in between. `face` is an `InProcess` built while recording."""
    profiler = _profiler(recorder.on_gpu)

    def begin() -> None:
        recorder.on = True
        profiler.__enter__()

    def end() -> None:
        _synchronize(recorder.on_gpu)
        recorder.on = False
        profiler.__exit__(None, None, None)

    window = decode_window(face, batch, prompt, steps, begin, end)
    count = window["steps"]
    busy_s = device_times(profiler, recorder.times) if recorder.on_gpu else sum(t.seconds for t in recorder.times.values())
    operators_s = sum(t.seconds for t in recorder.times.values())
    return {"steps": count, "step_s": window["wall_s"] / count, "operators_s": operators_s / count,
            "device_busy_s": busy_s / count, "batch": batch, "context": window["context"]}  # fmt: skip


def plain_steps(model: str, options: dict[str, Any], sizes: list[int], prompt: int, steps: int) -> dict[int, float]:
    """Seconds a decode step takes in an engine as users run it, by batch size: not recorded, with graphs where there are graphs."""
    from hexad.bench.inprocess import InProcess

    face, found = InProcess(model, options), {}
    try:
        for size in sizes:
            for _ in range(2):  # the first run captures
                window = decode_window(face, size, prompt, steps, lambda: None, lambda: _synchronize(on_gpu=torch.cuda.is_available()))
            found[size] = window["wall_s"] / window["steps"]
    finally:
        face.close()
    return found


class _NoProfiler:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def _profiler(on_gpu: bool) -> Any:
    if not on_gpu:
        return _NoProfiler()
    from torch.profiler import ProfilerActivity

    return torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])


def _synchronize(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def operator_table(recorder: Recorder, measured: dict[str, Any], calibrated: Device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """One row an operator, the costliest first: share of the step, bytes, operations, and share of its bound."""
    rows = []
    for entry in recorder.times.values():
        floor = bound(Work(entry.nbytes, 0.0, {_COMPUTE[dtype]: entry.flops}), calibrated)
        rows.append(
            {
                "op": entry.op,
                "provider": entry.provider,
                "calls_per_step": entry.calls / measured["steps"],
                "ms_per_step": entry.seconds * 1e3 / measured["steps"],
                "share_of_step": entry.seconds / measured["steps"] / measured["step_s"],
                "mb_per_step": entry.nbytes / 1e6 / measured["steps"],
                "gflop_per_step": entry.flops / 1e9 / measured["steps"],
                "share_of_bound": floor.time_s / entry.seconds if entry.seconds else 0.0,
                "binds": "bytes" if floor.weights_s >= floor.compute_s else "arithmetic",
            }
        )
    return sorted(rows, key=lambda row: -float(row["ms_per_step"]))
