"""The scheduler: requests in, step plans out, results in, events out. Pure Python, no torch, no I/O, an injected clock.

Contract
- One thread calls it: the core loop's. `schedule()` makes the next plan (None: nothing to compute now); the core keeps at most
  `settings.depth` plans in flight and hands each result to `update` with its plan, in order.
- Every accepted choice gets exactly one terminal event: from `update` (finished or failed), `abort` or `expire`.
- If `has_work()` is true and no plan is in flight, `schedule()` returns a plan: a queue is never stuck.
- After each call `check_integrity()` holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from hexad.common.clock import Clock
from hexad.common.errors import DeadlineError, RequestError, RequestFailedError
from hexad.engine.plan import KVLayout, Row, RowResult, StepPlan, StepResult
from hexad.orchestration.intake import Intake
from hexad.orchestration.kv.manager import KVManager
from hexad.orchestration.messages import Submit
from hexad.orchestration.planner import Planner
from hexad.orchestration.policy import make_policy
from hexad.orchestration.request import FINISHED, HELD, PREEMPTED, RUNNING, WAITING, Request, SeedSource, TokenEvent
from hexad.orchestration.settings import SchedulerSettings, SchedulerStats

__all__ = ["Scheduler", "SchedulerSettings", "SchedulerStats"]


class Scheduler:
    """Owns every request from `add` to its terminal event."""

    def __init__(self, settings: SchedulerSettings, layout: KVLayout, clock: Clock) -> None:
        self.settings = settings.check()
        self._clock = clock
        self._kv = KVManager(layout)
        self._policy = make_policy(settings.scheduling_policy, settings.tenant_weights)
        self._planner = Planner(settings, self._kv, self._policy)
        self._planner.on_admit = self._admitted
        self._intake = Intake(settings, self._kv)
        self._requests: dict[int, Request] = {}
        self._rids: dict[tuple[bytes, str], list[int]] = {}  # live choices of each submission
        self._deadlines: list[tuple[float, int]] = []
        self._num_held = 0
        self._waiting_tokens = 0  # of requests that never ran, held ones not counted
        self._prompt_tokens = 0
        self._generation_tokens = 0

    # -- requests

    def add(self, submit: Submit, *, front_end: bytes = b"", seed_source: SeedSource | None = None) -> list[int]:
        """Accept a submission; returns the rids of its choices.

        Raises:
            RequestError: an id in use, or an empty prompt.
            ContextLengthError, NeverFitsError: it can never be served as it is.
            OverloadedError: the queue is full; `retry_after_s` says when to try again.
        """
        name = (front_end, submit.request_id)
        if name in self._rids:
            raise RequestError(f"request id {submit.request_id!r} is in use: choose another", param="request_id")
        now_s = self._clock.now()
        running = len(self._planner.running)
        waiting = len(self._requests) - running
        requests = self._intake.make(submit, front_end, now_s, seed_source)
        self._intake.refuse_overload(submit, waiting, self._waiting_tokens, running, now_s)
        for request in requests:
            self._requests[request.rid] = request
            if request.deadline_s is not None:
                self._watch_deadline(request.deadline_s, request.rid)
            if request.status == HELD:
                self._num_held += 1
        self._rids[name] = [request.rid for request in requests]
        self._enqueue(requests[0])
        return list(self._rids[name])

    def abort(self, request_id: str, front_end: bytes = b"", choice: int | None = None) -> list[TokenEvent]:
        """End a submission (or one choice of it); its live choices get their terminal event here. Unknown ids are ignored."""
        rids = self._rids.get((front_end, request_id), ())
        live = [self._requests[rid] for rid in rids]
        return [self._end(request, finish_reason="abort") for request in live if choice is None or request.choice == choice]

    def expire(self) -> list[TokenEvent]:
        """End the requests whose deadline has passed."""
        events = []
        now_s = self._clock.now()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, rid = heapq.heappop(self._deadlines)
            request = self._requests.get(rid)
            if request is not None:
                deadline_s = (request.deadline_s or 0.0) - request.arrival_s
                message = (
                    f"the request's deadline of {deadline_s:g} s passed with {request.num_output} tokens generated: "
                    "allow more time or ask for fewer tokens"
                )
                events.append(self._end(request, error=message, error_code=DeadlineError.default_code))
        return events

    # -- steps

    def schedule(self) -> StepPlan | None:
        """The next plan, or None if there is nothing that can be computed before more results come in."""
        return self._planner.plan()

    def set_drafts(self, drafts: Mapping[int, tuple[int, ...]]) -> None:
        """Drafts to follow the newest token of each rid, confirmed or in flight, in its next row. Unknown rids are ignored."""
        for rid, ids in drafts.items():
            request = self._requests.get(rid)
            if request is not None and request.status == RUNNING:
                request.drafts = ids

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in the result of the oldest plan in flight; returns the news of each choice it concerns."""
        assert plan.step_id == result.step_id and len(plan.rows) == len(result.rows), "result and plan do not match"
        self._planner.retire(plan.step_id)
        events: list[TokenEvent] = []
        requests = self._requests
        for row, out in zip(plan.rows, result.rows, strict=True):
            request = requests.get(row.rid)
            if request is None:
                continue  # ended meanwhile: the row overshot
            assert out.rid == row.rid, "result rows are not in the plan's order"
            event = self._row_done(request, row, out)
            if event is not None:
                events.append(event)
        self._planner.unpark()
        return events

    def _row_done(self, request: Request, row: Row, out: RowResult) -> TokenEvent | None:
        if out.error is not None:
            return self._end(request, error=out.error, error_code=RequestFailedError.default_code)
        rejected = row.num_drafts - out.num_accepted
        if request.status == RUNNING:
            request.num_done += row.num_tokens - rejected
            request.num_computed -= rejected
        if row.samples:
            request.num_inflight -= 1 + row.num_drafts
            request.num_inflight_drafts -= row.num_drafts
        if out.prompt_logprobs and request.want_prompt_logprobs:
            request.prompt_logprobs.extend(out.prompt_logprobs)
        tokens, logprobs = out.tokens, out.logprobs
        finish_reason: str | None = None
        stop_token_id: int | None = None
        if tokens:
            ids = request.ids
            room = request.max_output - (len(ids) - request.prompt_len)
            stop_ids = request.stop_ids
            for index, token in enumerate(tokens, 1):
                ids.append(token)
                if token in stop_ids and len(ids) - request.prompt_len > request.min_tokens:
                    finish_reason, stop_token_id = "stop", token
                elif index == room:
                    finish_reason = "length"
                else:
                    continue
                if index < len(tokens):
                    tokens, logprobs = tokens[:index], logprobs[:index]
                break
            self._generation_tokens += len(tokens)
        elif request.max_output == 0 and request.num_done >= request.prompt_len:
            finish_reason = "length"
        if request.status == RUNNING and request.num_done >= (request.num_inserted + 1) * self._kv.block_size:
            self._kv.insert(request)
        if request.siblings is not None and request.siblings.held and request.num_done >= request.prompt_len:
            self._release_held(request)
        if finish_reason is not None:
            return self._end(request, tokens, logprobs, finish_reason, stop_token_id)
        if not tokens:
            return None
        if request.told_first:
            return TokenEvent(
                rid=request.rid,
                front_end=request.front_end,
                request_id=request.request_id,
                choice=request.choice,
                token_ids=tokens,
                logprobs=logprobs,
            )
        return self._event(request, tokens, logprobs)

    # -- state

    def has_work(self) -> bool:
        """Any live request."""
        return bool(self._requests)

    @property
    def num_inflight_steps(self) -> int:
        """Plans made and not yet retired."""
        return self._planner.next_step - 1 - self._kv.pool.retired

    @property
    def max_request_tokens(self) -> int:
        """Positions that one request may fill when it has the pool to itself."""
        return self._intake.max_positions

    @property
    def preempt_hook(self) -> Callable[[int], bool] | None:
        """Tests only: `hook(step_id)` true preempts every running request before that step is planned."""
        return self._planner.preempt_hook

    @preempt_hook.setter
    def preempt_hook(self, hook: Callable[[int], bool] | None) -> None:
        self._planner.preempt_hook = hook

    def get(self, rid: int) -> Request | None:
        """A live request, to look at."""
        return self._requests.get(rid)

    def reset_prefix_cache(self) -> int:
        """Empty the tree (new weights, say); returns the pages it let go. Live requests cache nothing any more."""
        for request in self._requests.values():
            if request.status == RUNNING:
                request.cache_limit_blocks = 0
        return self._kv.tree.clear()

    def stats(self) -> SchedulerStats:
        """A snapshot, O(1)."""
        pool, tree, planner = self._kv.pool, self._kv.tree, self._planner
        running = len(planner.running)
        return SchedulerStats(
            num_running=running,
            num_waiting=len(self._requests) - running,
            num_waiting_tokens=self._waiting_tokens,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free + pool.num_deferred,
            num_cached_blocks=pool.num_evictable,
            kv_usage=pool.num_used / pool.num_blocks,
            num_tree_blocks=tree.num_pages,
            prefix_queries_total=planner.prefix_queries,
            prefix_hits_total=planner.prefix_hits,
            preemptions_total=planner.num_preemptions,
            evicted_blocks_total=tree.num_evicted,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generation_tokens,
            steps_total=planner.next_step,
            num_inflight_steps=self.num_inflight_steps,
        )

    def check_integrity(self) -> None:
        """Assert every invariant; for tests (slow)."""
        requests = list(self._requests.values())
        self._kv.check_integrity(requests)
        by_status: dict[int, set[int]] = {status: set() for status in range(FINISHED + 1)}
        for request in requests:
            by_status[request.status].add(request.rid)
            self._check_request(request)
        planner = self._planner
        assert by_status[RUNNING] == {request.rid for request in planner.running}, "running list"
        assert by_status[PREEMPTED] == {request.rid for request in planner.parked}, "parked list"
        assert by_status[WAITING] == {request.rid for request in self._policy}, "waiting queue"
        assert len(by_status[WAITING]) == len(self._policy)
        assert len(by_status[HELD]) == self._num_held
        assert not by_status[FINISHED]
        ranks = [self._policy.rank(request) for request in planner.running]
        assert ranks == sorted(ranks), "running is not in order of rank"
        assert len(ranks) <= self.settings.max_num_seqs
        assert {rid for rids in self._rids.values() for rid in rids} == set(self._requests), "names and requests disagree"
        fresh = [r for r in requests if r.status == WAITING and r.queued_s is None and r.choice == 0]
        assert self._waiting_tokens == sum(r.prompt_len for r in fresh), "waiting tokens miscounted"
        assert 0 <= self.num_inflight_steps <= self.settings.depth, "more plans in flight than the depth allows"

    def _check_request(self, request: Request) -> None:
        if request.status == RUNNING:
            assert 0 <= request.num_done <= request.num_computed <= request.num_total
            assert request.known and request.num_total - request.prompt_len <= request.max_output
        else:
            assert not request.known and not request.capacity and not request.num_computed
        if request.status in (WAITING, HELD):
            assert request.num_inflight == 0 and request.last_step <= self._kv.pool.retired
        assert 0 <= request.num_inflight_drafts <= request.num_inflight
        assert request.num_output < request.max_output or request.max_output == 0, f"{request} should have ended"
        if request.status == HELD:
            assert request.siblings is not None and request in request.siblings.held

    # -- inside

    def _watch_deadline(self, deadline_s: float, rid: int) -> None:
        """Entries of ended requests stay in the heap until it has twice as many as there are requests."""
        heapq.heappush(self._deadlines, (deadline_s, rid))
        if len(self._deadlines) > 2 * len(self._requests) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._requests]
            heapq.heapify(self._deadlines)

    def _enqueue(self, request: Request) -> None:
        request.status = WAITING
        if request.choice == 0:
            self._waiting_tokens += request.prompt_len
        self._policy.push(request)

    def _admitted(self, request: Request) -> None:
        """The planner starts a request, for the first time or again."""
        if request.queued_s is not None:
            return
        now_s = self._clock.now()
        request.queued_s = now_s - request.arrival_s
        request.num_cached_first = request.num_cached
        if request.choice == 0:
            self._waiting_tokens -= request.prompt_len
            self._prompt_tokens += request.prompt_len
            self._intake.drain.admitted(now_s, request.prompt_len)
        else:
            self._follower_left_queue(request)

    def _release_held(self, leader: Request) -> None:
        """The prompt is computed: the other choices may start on its blocks."""
        siblings = leader.siblings
        assert siblings is not None
        for request in siblings.held:
            self._num_held -= 1
            self._enqueue(request)
        siblings.held.clear()

    def _follower_left_queue(self, request: Request) -> None:
        siblings = request.siblings
        assert siblings is not None
        siblings.num_unadmitted -= 1
        if not siblings.num_unadmitted and siblings.namespace is not None:
            siblings.leader.cache_limit_blocks = 0
            self._kv.tree.drop_namespace(siblings.namespace)

    def _end(
        self,
        request: Request,
        tokens: tuple[int, ...] = (),
        logprobs: tuple = (),
        finish_reason: str | None = None,
        stop_token_id: int | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> TokenEvent:
        """Take a request out, wherever it is, and make its terminal event."""
        siblings = request.siblings
        if request.status == HELD:
            assert siblings is not None
            siblings.held.remove(request)
            self._num_held -= 1
        else:
            self._planner.stop(request)
        never_ran = request.queued_s is None
        if never_ran and request.status == WAITING and request.choice == 0:
            self._waiting_tokens -= request.prompt_len
        request.status = FINISHED
        request.finish_reason, request.error = finish_reason, error
        del self._requests[request.rid]
        name = (request.front_end, request.request_id)
        rids = self._rids[name]
        rids.remove(request.rid)
        if not rids:
            del self._rids[name]
        if siblings is not None:
            if request is siblings.leader and siblings.held:
                self._release_held(request)  # they do without it
            if never_ran and request.choice > 0:
                self._follower_left_queue(request)
        return self._event(request, tokens, logprobs, finish_reason, stop_token_id, error, error_code)

    def _event(
        self,
        request: Request,
        tokens: tuple[int, ...],
        logprobs: tuple,
        finish_reason: str | None = None,
        stop_token_id: int | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> TokenEvent:
        """A first or last event, with what only these carry."""
        first = not request.told_first
        request.told_first = True
        prompt_logprobs: tuple = ()
        if request.want_prompt_logprobs and len(request.prompt_logprobs) == request.prompt_len:
            prompt_logprobs = tuple(request.prompt_logprobs)
            request.want_prompt_logprobs = False
            request.prompt_logprobs.clear()
        ends = finish_reason is not None or error is not None
        return TokenEvent(
            rid=request.rid,
            front_end=request.front_end,
            request_id=request.request_id,
            choice=request.choice,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            num_cached=request.num_cached_first if first and request.choice == 0 else None,
            queued_s=request.queued_s if first else None,
            error=error,
            error_code=error_code,
            num_preemptions=request.num_preemptions if ends else 0,
        )
