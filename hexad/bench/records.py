"""What one request did, and the statistics of many. Times are seconds of one monotonic clock; statistics are in milliseconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec


class Record(msgspec.Struct):
    """One request. `events_s` are the moments at which output arrived (one token each, or several with speculation)."""

    prompt_tokens: int
    start_s: float
    events_s: list[float] = []
    output_tokens: int = 0
    end_s: float = 0.0
    error: str | None = None
    cached_tokens: int = 0

    @property
    def ok(self) -> bool:
        """Finished, with at least one token."""
        return self.error is None and bool(self.events_s) and self.end_s > 0

    @property
    def ttft_s(self) -> float:
        return self.events_s[0] - self.start_s

    @property
    def e2el_s(self) -> float:
        """From sending the request to its last token."""
        return self.events_s[-1] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two tokens."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Times between arrivals."""
        return [b - a for a, b in zip(self.events_s, self.events_s[1:], strict=False)]


PERCENTILES = (50, 90, 95, 99)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks of an ordered sample."""
    position = (len(ordered) - 1) * percent / 100
    low, high = math.floor(position), math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summary_ms(seconds: Iterable[float]) -> dict[str, float]:
    """Mean, deviation and percentiles in milliseconds; empty for an empty sample."""
    ordered = sorted(value * 1e3 for value in seconds)
    if not ordered:
        return {}
    deviation = statistics.pstdev(ordered)
    return {"mean": statistics.fmean(ordered), "std": deviation, **{f"p{p}": percentile(ordered, p) for p in PERCENTILES}}


class Slo(msgspec.Struct, frozen=True):
    """Limits that a request must keep to count as good (milliseconds; None: no limit)."""

    ttft_ms: float | None = 1_000.0
    tpot_ms: float | None = 50.0
    e2el_ms: float | None = None

    def good(self, record: Record) -> bool:
        limits = ((self.ttft_ms, record.ttft_s), (self.tpot_ms, record.tpot_s), (self.e2el_ms, record.e2el_s))
        return record.ok and all(limit is None or value is None or value * 1e3 <= limit for limit, value in limits)


def serving_metrics(records: Sequence[Record], duration_s: float, slo: Slo) -> dict[str, Any]:
    """Statistics under the field names of `vllm bench serve`, so that its readers work."""
    done = [r for r in records if r.ok]
    tokens_in, tokens_out = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    found: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len([r for r in records if r.error is not None]),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(done) / duration_s,
        "request_goodput": len([r for r in done if slo.good(r)]) / duration_s,
        "output_throughput": tokens_out / duration_s,
        "total_token_throughput": (tokens_in + tokens_out) / duration_s,
    }
    for name, sample in samples(done).items():
        for key, value in summary_ms(sample).items():
            found[f"{'median' if key == 'p50' else key}_{name}_ms"] = value
    errors = sorted({r.error for r in records if r.error})
    return {**found, "errors": errors[:5]} if errors else found


def samples(done: Sequence[Record]) -> dict[str, list[float]]:
    """The four latency samples of finished requests, in seconds."""
    return {
        "ttft": [r.ttft_s for r in done],
        "tpot": [r.tpot_s for r in done if r.tpot_s is not None],
        "itl": [gap for r in done for gap in r.itl_s],
        "e2el": [r.e2el_s for r in done],
    }


def tokens_between(records: Sequence[Record], start_s: float, end_s: float) -> float:
    """Output tokens that arrived in a window (tokens of one request count evenly over its arrivals)."""
    total = 0.0
    for record in records:
        if record.events_s:
            inside = sum(start_s < moment <= end_s for moment in record.events_s)
            total += inside * record.output_tokens / len(record.events_s)
    return total


def parse_slo(items: Sequence[str]) -> Slo:
    """Read ["ttft:500", "tpot:50"] (milliseconds).

    Raises:
        ConfigError: an unknown name or a value that is no number.
    """
    from hexad.common.errors import ConfigError

    if not items:
        return Slo()
    limits: dict[str, float] = {}
    for item in items:
        name, _, value = item.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput has {item!r}: write name:milliseconds, for instance ttft:500") from None
        if name not in ("ttft", "tpot", "e2el") or limits[name] <= 0:
            raise ConfigError(f"--goodput has {item!r}: names are ttft, tpot and e2el, values above zero")
    return Slo(limits.get("ttft"), limits.get("tpot"), limits.get("e2el"))
