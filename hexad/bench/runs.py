"""From a load and a face to metrics, named as in loads.json. What is known after each step of a sweep goes to `save`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hexad.bench.faces import Face, Tick, no_tick
from hexad.bench.loads import Load, random_prompts
from hexad.bench.records import Record, Slo, samples, serving_metrics, summary_ms, tokens_between

Metrics = dict[str, Any]
Save = Callable[[Metrics], None]
RAMP = 0.2  # share of --duration-s that does not count: the batch is still filling


MAX_WARM_REQUESTS = 512


def no_save(_metrics: Metrics) -> None:
    """Results that nobody keeps."""


@dataclass(frozen=True)
class Options:
    """How a load is run."""

    duration_s: float | None = None  # steady state for this long instead of the whole load
    repeats: int = 3  # of the single-stream load; the median counts
    seed: int = 0
    warmup: bool = True
    request_rate: float | None = None
    slo: Slo = field(default_factory=Slo)


@dataclass
class Run:
    """One load on one face."""

    face: Face
    load: Load
    options: Options
    tick: Callable[[str], Tick] = lambda _label: no_tick  # a progress bar for each step of a sweep
    save: Save = no_save

    def measure(self) -> Metrics:
        """Run the load.

        Raises:
            RunFailedError: a request failed (its message is in there).
        """
        load = self.load
        if load.batch:
            return self._decode_sweep()
        if load.concurrency:
            return self._closed_loop()
        if load.shared_prefix_tokens:
            return self._shared_prefix()
        if load.output_tokens == 1:
            return self._prefill()
        if load.requests == 1:
            return self._single()
        return self._offline()

    def _prompts(self, count: int, length: int, turn: int = 0, shared: list[int] | None = None) -> list[list[int]]:
        return random_prompts(count, length, self.face.vocab_size, self.options.seed * 1_000 + turn, shared or [])

    def _warm(self, length: int, batch: int = 1, outputs: int = 4, shared_tokens: int = 0) -> None:
        """A short run of the load's own shape: kernels are compiled and graphs captured for the batch that counts."""
        if self.options.warmup:
            shared = self._prompts(1, shared_tokens, turn=998)[0] if shared_tokens else None
            scheduler = self.face.info().get("config", {}).get("scheduler", {})
            at_once = min(batch, MAX_WARM_REQUESTS, scheduler.get("max_num_seqs") or MAX_WARM_REQUESTS)
            self.face.run(self._prompts(at_once, length, turn=999, shared=shared), outputs, tick=self.tick("warm-up"))

    def _single(self) -> Metrics:
        load = self.load
        metrics: Metrics = {}
        length = load.input_tokens[0]
        self._warm(length)
        ttft, tpot = [], []
        for turn in range(self.options.repeats):
            record = _checked(self.face.run(self._prompts(1, length, turn), load.output_tokens, tick=self.tick(f"run {turn + 1}")))[0]
            ttft.append(record.ttft_s * 1e3)
            tpot.append((record.tpot_s or 0.0) * 1e3)
            metrics = {"ttft_ms": statistics.median(ttft), "tpot_ms": statistics.median(tpot), "itl_ms": summary_ms(record.itl_s)}
            metrics |= {"output_tok_s": 1e3 / metrics["tpot_ms"] if metrics["tpot_ms"] else 0.0, "repeats": turn + 1}
            self.save(metrics)
        return metrics

    def _prefill(self) -> Metrics:
        metrics: Metrics = {"ttft_ms": {}, "prefill_tok_s": {}, "ttft_ms_summary": {}}
        for length in self.load.input_tokens:
            self._warm(length)
            tick, found, end = self.tick(f"{length} tokens"), [], time.perf_counter() + (self.options.duration_s or float("inf"))
            for turn in range(self.load.requests):
                found += [r.ttft_s for r in _checked(self.face.run(self._prompts(1, length, turn), 1))]
                tick(turn + 1, turn + 1)
                if time.perf_counter() > end:
                    break
            median_s = statistics.median(found)
            metrics["ttft_ms"][str(length)] = median_s * 1e3
            metrics["prefill_tok_s"][str(length)] = length / median_s
            metrics["ttft_ms_summary"][str(length)] = summary_ms(found)
            self.save(metrics)
        return metrics

    def _decode_sweep(self) -> Metrics:
        metrics: Metrics = {"ms_per_step": {}, "output_tok_s": {}}
        length = self.load.input_tokens[0]
        for batch in self.load.batch:
            self._warm(length, batch)
            records = _checked(self.face.run(self._prompts(batch, length), self.load.output_tokens, tick=self.tick(f"batch {batch}")))
            step_s = step_time_s(records)
            metrics["ms_per_step"][str(batch)] = step_s * 1e3
            metrics["output_tok_s"][str(batch)] = batch / step_s
            self.save(metrics)
        return metrics

    def _offline(self) -> Metrics:
        load, duration_s = self.load, self.options.duration_s
        length = load.input_tokens[0]
        self._warm(length, load.requests)
        prompts = self._prompts(load.requests, length)
        try:
            self.face.run(prompts, load.output_tokens, duration_s=duration_s, request_rate=self.options.request_rate, tick=self.tick("run"))
        except KeyboardInterrupt:
            if self.face.records:
                self.save(self._offline_metrics(self.face.records, steady=True))
            raise
        records = self.face.records if duration_s else _checked(self.face.records)
        return self._offline_metrics(records, steady=duration_s is not None)

    def _offline_metrics(self, records: list[Record], *, steady: bool) -> Metrics:
        if steady:  # the run was cut: count what arrived after the ramp
            start_s, end_s = self._cut(records)
            begin_s = start_s + RAMP * (end_s - start_s)
            rate = tokens_between(records, begin_s, end_s) / (end_s - begin_s)
            share = (self.load.input_tokens[0] + self.load.output_tokens) / self.load.output_tokens
            metrics: Metrics = {"output_tok_s": rate, "total_tok_s": rate * share, "steady_s": end_s - begin_s}
        else:
            total_s = max(r.end_s for r in records) - min(r.start_s for r in records)
            tokens = sum(r.output_tokens for r in records)
            metrics = {
                "total_s": total_s,
                "output_tok_s": tokens / total_s,
                "total_tok_s": (tokens + sum(r.prompt_tokens for r in records)) / total_s,
                "ms_per_step": total_s * 1e3 / self.load.output_tokens,
                "requests_per_second": len(records) / total_s,
            }
        done = [r for r in records if r.ok]
        return metrics | {f"{name}_ms": summary_ms(sample) for name, sample in samples(done).items()}

    def _shared_prefix(self) -> Metrics:
        load = self.load
        metrics: Metrics = {"total_s": {}, "output_tok_s": {}, "cached_tokens": {}}
        for _ in range(2):  # cold, then cached: both kinds of steps
            self._warm(load.input_tokens[0], load.requests, shared_tokens=load.shared_prefix_tokens)
        shared = self._prompts(1, load.shared_prefix_tokens, turn=500 + int(time.time()) % 100)[0]
        for turn, name in enumerate(("cold", "cached")):
            prompts = self._prompts(load.requests, load.input_tokens[0], turn, shared)
            records = _checked(self.face.run(prompts, load.output_tokens, tick=self.tick(name)))
            total_s = max(r.end_s for r in records) - min(r.start_s for r in records)
            metrics["total_s"][name] = total_s
            metrics["output_tok_s"][name] = sum(r.output_tokens for r in records) / total_s
            metrics["cached_tokens"][name] = sum(r.cached_tokens for r in records)
            self.save(metrics)
        return metrics

    def _closed_loop(self) -> Metrics:
        load, options = self.load, self.options
        metrics: Metrics = {name: {} for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "output_tok_s", "goodput", "serving")}
        for concurrency in load.concurrency:
            self._warm(load.input_tokens[0], concurrency)
            key, count = str(concurrency), 8 * concurrency if load.requests <= 1 else load.requests
            prompts = self._prompts(count, load.input_tokens[0], turn=concurrency)
            try:
                self.face.run(
                    prompts,
                    load.output_tokens,
                    concurrency=concurrency,
                    duration_s=options.duration_s,
                    request_rate=options.request_rate,
                    tick=self.tick(f"{concurrency} at once"),
                )
            except KeyboardInterrupt:
                self._add_point(metrics, key, self.face.records, interrupted=True)
                self.save(metrics)
                raise
            if options.duration_s is None:
                _checked(self.face.records)
            self._add_point(metrics, key, self.face.records)
            self.save(metrics)
        return metrics

    def _add_point(self, metrics: Metrics, key: str, records: list[Record], *, interrupted: bool = False) -> None:
        done = [r for r in records if r.ok]
        if not done:
            return
        cut = interrupted or self.options.duration_s is not None
        start_s, end_s = self._cut(records) if cut else (min(r.start_s for r in records), max(r.end_s for r in done))
        serving = serving_metrics(records, end_s - start_s, self.options.slo)
        serving["max_concurrency"] = int(key)
        for name, sample in samples(done).items():
            metrics[f"{name}_ms"][key] = summary_ms(sample)
        begin_s = start_s + RAMP * (end_s - start_s)
        metrics["output_tok_s"][key] = tokens_between(records, begin_s, end_s) / (end_s - begin_s) if cut else serving["output_throughput"]
        metrics["goodput"][key] = serving["request_goodput"]
        metrics["serving"][key] = serving

    def _cut(self, records: list[Record]) -> tuple[float, float]:
        """When a load that was cut began and ended; starting and stopping a load generator's processes is not in it."""
        start_s = min(r.start_s for r in records)
        return start_s, min(time.perf_counter(), start_s + (self.options.duration_s or math.inf))


class RunFailedError(Exception):
    """Requests failed: the numbers would not mean what they say."""


def _checked(records: list[Record]) -> list[Record]:
    failed = [r for r in records if not r.ok]
    if failed:
        raise RunFailedError(f"{len(failed)} of {len(records)} requests failed: {failed[0].error or 'no token came back'}")
    return records


def step_time_s(records: list[Record]) -> float:
    """Mean time of a decode step while every request of a batch is decoding: between the last first token and the first end."""
    begin_s = max(r.events_s[0] for r in records)
    end_s = min(r.events_s[-1] for r in records)
    steps = [sum(begin_s < moment <= end_s for moment in r.events_s) * (r.output_tokens / len(r.events_s)) for r in records]
    count = statistics.fmean(steps)
    if count < 1 or end_s <= begin_s:
        raise RunFailedError(
            f"the {len(records)} requests never decoded together: a batch that large does not fit, or takes more output tokens to fill"
        )
    return (end_s - begin_s) / count
