"""The metrics registry: one process (the API's) owns it, the engine's numbers reach it through the `stats` call.

Each number is kept once; `/metrics` shows it under Hexad's name and, where the table says so, under vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from hexad.common.metric_table import METRICS, PREFIX, TWIN_PREFIX, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Stats = Mapping[str, float | int | str | None]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one ended request (one prompt, all its choices) contributes. Times are seconds of one monotonic clock."""

    prompt_tokens: int
    generation_tokens: int
    finish_reason: str  # "stop" | "length" | "abort" | "error"
    arrived_s: float
    ended_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    queued_s: float | None = None  # as the engine's first output says
    cached_tokens: int = 0
    gaps_s: tuple[float, ...] = ()  # between successive outputs of one choice


class OwnSample(msgspec.Struct, frozen=True, array_like=True):
    """One number that an API process has counted by itself."""

    metric: str
    sample: str  # the metric's name with _total, _bucket, _sum, _count
    labels: dict[str, str]
    value: float


class MetricsRegistry:
    """Own every metric of one served model. Not thread-safe beyond what prometheus_client is."""

    def __init__(self, model_name: str, *, twins: bool = True) -> None:
        """`twins`: also show vLLM's names."""
        self._model = model_name
        self._stats: Stats = {}
        self._cache_info: dict[str, str] | None = None
        self._others: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        self._own = CollectorRegistry(auto_describe=False)
        self._metrics: dict[str, Any] = {m.name: _make(m, self._own) for m in METRICS if m.source != "engine"}
        self._shown = CollectorRegistry(auto_describe=False)
        self._shown.register(_Shown(self, twins))
        for metric in METRICS:  # a metric without labels of its own exists from the start: rate() needs the zero
            if metric.source == "request" and metric.labels == ("model_name",):
                self._metrics[metric.name].labels(self._model)

    def observe_request(self, record: RequestRecord) -> None:
        """Count one request that ended."""
        self._metrics["request_success"].labels(self._model, record.finish_reason).inc()
        self._add("prompt_tokens", record.prompt_tokens)
        self._add("generation_tokens", record.generation_tokens)
        self._add("cached_prompt_tokens", record.cached_tokens)
        self._observe("request_prompt_tokens", record.prompt_tokens)
        self._observe("request_generation_tokens", record.generation_tokens)
        self._observe("e2e_request_latency_seconds", record.ended_s - record.arrived_s)
        self._observe_phases(record)

    def _observe_phases(self, record: RequestRecord) -> None:
        if record.queued_s is not None:
            self._observe("request_queue_time_seconds", record.queued_s)
        if record.first_token_s is None:
            return
        to_first_s = record.first_token_s - record.arrived_s
        self._observe("time_to_first_token_seconds", to_first_s)
        prefill_s = max(0.0, to_first_s - (record.queued_s or 0.0))
        decode_s = (record.last_token_s or record.first_token_s) - record.first_token_s
        self._observe("request_prefill_time_seconds", prefill_s)
        self._observe("request_decode_time_seconds", decode_s)
        self._observe("request_inference_time_seconds", prefill_s + decode_s)
        if record.generation_tokens > 1:
            self._observe("request_time_per_output_token_seconds", decode_s / (record.generation_tokens - 1))
        gaps = self._metrics["inter_token_latency_seconds"].labels(self._model)
        for gap_s in record.gaps_s:
            gaps.observe(gap_s)

    def observe_http(self, method: str, route: str, status: int, duration_s: float) -> None:
        """Count one HTTP request. `route` is the template ("/v1/models/{id}"), never the path: its values are unbounded."""
        self._metrics["http_requests"].labels(method, route, str(status)).inc()
        self._metrics["http_request_duration_seconds"].labels(method, route).observe(duration_s)

    def set_cache_info(self, *, block_size: int, num_blocks: int, cache_dtype: str) -> None:
        """What the KV cache is (from the handshake)."""
        self._cache_info = {"block_size": str(block_size), "num_gpu_blocks": str(num_blocks), "cache_dtype": cache_dtype}

    def set_engine_stats(self, stats: Stats | None) -> None:
        """The engine's latest `stats`; None: it did not answer (its counters stay, `engine_up` is 0)."""
        self._stats = {**self._stats, "up": 0} if stats is None else {**stats, "up": 1}

    def own_samples(self) -> list[OwnSample]:
        """What this process has counted, for its siblings."""
        families = self._own.collect()
        samples = ((family.name, s.name, s.labels, s.value) for family in families for s in family.samples)
        return [OwnSample(*sample) for sample in samples if not sample[1].endswith("_created")]

    def set_others(self, samples: list[OwnSample]) -> None:
        """What the other API processes have counted; it is added to our own."""
        self._others = {}
        for sample in samples:
            values = self._others.setdefault(sample.metric, {})
            key = (sample.sample, tuple(sample.labels.items()))
            values[key] = values.get(key, 0.0) + sample.value

    def render(self) -> bytes:
        """The body of /metrics (`CONTENT_TYPE`)."""
        return bytes(generate_latest(self._shown))

    def _add(self, name: str, value: float) -> None:
        self._metrics[name].labels(self._model).inc(value)

    def _observe(self, name: str, value: float) -> None:
        self._metrics[name].labels(self._model).observe(max(0.0, value))

    # What `_Shown` collects.

    def families(self) -> Iterator[tuple[Metric, Family]]:
        """Every metric that has a value, under its own name without prefix."""
        own = {family.name: family for family in self._own.collect()}
        for metric in METRICS:
            family = self._engine_family(metric) if metric.source == "engine" else own.get(metric.name)
            if family is not None:
                yield metric, _added(family, self._others.get(metric.name)) if metric.source != "engine" else family

    def _engine_family(self, metric: Metric) -> Family | None:
        if metric.kind == "info":
            return self._info_family(metric)
        if metric.kind == "histogram":
            return self._histogram_family(metric)
        value = self._stats.get(metric.stat)
        if not isinstance(value, int | float):
            return None
        family = (GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily)(metric.name, metric.help, labels=metric.labels)
        family.add_metric([self._model], value)
        return family

    def _info_family(self, metric: Metric) -> Family | None:
        if self._cache_info is None:
            return None
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        family.add_metric([self._model, *(self._cache_info[label] for label in metric.labels[1:])], 1)
        return family

    def _histogram_family(self, metric: Metric) -> Family | None:
        if f"{metric.stat}_sum" not in self._stats:
            return None
        counts = [_number(self._stats.get(f"{metric.stat}_bucket_{i}")) for i in range(len(metric.buckets) + 1)]
        bounds = [*(str(float(bound)) for bound in metric.buckets), "+Inf"]
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        family.add_metric([self._model], list(zip(bounds, accumulate(counts), strict=True)), _number(self._stats[f"{metric.stat}_sum"]))
        return family


