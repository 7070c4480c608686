"""Capacity planning from a model's shape and a device's figures: what fits, how fast it could be, how many replicas a target needs.

Nothing is run and no weight is read. Every time is a floor (see `hexad/bench/floors.py`); only `replicas` uses an efficiency, which is a
stated assumption until it is replaced by a measured one (`--against`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from hexad.bench.floors import decode_bound, load_floor, prefill_bound
from hexad.bench.loads import Load
from hexad.common.errors import ConfigError
from hexad.hardware.memory import GIB, MemoryBudget, workspace_bytes
from hexad.hardware.registry import Device
from hexad.hardware.roofline import Bound
from hexad.models.costs import FORMATS, ModelCosts, WeightFormat, format_of
from hexad.models.served import weight_format_served
from hexad.models.spec import ModelSpec

DEFAULT_EFFICIENCY = 0.6  # engines measured on one H200 reach 0.5 to 0.8 of the floor


@dataclass(frozen=True)
class Target:
    """Traffic to be served: requests a second of given lengths."""

    requests_s: float
    input_tokens: int
    output_tokens: int

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read "RATE:INPUT:OUTPUT", for instance "12.5:512:256".

        Raises:
            ConfigError: not of that form.
        """
        try:
            rate, inputs, outputs = text.split(":")
            target = cls(float(rate), int(inputs), int(outputs))
        except ValueError:
            raise ConfigError(f"--target-load is {text!r}: write requests/s:input:output tokens, for instance 12.5:512:256") from None
        if target.requests_s <= 0 or target.input_tokens < 1 or target.output_tokens < 1:
            raise ConfigError(f"--target-load is {text!r}: all three numbers must be above zero")
        return target


@dataclass(frozen=True)
class PlanRequest:
    """What `hexad plan` is asked."""

    spec: ModelSpec
    device: Device
    tp: int = 1
    context: int = 4_096
    concurrency: int | None = None  # None: as many as fit, at most 256
    weight_format: str | None = None  # None: the checkpoint's own
    stored_format: WeightFormat | None = None  # what the checkpoint is in, where the spec alone does not say
    kv_dtype: str = "auto"
    utilization: float = 0.9
    batched_tokens: int = 8_192
    target: Target | None = None
    efficiency: float = DEFAULT_EFFICIENCY
    loads: tuple[Load, ...] = ()


def budget_of(request: PlanRequest, costs: ModelCosts, sequences: int = 256) -> MemoryBudget:
    """How one rank's memory would be shared."""
    spec = request.spec
    intermediate = spec.mlp.intermediate if spec.moe is None else spec.moe.intermediate * spec.moe.experts_per_token
    work = workspace_bytes(
        kind=request.device.kind,
        hidden=spec.hidden,
        intermediate=intermediate // request.tp,
        vocab_size=spec.vocab_size,
        batched_tokens=min(request.batched_tokens, request.context * sequences),
        sequences=sequences,
    )
    return MemoryBudget(int(request.device.memory_bytes.value), request.utilization, costs.resident_bytes(), work)


