"""The metrics registry: names, twins, engine numbers, histograms."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from hexad.common.metric_table import METRICS, find
from hexad.common.metrics import MetricsRegistry, RequestRecord
from hexad.engine.plan import Row, RowResult, StepPlan, StepResult
from hexad.orchestration.metrics import StepMetrics


def samples(registry: MetricsRegistry) -> dict[tuple[str, str], float]:
    """(name, the "le" or reason label) -> value."""
    families = text_string_to_metric_families(registry.render().decode())
    return {(s.name, s.labels.get("le") or s.labels.get("finished_reason") or ""): s.value for f in families for s in f.samples}


def record(**changes: object) -> RequestRecord:
    values = {
        "prompt_tokens": 10,
        "generation_tokens": 5,
        "finish_reason": "stop",
        "arrived_s": 100.0,
        "first_token_s": 100.5,
        "last_token_s": 102.5,
        "ended_s": 102.6,
        "queued_s": 0.2,
        "gaps_s": (0.5, 0.5, 0.5, 0.5),
    }
    return RequestRecord(**{**values, **changes})


def test_a_request_counts_under_both_names() -> None:
    registry = MetricsRegistry("m")
    registry.observe_request(record())
    got = samples(registry)
    for prefix in ("hexad:", "vllm:"):
        assert got[prefix + "prompt_tokens_total", ""] == 10
        assert got[prefix + "generation_tokens_total", ""] == 5
        assert got[prefix + "request_success_total", "stop"] == 1
        assert got[prefix + "time_to_first_token_seconds_sum", ""] == 0.5
        assert got[prefix + "request_time_per_output_token_seconds_sum", ""] == 0.5
        assert abs(got[prefix + "request_prefill_time_seconds_sum", ""] - 0.3) < 1e-9
        assert got[prefix + "inter_token_latency_seconds_count", ""] == 4


def test_a_request_without_tokens_has_no_first_token_time() -> None:
    registry = MetricsRegistry("m")
    registry.observe_request(record(generation_tokens=0, first_token_s=None, last_token_s=None, gaps_s=(), finish_reason="abort"))
    got = samples(registry)
    assert got["hexad:time_to_first_token_seconds_count", ""] == 0
    assert got["hexad:request_success_total", "abort"] == 1


def test_engine_numbers_and_its_death() -> None:
    registry = MetricsRegistry("m", twins=False)
    steps = StepMetrics()
    plan = StepPlan(step_id=0, rows=(Row(rid=0, start=0, num_tokens=9, samples=True, num_drafts=4),), num_tokens=9)
    steps.on_result(plan, StepResult(step_id=0, rows=(RowResult(rid=0, tokens=(1, 2, 3), num_accepted=2),)), 0.004)
    registry.set_cache_info(block_size=16, num_blocks=100, cache_dtype="bfloat16")
    registry.set_engine_stats({"num_running": 3, "num_waiting": 1, "preemptions_total": 2, **steps.stats()})
    got = samples(registry)
    assert got["hexad:num_requests_running", ""] == 3
    assert got["hexad:num_preemptions_total", ""] == 2
    assert got["hexad:iteration_tokens_total_bucket", "8.0"] == 0
    assert got["hexad:iteration_tokens_total_bucket", "16.0"] == 1
    assert got["hexad:iteration_tokens_total_bucket", "+Inf"] == 1
    assert got["hexad:step_time_seconds_count", ""] == 1
    assert got["hexad:engine_up", ""] == 1
    speculation = [got[f"hexad:spec_decode_num_{what}_total", ""] for what in ("drafts", "draft_tokens", "accepted_tokens")]
    assert speculation == [1, 4, 2]
    assert not any(name.startswith("vllm:") for name, _ in got)
    registry.set_engine_stats(None)
    got = samples(registry)
    assert got["hexad:engine_up", ""] == 0 and got["hexad:num_preemptions_total", ""] == 2


def test_the_table_is_consistent() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert (metric.source == "engine") == bool(metric.stat or metric.kind == "info"), metric.name
        assert list(metric.buckets) == sorted(metric.buckets), metric.name
    assert find("prompt_tokens").kind == "counter"
