"""Histograms of engine steps and counts of speculation, as plain counts in the core process, carried by its `stats`. No Prometheus here."""

from __future__ import annotations

from bisect import bisect_left

from hexad.common.metric_table import Metric, find
from hexad.engine.plan import StepPlan, StepResult


class Buckets:
    """Counts per bucket, their sum and number."""

    def __init__(self, metric: Metric) -> None:
        self._stat = metric.stat
        self._bounds = metric.buckets
        self._counts = [0] * (len(metric.buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def stats(self) -> dict[str, float]:
        """`{stat}_sum` and, per bucket, `{stat}_bucket_{index}` (not cumulative; the last is above every bound)."""
        return {f"{self._stat}_sum": self._sum, **{f"{self._stat}_bucket_{i}": count for i, count in enumerate(self._counts)}}


class StepMetrics:
    """A step observer that fills the histograms and the speculation counters of the table."""

    def __init__(self) -> None:
        self._tokens = Buckets(find("iteration_tokens_total"))
        self._seconds = Buckets(find("step_time_seconds"))
        self._drafts = self._draft_tokens = self._accepted_tokens = 0

    def on_plan(self, plan: StepPlan) -> None:
        """Nothing: a step counts when it is done."""

    def on_result(self, plan: StepPlan, result: StepResult, elapsed_s: float) -> None:
        self._tokens.observe(plan.num_tokens)
        self._seconds.observe(elapsed_s)
        for row, out in zip(plan.rows, result.rows, strict=True):
            if row.num_drafts:
                self._drafts += 1
                self._draft_tokens += row.num_drafts
                self._accepted_tokens += out.num_accepted

    def stats(self) -> dict[str, float]:
        speculation = {
            "drafts_total": self._drafts,
            "draft_tokens_total": self._draft_tokens,
            "accepted_tokens_total": self._accepted_tokens,
        }
        return {**self._tokens.stats(), **self._seconds.stats(), **speculation}