class _Shown(Collector):  # type: ignore[misc]  # prometheus_client is untyped here
    """Shows each family under one or two prefixed names."""

    def __init__(self, registry: MetricsRegistry, twins: bool) -> None:
        self._registry = registry
        self._twins = twins

    def collect(self) -> Iterator[Family]:
        for metric, family in self._registry.families():
            yield _prefixed(family, PREFIX)
            if self._twins and metric.vllm:
                yield _prefixed(family, TWIN_PREFIX)


def _added(family: Family, others: Mapping[tuple[str, tuple[tuple[str, str], ...]], float] | None) -> Family:
    """`family` with the counts of others; what only they have comes at the end, in their order."""
    if not others:
        return family
    rest = dict(others)
    own = [s._replace(value=s.value + rest.pop((s.name, tuple(s.labels.items())), 0.0)) for s in family.samples]
    total = Family(family.name, family.documentation, family.type)
    total.samples = own
    for (name, labels), value in rest.items():
        total.add_sample(name, dict(labels), value)
    return total


def _prefixed(family: Family, prefix: str) -> Family:
    shown = Family(prefix + family.name, family.documentation, family.type)
    # Creation times would make half of the page, and nobody reads them.
    shown.samples = [s._replace(name=prefix + s.name) for s in family.samples if not s.name.endswith("_created")]
    return shown


def _make(metric: Metric, registry: CollectorRegistry) -> Any:
    if metric.kind == "histogram":
        return Histogram(metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=registry)
    assert metric.kind == "counter", metric
    return Counter(metric.name, metric.help, metric.labels, registry=registry)


def _number(value: float | int | str | None) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