def make_plan(request: PlanRequest) -> dict[str, Any]:
    """The whole plan as plain data (what `--json` prints).

    Raises:
        ConfigError: a context beyond the model's, or a split that the model's heads do not allow.
    """
    _check(request)
    costs = ModelCosts(request.spec, request.weight_format or request.stored_format, request.kv_dtype, request.tp)
    budget = budget_of(request, costs)
    per_sequence = int(costs.kv_bytes(request.context))
    fitting = budget.sequences(per_sequence) if per_sequence else 256
    batch = request.concurrency or min(fitting, 256)
    plan: dict[str, Any] = {
        "model": request.spec.name,
        "parameters": costs.parameters(),
        "device": _device_dict(request.device),
        "tp": request.tp,
        "weights": {
            "format": costs.format.name,
            "bytes": costs.resident_bytes() * request.tp,
            "bytes_per_rank": costs.resident_bytes(),
            **_served_dict(request, costs.format.name),
        },
        "kv": {
            "dtype": costs.kv_dtype,
            "bytes_per_token": costs.kv_bytes_per_token() * request.tp,
            "bytes_per_token_per_rank": costs.kv_bytes_per_token(),
            "bytes_per_sequence_per_rank": per_sequence,
        },
        "memory": {
            "total_bytes": budget.total_bytes,
            "usable_bytes": budget.usable_bytes,
            "workspace_bytes": budget.workspace_bytes,
            "kv_bytes": max(budget.kv_bytes, 0),
        },
        "fits": budget.fits and fitting >= 1 and (request.concurrency is None or fitting >= request.concurrency),
        "context": request.context,
        "concurrency": request.concurrency,
        "sequences": {"fit": fitting, "tokens": max(budget.kv_bytes, 0) // max(costs.kv_bytes_per_token(), 1)},
        "formats": format_table(request),
    }
    if batch:
        plan["prefill"] = _prefill_dict(costs, request)
        plan["decode"] = [_decode_dict(costs, request, b) for b in sorted({1, batch})]
        plan["loads"] = {load.name: load_floor(costs, request.device, load, batch) for load in request.loads}
    if not plan["fits"]:
        plan["tp_that_fits"] = smallest_split(request)
    if request.target is not None:
        plan["replicas"] = replicas(request, costs, budget)
    return plan


def format_table(request: PlanRequest) -> list[dict[str, Any]]:
    """Every weight format: its bytes, whether it fits, its floor of a single-stream decode step, whether this version serves it there."""
    rows = []
    own = request.stored_format or format_of(request.spec)
    names = list(dict.fromkeys([own.name, *FORMATS]))
    for name in names:
        costs = ModelCosts(request.spec, own if name == own.name else name, request.kv_dtype, request.tp)
        budget = budget_of(request, costs)
        sequences = budget.sequences(int(costs.kv_bytes(request.context))) if costs.kv_bytes_per_token() else 256
        rows.append(
            {
                "format": name,
                "bytes_per_rank": costs.resident_bytes(),
                "fits": budget.fits and sequences >= (request.concurrency or 0),
                "sequences": sequences,
                "decode_ms": decode_bound(costs, request.device, 1, request.context).time_s * 1e3,
                **_served_dict(request, name),
            }
        )
    return rows


def _served_dict(request: PlanRequest, weight_format: str) -> dict[str, Any]:
    found = weight_format_served(request.spec, weight_format, request.device.kind, request.tp)
    return {"served": found.served, "served_note": found.note}


def smallest_split(request: PlanRequest) -> int | None:
    """The fewest devices (a power of two, at most 64) on which the wanted sequences fit, or None."""
    tp = request.tp * 2
    while tp <= 64 and request.spec.attention.heads % tp == 0:
        costs = ModelCosts(request.spec, request.weight_format or request.stored_format, request.kv_dtype, tp)
        budget = budget_of(replace(request, tp=tp), costs)
        if budget.fits and budget.sequences(int(costs.kv_bytes(request.context))) >= (request.concurrency or 1):
            return tp
        tp *= 2
    return None


def replicas(request: PlanRequest, costs: ModelCosts, budget: MemoryBudget) -> dict[str, Any]:
    """How many replicas the target needs, at the floor and at the assumed efficiency."""
    target = request.target
    assert target is not None
    length = target.input_tokens + target.output_tokens
    fitting = budget.sequences(int(costs.kv_bytes(length))) if costs.kv_bytes_per_token() else 256
    batch = min(request.concurrency or 256, fitting)
    if batch < 1:
        return {"needed": None, "reason": f"not one sequence of {length} tokens fits"}
    prefill_s = prefill_bound(costs, request.device, target.input_tokens, count=batch).time_s / batch
    step_s = decode_bound(costs, request.device, batch, target.input_tokens + target.output_tokens / 2).time_s
    request_s = prefill_s + (target.output_tokens - 1) * step_s / batch  # of device time
    floor_rate = 1 / request_s
    return {
        "needed": math.ceil(target.requests_s / (floor_rate * request.efficiency)),
        "devices": math.ceil(target.requests_s / (floor_rate * request.efficiency)) * request.tp,
        "needed_at_floor": math.ceil(target.requests_s / floor_rate),
        "requests_s_per_replica": floor_rate * request.efficiency,
        "requests_s_per_replica_at_floor": floor_rate,
        "batch": batch,
        "efficiency": request.efficiency,
        "tpot_ms_at_floor": step_s * 1e3,
    }


def _check(request: PlanRequest) -> None:
    heads, spec = request.spec.attention.heads, request.spec
    if request.tp < 1 or heads % request.tp:
        good = [n for n in range(1, heads + 1) if heads % n == 0 and n <= 16]
        raise ConfigError(f"-tp is {request.tp}: it must divide the model's {heads} attention heads, for instance {good}")
    if not 1 <= request.context <= spec.max_len:
        raise ConfigError(f"--context is {request.context:,}: {spec.name} has a context of {spec.max_len:,} tokens")


def _device_dict(device: Device) -> dict[str, Any]:
    def figure(value: Any) -> dict[str, Any]:
        return {"value": value.value, "source": value.source, "measured": value.measured}

    return {
        "name": device.name,
        "kind": device.kind,
        "memory_bytes": figure(device.memory_bytes),
        "read_bytes_s": figure(device.read_bytes_s),
        "rates": {kind: figure(value) for kind, value in device.rates.items()},
        "link_bytes_s": figure(device.link_bytes_s) if device.link_bytes_s else None,
        "notes": list(device.notes),
    }


def _bound_dict(b: Bound) -> dict[str, Any]:
    return {
        "ms": b.time_s * 1e3,
        "binds": b.binds,
        "weights_ms": b.weights_s * 1e3,
        "compute_ms": b.compute_s * 1e3,
        "kv_ms": b.kv_s * 1e3,
        "attention_ms": b.attention_s * 1e3,
        "link_ms": b.link_s * 1e3,
    }


def _prefill_dict(costs: ModelCosts, request: PlanRequest) -> dict[str, Any]:
    b = prefill_bound(costs, request.device, request.context)
    return {"tokens": request.context, **_bound_dict(b), "tok_s": request.context / b.time_s}


def _decode_dict(costs: ModelCosts, request: PlanRequest, batch: int) -> dict[str, Any]:
    b = decode_bound(costs, request.device, batch, request.context)
    return {"batch": batch, "context": request.context, **_bound_dict(b), "tok_s": batch / b.time_s}


def compare_with_result(result: dict[str, Any], floors: dict[str, Any]) -> list[dict[str, Any]]:
    """Each metric of `result` that has a floor: measured, floor, and how near it comes (1 = at the floor)."""
    rows = []
    for name, floor in floors.items():
        measured = result.get("metrics", {}).get(name)
        pairs = (
            [(f"{name}[{key}]", measured.get(key), value) for key, value in floor.items()]
            if isinstance(floor, dict) and isinstance(measured, dict)
            else [(name, measured, floor)]
        )
        for label, got, best in pairs:
            got = got.get("p50", got.get("median")) if isinstance(got, dict) else got
            if isinstance(got, int | float) and isinstance(best, int | float) and got > 0 and best > 0:
                share = got / best if name.endswith("tok_s") else best / got
                rows.append({"metric": label, "measured": got, "floor": best, "share_of_floor": share})
    return rows


def format_bytes(count: float) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count / 2**10:,.1f} KiB"
