"""Which figures of a result are better when they grow, which when they shrink, and which are neither (sizes, counts, spreads, settings)."""

from __future__ import annotations

HIGHER = (
    "tok_s", "throughput", "goodput", "requests_per_second", "top1_agreement", "top1_agreement_clear", "load_bytes_s",
    "load_share_of_disk", "http_share_of_in_process", "cached_tokens", "gb_s", "tflop_s",
)  # fmt: skip
LOWER = (
    "ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "ttft_ms_summary", "total_s", "ms_per_step", "decode_step_ms", "ready_s", "first_token_s",
    "outside_s", "phases_s", "us", "perplexity", "kl_mean", "kl_p99", "kl_max", "logprob_difference_mean", "logprob_difference_max",
    "peak_memory_bytes", "failed", "step_s", "step_ms", "cpu_ms", "step_ms_median", "step_ms_p99", "schedule_ms_median",
    "update_ms_median", "parts_ms", "mean_ms", "p50_ms", "p99_ms", "idle_share", "idle_between_launches_share", "longest_gap_us",
)  # fmt: skip
_SPREAD = ("std",)
SAME = 0.01  # ratios nearer to one than this are neither


def direction(name: str) -> int:
    """1: more is better, -1: less is better, 0: neither. `name` is dotted; its last part that is known decides ("ttft_ms.8192.p50")."""
    parts = name.split(".")
    if any(part in _SPREAD or part.startswith(tuple(f"{word}_" for word in _SPREAD)) for part in parts):
        return 0
    if parts[0] == "reference_perplexity":
        return 0
    for part in reversed(parts):
        for known, sign in ((HIGHER, 1), (LOWER, -1)):
            if part in known or part.endswith(tuple(f"_{word}" for word in known if word != "us")):
                return sign
    return 0


def better(name: str, first: float, second: float) -> bool | None:
    """Whether `second` is better; None for equal ones and for figures without a direction."""
    sign = direction(name)
    if not sign or abs(second / first - 1) < SAME:
        return None
    return (second > first) == (sign > 0)
