"""Histograms of engine steps, kept as plain counts in the core process and carried by its `stats`. No Prometheus here."""

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
    """A step observer that fills the histograms of the table."""

    def __init__(self) -> None:
        self._tokens = Buckets(find("iteration_tokens_total"))
        self._seconds = Buckets(find("step_time_seconds"))

    def on_plan(self, plan: StepPlan) -> None:
        """Nothing: a step counts when it is done."""

    def on_result(self, plan: StepPlan, result: StepResult, elapsed_s: float) -> None:
        self._tokens.observe(plan.num_tokens)
        self._seconds.observe(elapsed_s)

    def stats(self) -> dict[str, float]:
        return {**self._tokens.stats(), **self._seconds.stats()}
