"""What the scheduler is told at start, and what it tells when asked. No torch."""

from __future__ import annotations

import msgspec

from hexad.common.errors import ConfigError

UNLIMITED_BLOCKS = 2**62


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved limits ("auto" is decided before). `check()` before use."""

    max_num_seqs: int = 256  # running choices
    max_num_batched_tokens: int = 8_192  # token budget of a step
    max_model_len: int = 8_192  # prompt plus output of one choice
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_prefill_tokens_per_step: int | None = None  # prompt tokens in a step that also decodes; None: what the budget leaves
    scheduling_policy: str = "fcfs"  # fcfs | priority | fair
    tenant_weights: dict[str, float] = {}  # "fair": share of each tenant, default 1
    max_num_queued_reqs: int | None = None  # choices waiting beyond those that can start at once; None: unbounded
    max_queued_tokens: int | None = None  # prompt tokens waiting; None: unbounded
    depth: int = 2  # plans in flight
    model_revision: str = ""  # part of the cache identity
    seed: int | None = None  # draws the seeds of requests that name none, in the order of their arrival; None: a fresh one

    def check(self) -> SchedulerSettings:
        """Raise `ConfigError` for limits that contradict each other; returns self."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, max_num_seqs is {self.max_num_seqs}: each running sequence "
                f"needs one token a step, so raise max_num_batched_tokens to {self.max_num_seqs} or lower max_num_seqs"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill a whole prompt must fit one step: max_num_batched_tokens is {self.max_num_batched_tokens}, "
                f"max_model_len is {self.max_model_len}: raise the first to {self.max_model_len} or enable chunked prefill"
            )
        if self.max_prefill_tokens_per_step is not None and self.max_prefill_tokens_per_step < 1:
            raise ConfigError(f"max_prefill_tokens_per_step is {self.max_prefill_tokens_per_step}: it must be at least 1")
        if self.scheduling_policy not in ("fcfs", "priority", "fair"):
            raise ConfigError(f"scheduling_policy is {self.scheduling_policy!r}: it must be fcfs, priority or fair")
        for tenant, weight in self.tenant_weights.items():
            if not weight > 0:
                raise ConfigError(f"tenant_weights[{tenant!r}] is {weight}: it must be above 0")
        return self


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. Counters (ever) end in `_total`."""

    num_running: int
    num_waiting: int  # held, queued and preempted choices
    num_waiting_tokens: int  # their prompt and output tokens
    num_blocks: int
    num_free_blocks: int  # free, or free once plans in flight have retired
    num_cached_blocks: int  # in the tree and used by nobody: evictable
    kv_usage: float  # share of blocks that requests hold, 0..1
    num_tree_blocks: int  # in the tree, shared with requests or not
    prefix_queries_total: int  # prompt tokens looked up
    prefix_hits_total: int  # prompt tokens found
    preemptions_total: int
    evicted_blocks_total: int
    prompt_tokens_total: int  # of requests that were admitted, cached ones included
    generation_tokens_total: int
    steps_total: int
    num_inflight_steps: int
