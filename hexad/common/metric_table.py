"""The table of every metric: what /metrics shows, what the documentation lists, what dashboards may rely on. Data only.

Names carry the prefix `hexad:`; those with `vllm` also appear under vLLM's name, so that existing dashboards and autoscaling recipes
work. Counters get Prometheus' suffix `_total`.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

PREFIX: Final = "hexad:"
TWIN_PREFIX: Final = "vllm:"

SECONDS: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
TOKEN_SECONDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.025,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


class Metric(NamedTuple):
    """One metric. `source` says who feeds it: the engine's `stats` call, finished requests, or the HTTP side."""

    name: str
    kind: Literal["gauge", "counter", "histogram", "info"]
    source: Literal["engine", "request", "http"]
    help: str
    labels: tuple[str, ...] = ("model_name",)
    buckets: tuple[float, ...] = ()
    vllm: bool = True  # also under vLLM's prefix
    stat: str = ""  # "engine": its key in `stats`


METRICS: Final[tuple[Metric, ...]] = (
    Metric("num_requests_running", "gauge", "engine", "Requests in the running batch.", stat="num_running"),
    Metric("num_requests_waiting", "gauge", "engine", "Requests waiting to be scheduled.", stat="num_waiting"),
    Metric("kv_cache_usage_perc", "gauge", "engine", "Share of KV blocks held by requests, 0 to 1.", stat="kv_usage"),
    Metric("cache_config_info", "info", "engine", "KV cache configuration.", ("model_name", "block_size", "num_gpu_blocks", "cache_dtype")),
    Metric("prefix_cache_queries", "counter", "engine", "Prompt tokens looked up in the prefix cache.", stat="prefix_queries_total"),
    Metric("prefix_cache_hits", "counter", "engine", "Prompt tokens found in the prefix cache.", stat="prefix_hits_total"),
    Metric("num_preemptions", "counter", "engine", "Requests preempted for lack of KV blocks.", stat="preemptions_total"),
    Metric("iteration_tokens_total", "histogram", "engine", "Tokens of an engine step.", buckets=STEP_TOKENS, stat="iteration_tokens"),
    Metric("step_time_seconds", "histogram", "engine", "Launch to result of a step.", buckets=TOKEN_SECONDS, vllm=False, stat="step_s"),
    Metric("engine_steps", "counter", "engine", "Engine steps.", vllm=False, stat="steps_total"),
    Metric("device_busy_seconds", "counter", "engine", "Time in which the device computed.", vllm=False, stat="device_busy_s"),
    Metric("spec_decode_num_drafts", "counter", "engine", "Verified groups of speculated tokens.", stat="drafts_total"),
    Metric("spec_decode_num_draft_tokens", "counter", "engine", "Speculated tokens that were verified.", stat="draft_tokens_total"),
    Metric("spec_decode_num_accepted_tokens", "counter", "engine", "Speculated tokens that were right.", stat="accepted_tokens_total"),
    Metric("engine_up", "gauge", "engine", "1 while the engine process answers.", vllm=False, stat="up"),
    Metric("prompt_tokens", "counter", "request", "Prompt tokens of requests that ended."),
    Metric("generation_tokens", "counter", "request", "Generated tokens of requests that ended."),
    Metric("cached_prompt_tokens", "counter", "request", "Prompt tokens served from the prefix cache.", vllm=False),
    Metric("request_success", "counter", "request", "Requests that ended, by how.", ("model_name", "finished_reason")),
    Metric("time_to_first_token_seconds", "histogram", "request", "From arrival to the first token.", buckets=SECONDS),
    Metric("inter_token_latency_seconds", "histogram", "request", "Between two outputs of one request.", buckets=TOKEN_SECONDS),
    Metric("request_time_per_output_token_seconds", "histogram", "request", "Mean time per token after the first.", buckets=TOKEN_SECONDS),
    Metric("e2e_request_latency_seconds", "histogram", "request", "From arrival to the end.", buckets=SECONDS),
    Metric("request_queue_time_seconds", "histogram", "request", "From arrival at the engine until first scheduled.", buckets=SECONDS),
    Metric("request_prefill_time_seconds", "histogram", "request", "From first scheduled to the first token.", buckets=SECONDS),
    Metric("request_decode_time_seconds", "histogram", "request", "From the first token to the last.", buckets=SECONDS),
    Metric("request_inference_time_seconds", "histogram", "request", "From first scheduled to the last token.", buckets=SECONDS),
    Metric("request_prompt_tokens", "histogram", "request", "Prompt tokens of one request.", buckets=TOKENS),
    Metric("request_generation_tokens", "histogram", "request", "Generated tokens of one request.", buckets=TOKENS),
    Metric("http_requests", "counter", "http", "HTTP requests by route and status.", ("method", "route", "status"), vllm=False),
    Metric("http_request_duration_seconds", "histogram", "http", "To the last byte.", ("method", "route"), SECONDS, vllm=False),
)  # fmt: skip


def find(name: str) -> Metric:
    """The metric called `name` (without prefix)."""
    return next(metric for metric in METRICS if metric.name == name)
