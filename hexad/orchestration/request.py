"""One choice of one request, as the scheduler sees it, and the events that come out of it. No torch.

`Request` is mutable and belongs to the scheduler alone: nobody else may write to it. Its life:

    HELD ──> WAITING ──> RUNNING ──> FINISHED
               ^            │
               └─ PREEMPTED <┘      (parked until its results in flight have come back, then WAITING again)

HELD: choice 1.. of a request waits for choice 0 to compute the prompt that they share.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from hexad.common.params import SamplingParams
from hexad.engine.plan import NewRequest, PromptSegment, TokenLogprobs, TokenSegment

if TYPE_CHECKING:
    from hexad.orchestration.kv.radix import Namespace, Node

HELD, WAITING, RUNNING, PREEMPTED, FINISHED = range(5)
STATUS_NAMES = ("held", "waiting", "running", "preempted", "finished")

SeedSource = Callable[[], int]


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """News of one choice, field by field those of `messages.Output`, and the address that it goes to."""

    rid: int
    front_end: bytes
    request_id: str
    choice: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # choice 0, all of them at once, before or with its first token
    finish_reason: str | None = None  # "stop" | "length" | "abort"
    stop_token_id: int | None = None
    num_cached: int | None = None  # first event of choice 0
    queued_s: float | None = None  # first event
    error: str | None = None
    error_code: str | None = None
    num_preemptions: int = 0  # terminal event

    @property
    def terminal(self) -> bool:
        """True for the one event that ends the choice."""
        return self.finish_reason is not None or self.error is not None


class Siblings:
    """The choices of one request with n > 1. `leader` computes the prompt, `held` wait for it."""

    __slots__ = ("held", "leader", "namespace", "num_unadmitted")

    def __init__(self, leader: Request, namespace: Namespace | None) -> None:
        self.leader = leader
        self.held: list[Request] = []
        self.namespace = namespace  # private namespace of the shared prompt when prefix caching is off
        self.num_unadmitted = 0  # followers that never ran: the private namespace lives as long


class Request:
    """State of one choice. Counts are in tokens (positions) unless the name says otherwise."""

    __slots__ = (
        "adapter_id",
        "arrival_s",
        "cache_limit_blocks",
        "capacity",
        "choice",
        "deadline_s",
        "drafts",
        "eos_token_ids",
        "error",
        "finish_reason",
        "first_page",
        "front_end",
        "ids",
        "known",
        "last_step",
        "looks_up",
        "max_output",
        "min_tokens",
        "namespace",
        "node",
        "num_cached",
        "num_cached_first",
        "num_computed",
        "num_done",
        "num_inflight",
        "num_inflight_drafts",
        "num_inserted",
        "num_preemptions",
        "params",
        "priority",
        "prompt_len",
        "prompt_logprobs",
        "prompt_segments",
        "queued_s",
        "request_id",
        "rid",
        "seed",
        "seq",
        "siblings",
        "status",
        "stop_ids",
        "tables",
        "tenant",
        "told_first",
        "want_logprobs",
        "want_prompt_logprobs",
    )

    def __init__(
        self,
        *,
        rid: int,
        request_id: str,
        front_end: bytes,
        choice: int,
        prompt: tuple[PromptSegment, ...],
        ids: array[int],
        params: SamplingParams,
        seed: int,
        eos_token_ids: tuple[int, ...],
        max_output: int,
        arrival_s: float,
        num_groups: int,
        namespace: Namespace,
    ) -> None:
        self.rid = rid
        self.request_id = request_id
        self.front_end = front_end
        self.choice = choice
        self.prompt_segments = prompt
        self.prompt_len = len(ids)
        self.ids = ids  # the prompt, then every confirmed output
        self.params = params
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
        self.min_tokens = params.min_tokens
        self.max_output = max_output
        self.want_logprobs = params.logprobs is not None
        self.want_prompt_logprobs = params.prompt_logprobs is not None and choice == 0
        self.prompt_logprobs: list[TokenLogprobs | None] = []  # collected until the prompt is complete
        self.priority = 0
        self.tenant = ""
        self.adapter_id: int | None = None
        self.deadline_s: float | None = None  # absolute, on the scheduler's clock
        self.arrival_s = arrival_s
        self.seq = rid  # order of arrival; kept through preemption
        self.siblings: Siblings | None = None

        self.status = WAITING
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.num_preemptions = 0
        self.num_cached = 0  # positions not computed thanks to the cache, at the latest admission
        self.num_cached_first: int | None = None  # at the first admission: what usage reports
        self.queued_s: float | None = None
        self.told_first = False

        self.num_computed = 0  # positions planned as computed
        self.num_done = 0  # positions computed by plans that have retired
        self.num_inflight = 0  # sampled tokens that plans in flight will bring, drafts taken as accepted
        self.num_inflight_drafts = 0  # how many of these are drafts, which may be rejected
        self.drafts: tuple[int, ...] = ()  # for the next row
        self.last_step = -1  # last plan with a row of this request
        self.known = False  # the executor has it

        self.namespace = namespace
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.first_page = [0] * num_groups  # table entries below are NO_BLOCK
        self.capacity = 0  # positions that the tables cover
        self.node: Node | None = None  # where the last of `num_inserted` blocks sits in the tree
        self.num_inserted = 0  # blocks of this request that the tree knows
        self.cache_limit_blocks = 0  # blocks that may enter the tree
        self.looks_up = False  # may begin with cached blocks

    @property
    def num_output(self) -> int:
        """Confirmed output tokens."""
        return len(self.ids) - self.prompt_len

    @property
    def num_total(self) -> int:
        """Positions whose ids exist, on the host or in flight."""
        return len(self.ids) + self.num_inflight

    @property
    def output_ids(self) -> list[int]:
        """Confirmed output ids (a copy)."""
        return self.ids[self.prompt_len :].tolist()

    def as_new(self) -> NewRequest:
        """What an executor that does not know the request needs; the tables as they are now."""
        prompt = self.prompt_segments
        if len(self.ids) > self.prompt_len:
            prompt = (*prompt, TokenSegment(tuple(self.ids[self.prompt_len :])))
        return NewRequest(
            rid=self.rid,
            prompt=prompt,
            prompt_len=self.prompt_len,
            params=self.params,
            choice=self.choice,
            seed=self.seed,
            eos_token_ids=self.eos_token_ids,
            block_ids=tuple(map(tuple, self.tables)),
            num_cached=self.num_cached,
            adapter_id=self.adapter_id,
            want_prompt_logprobs=self.want_prompt_logprobs,
        )

    def __repr__(self) -> str:
        return (
            f"Request(rid={self.rid}, {self.request_id!r}#{self.choice}, {STATUS_NAMES[self.status]}, ids={len(self.ids)}, "
            f"computed={self.num_computed}, inflight={self.num_inflight})"
        )
