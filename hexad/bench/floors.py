"""The floor of each load on a device: what its metrics would be if every step took exactly its roofline time.

Conventions (docs/performance.md tells why): the first token of a request comes from its prefill, so a request of N output tokens has
N - 1 decode steps; these run at the average context, input + N / 2; the head multiplies only rows that sample; the prompts of one wave
are computed together; a shared prefix is computed once and read once a step.
"""

from __future__ import annotations

import math
from typing import Any

from hexad.bench.loads import Load
from hexad.hardware.registry import Device
from hexad.hardware.roofline import Bound, bound, bound_of_steps
from hexad.models.costs import ModelCosts, Rows

Metrics = dict[str, Any]


def prefill_bound(costs: ModelCosts, device: Device, tokens: int, past: float = 0.0, count: int = 1, shared: float = 0.0) -> Bound:
    """The floor of computing `count` prompts of `tokens` positions, `past` of each already cached."""
    return bound(costs.step([Rows(count, tokens, past, shared)]), device)


def decode_bound(costs: ModelCosts, device: Device, batch: int, context: float, shared: float = 0.0) -> Bound:
    """The floor of one decode step of `batch` sequences with `context` visible positions."""
    return bound(costs.step([Rows(batch, 1, max(context - 1, 0), shared)]), device)


def generation_bound(costs: ModelCosts, device: Device, load: Load, max_num_seqs: int) -> Bound:
    """The floor of answering all requests of `load`, at most `max_num_seqs` at a time, prompts of its first length."""
    length, outputs, prefix = load.input_tokens[0], load.output_tokens, load.shared_prefix_tokens
    context = prefix + length + outputs / 2
    steps = []
    full, rest = divmod(load.requests, max_num_seqs)
    for batch, waves in ((max_num_seqs, full), (rest, 1)):
        if batch and waves:
            steps.append((costs.step([Rows(batch, length, prefix, prefix)]), waves))
            steps.append((costs.step([Rows(batch, 1, context - 1, prefix)]), waves * (outputs - 1)))
    return bound_of_steps(steps, device)


def load_floor(costs: ModelCosts, device: Device, load: Load, max_num_seqs: int = 256) -> Metrics:
    """The floor of every metric that a result of `load` reports, under the same names. Empty for start-up."""
    if load.name == "W6":
        return {}
    if load.batch:
        return _decode_sweep(costs, device, load)
    if load.concurrency:
        return _closed_loop(costs, device, load)
    if load.requests == 1:
        return _single(costs, device, load)
    if load.output_tokens == 1:
        return _prefill(costs, device, load)
    return _offline(costs, device, load, max_num_seqs)


def _single(costs: ModelCosts, device: Device, load: Load) -> Metrics:
    context = load.prompt_tokens + load.output_tokens / 2
    return {
        "ttft_ms": _ms(prefill_bound(costs, device, load.prompt_tokens)),
        "tpot_ms": _ms(decode_bound(costs, device, 1, context)),
    }  # fmt: skip


def _prefill(costs: ModelCosts, device: Device, load: Load) -> Metrics:
    bounds = {str(n): prefill_bound(costs, device, n) for n in load.input_tokens}
    return {
        "ttft_ms": {n: _ms(b) for n, b in bounds.items()},
        "prefill_tok_s": {n: int(n) / b.time_s for n, b in bounds.items()},
    }  # fmt: skip


def _decode_sweep(costs: ModelCosts, device: Device, load: Load) -> Metrics:
    context = load.prompt_tokens + load.output_tokens / 2
    return {"ms_per_step": {str(batch): _ms(decode_bound(costs, device, batch, context)) for batch in load.batch}}


def _offline(costs: ModelCosts, device: Device, load: Load, max_num_seqs: int) -> Metrics:
    total = generation_bound(costs, device, load, max_num_seqs)
    tokens = load.requests * load.output_tokens
    prompts = load.requests * load.prompt_tokens
    if load.shared_prefix_tokens:
        cold_s = total.time_s + prefill_bound(costs, device, load.shared_prefix_tokens).time_s
        times = {"cold": cold_s, "cached": total.time_s}
        return {"total_s": times, "output_tok_s": {name: tokens / seconds for name, seconds in times.items()}}
    batch = min(load.requests, max_num_seqs)
    waves = math.ceil(load.requests / max_num_seqs)
    return {
        "total_s": total.time_s,
        "output_tok_s": tokens / total.time_s,
        "total_tok_s": (tokens + prompts) / total.time_s,
        "ms_per_step": total.time_s * 1e3 / (load.output_tokens * waves),
        "decode_step_ms": _ms(decode_bound(costs, device, batch, load.prompt_tokens + load.output_tokens / 2)),
    }


def _closed_loop(costs: ModelCosts, device: Device, load: Load) -> Metrics:
    length, outputs = load.prompt_tokens, load.output_tokens
    ttft_ms = _ms(prefill_bound(costs, device, length))
    rates, itl_ms = {}, {}
    for concurrency in load.concurrency:
        step_s = decode_bound(costs, device, concurrency, length + outputs / 2).time_s
        turn_s = prefill_bound(costs, device, length, count=concurrency).time_s + (outputs - 1) * step_s
        rates[str(concurrency)] = concurrency * outputs / turn_s
        itl_ms[str(concurrency)] = step_s * 1e3
    return {"output_tok_s": rates, "itl_ms": itl_ms, "ttft_ms": dict.fromkeys(rates, ttft_ms)}


def _ms(b: Bound) -> float:
    return b.time_s * 1e3
