"""Builds step plans: which tokens of which requests are computed next, in which blocks. No torch.

There are no phases: every running request has computed positions and wanted ones, and a step hands out its token budget so that the
first catch up with the second. Requests that miss one token (decodes) are served first, so that a long prompt never starves them;
then prompts, running and waiting, in the policy's order.

A plan is made before the results of the `depth - 1` plans before it are known: each of their sampled tokens is a placeholder
(`num_inflight`), every draft is taken as accepted, and nothing is planned past `max_output`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from hexad.engine.plan import NO_BLOCK, KVMove, NewRequest, Row, StepPlan
from hexad.orchestration.kv.manager import KVManager, NewBlocks
from hexad.orchestration.kv.radix import Node
from hexad.orchestration.policy import Policy
from hexad.orchestration.request import PREEMPTED, RUNNING, WAITING, Request
from hexad.orchestration.settings import SchedulerSettings

NO_NEW_BLOCKS: NewBlocks = ()
RETRY_STEPS = 16  # a blocked prompt may by then need less: others have cached what it shares
BLOCKS_WORTH_WAITING = 4  # of a prefix that another prompt is computing: fewer are computed sooner than they come


class _Build:
    """The plan under construction."""

    __slots__ = ("closed", "extra", "moves", "new", "prompt_budget", "rows", "short", "step_id")

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.rows: list[Row] = []
        self.new: list[NewRequest] = []
        self.moves: list[KVMove] = []
        self.extra = 0  # tokens beyond one a row
        self.prompt_budget = 0
        self.short = False  # a running request lacks blocks
        self.closed = False  # the head of the queue cannot start: nobody may pass it

    @property
    def num_tokens(self) -> int:
        return len(self.rows) + self.extra


class Planner:
    """Running requests and the plans they get. Owned by the scheduler, which owns the requests' results."""

    def __init__(self, settings: SchedulerSettings, kv: KVManager, policy: Policy) -> None:
        self._settings = settings
        self._kv = kv
        self._policy = policy
        self.running: list[Request] = []  # best rank first
        self.parked: list[Request] = []  # preempted, with results still in flight
        self.next_step = 0
        self.num_preemptions = 0
        self.prefix_queries = 0  # tokens
        self.prefix_hits = 0  # tokens
        self.preempt_hook: Callable[[int], bool] | None = None  # tests: preempt everything before step k
        self.on_admit: Callable[[Request], None] = lambda request: None
        self._forget: list[int] = []  # rids that the executor must drop
        self._filling: list[Request] = []  # admitted, prompt not known to be computed; swept when looked through
        self._awaited: tuple[int, Request, int] | None = None  # the head that waits, the prompt that it waits for, up to which position
        self._blocked = (-1, 0, 0)  # the head of the queue that found no blocks: its rid, the pages it needs, the step of the try

    # -- the plan

    def plan(self) -> StepPlan | None:
        """The next step, or None if no request can compute anything now."""
        if self.preempt_hook is not None and self.running and self.preempt_hook(self.next_step):
            for request in list(self.running):
                self._preempt(request)
        build = _Build(self.next_step)
        prompts = self._plan_decodes(build)
        self._plan_prompts(build, prompts)
        if not build.rows:
            return None
        self.next_step += 1
        finished = tuple(self._forget)
        self._forget.clear()
        return StepPlan(
            step_id=build.step_id,
            rows=tuple(build.rows),
            new=tuple(build.new),
            finished=finished,
            kv_moves=tuple(build.moves),
            num_tokens=build.num_tokens,
        )

    def _plan_decodes(self, build: _Build) -> list[Request]:
        """Rows of requests that miss one token; returns those that miss more. The hot loop: one pass, nothing per block."""
        running, rows, step_id = self.running, build.rows, build.step_id
        charge = self._policy.charge if self._policy.charges else None
        prompts: list[Request] = []
        index = 0
        while index < len(running):
            request = running[index]
            index += 1
            start = request.num_computed
            planned = len(request.ids) + request.num_inflight
            if planned - start != 1 or request.drafts or request.max_output == 0:
                if planned - start >= 1:
                    if planned - start == 1 and request.drafts:
                        self._plan_drafts(request, build, len(running) - index)
                    else:
                        prompts.append(request)
                continue
            if planned - request.prompt_len >= request.max_output:
                continue  # ends when its results come
            new_blocks = NO_NEW_BLOCKS
            if start >= request.capacity:
                grown = self._grow(request, start + 1, build)
                if grown is None:
                    continue
                new_blocks = grown
            rows.append(Row(rid=request.rid, start=start, num_tokens=1, samples=True, new_block_ids=new_blocks))
            request.num_computed = start + 1
            request.num_inflight += 1
            request.last_step = step_id
            if charge is not None:
                charge(request, 1)
        return prompts

    def _plan_drafts(self, request: Request, build: _Build, num_behind: int) -> None:
        """A decode row with drafts to verify, cut to what budget, blocks and `max_output` allow."""
        start = request.num_computed
        room = request.max_output - (request.num_total - request.prompt_len)  # tokens that may still be planned
        if room <= 0:
            return
        budget = self._settings.max_num_batched_tokens - build.num_tokens - num_behind - 1
        drafts = request.drafts[: max(0, min(room - 1, budget))]
        request.drafts = ()
        new_blocks = self._kv.grow(request, start + 1 + len(drafts)) if drafts else None
        if new_blocks is None:
            drafts = ()
            new_blocks = self._grow(request, start + 1, build)
            if new_blocks is None:
                return
        count = len(drafts)
        build.rows.append(
            Row(
                rid=request.rid,
                start=start,
                num_tokens=1 + count,
                samples=True,
                new_block_ids=new_blocks,
                drafts=drafts,
                num_drafts=count,
            )
        )
        build.extra += count
        request.num_computed = start + 1 + count
        request.num_inflight += 1 + count
        request.num_inflight_drafts += count
        request.last_step = build.step_id
        if self._policy.charges:
            self._policy.charge(request, 1 + count)

    def _plan_prompts(self, build: _Build, prompts: list[Request]) -> None:
        """Hand the rest of the budget to prompts, running and waiting, in the policy's order."""
        settings = self._settings
        build.prompt_budget = settings.max_num_batched_tokens - build.num_tokens
        if build.rows and settings.enable_chunked_prefill and settings.max_prefill_tokens_per_step is not None:
            build.prompt_budget = min(build.prompt_budget, settings.max_prefill_tokens_per_step)
        policy = self._policy
        if policy.charges:
            prompts.sort(key=policy.key)
        index = 0
        while build.prompt_budget > 0:
            request = prompts[index] if index < len(prompts) else None
            head = self._head(build)
            if request is not None and (head is None or policy.key(request) <= policy.key(head)):
                index += 1
                if request.status == RUNNING:
                    self._plan_chunk(request, build)
            elif head is not None:
                build.closed = not self._admit(head, build)
            else:
                return

    def _head(self, build: _Build) -> Request | None:
        """The waiting request that may start now, if any may."""
        if build.closed or (build.short and (build.rows or self._in_flight)):
            return None
        head = self._policy.peek()
        if head is not None and len(self.running) >= self._settings.max_num_seqs:
            victim = self._policy.victim_for_slot(head, self.running)
            if victim is None or not self._give_way(victim, build):
                return None
        return head

    @property
    def _in_flight(self) -> bool:
        return self._kv.pool.retired + 1 < self.next_step

    def _plan_chunk(self, request: Request, build: _Build) -> None:
        """Compute as much of a running prompt as budget and blocks allow."""
        start = request.num_computed
        chunk = self._chunk(request.num_total - start, build)
        if chunk == 0:
            return
        kv = self._kv
        kv.slide(request, request.num_done)
        new_blocks = kv.grow(request, start + chunk)
        if new_blocks is None:
            chunk = self._shrunk(request, chunk)
            new_blocks = self._grow(request, start + chunk, build)
            if new_blocks is None:
                return
        self._add_prompt_row(request, chunk, new_blocks, build)

    def _chunk(self, todo: int, build: _Build) -> int:
        """How many of `todo` positions this step may compute; without chunked prefill all or none."""
        if todo <= build.prompt_budget:
            return todo
        if self._settings.enable_chunked_prefill:
            return build.prompt_budget
        return 0 if build.rows else todo

    def _shrunk(self, request: Request, chunk: int) -> int:
        """A chunk that the pages at hand allow (at least 1: then others must give way)."""
        if not self._settings.enable_chunked_prefill:
            return chunk
        pool = self._kv.pool
        blocks = (pool.num_free + pool.num_evictable) // self._kv.num_groups
        room = request.capacity + blocks * self._kv.block_size - request.num_computed
        return max(1, min(chunk, room))

    def _add_prompt_row(self, request: Request, chunk: int, new_blocks: NewBlocks, build: _Build) -> None:
        start = request.num_computed
        samples = start + chunk == request.num_total and request.max_output > 0
        build.rows.append(Row(rid=request.rid, start=start, num_tokens=chunk, samples=samples, new_block_ids=new_blocks))
        build.extra += chunk - 1
        build.prompt_budget -= chunk
        request.num_computed = start + chunk
        request.num_inflight += samples
        request.last_step = build.step_id
        if self._policy.charges:
            self._policy.charge(request, chunk)

    # -- admission

    def _admit(self, request: Request, build: _Build) -> bool:
        """Start the waiting request at the head of the queue if the blocks of its whole prompt can be had."""
        if self._still_blocked(request) or self._still_awaits(request):
            return False
        total = len(request.ids)
        path: list[Node] = []
        if request.looks_up and not request.want_prompt_logprobs:
            path = self._kv.find_prefix(request.namespace, request.ids, (total - 1) // self._kv.block_size)
            if self._is_coming(request, len(path)):
                return False
        chunk = self._chunk(total - len(path) * self._kv.block_size, build)
        if chunk == 0:
            return False
        if not self._make_room(request, path, build):
            if self.running or self._in_flight:
                return False
            path = []  # alone: what it would share may be just what it lacks
            chunk = self._chunk(total, build)
            if chunk == 0:
                return False
        return self._start(request, path, chunk, build)

    def _is_coming(self, request: Request, found: int) -> bool:
        """A running prompt computes more of what this one begins with than the `found` blocks: better to wait than to compute it twice.

        The wait is short: only for one that is served before it, so all that is left of the other is in flight or fills the budget.
        """
        if not self._filling:
            return False
        self._filling = [other for other in self._filling if _fills(other)]
        size = self._kv.block_size
        first, end, key = found * size, (found + BLOCKS_WORTH_WAITING) * size, self._policy.key
        if end >= len(request.ids):
            return False
        for other in self._filling:
            comes = other.num_done < end <= min(other.prompt_len, other.cache_limit_blocks * size) and other.namespace == request.namespace
            if not comes or key(other) > key(request):
                continue
            if other.ids[first:end] == request.ids[first:end] and other.ids[:first] == request.ids[:first]:
                self._awaited = request.rid, other, end
                return True
        return False

    def _still_awaits(self, request: Request) -> bool:
        """What the head waits for is not there yet: no need to look its prompt up again."""
        if self._awaited is None or self._awaited[0] != request.rid:
            return False
        _, other, end = self._awaited
        waits = _fills(other) and other.num_done < end and self._policy.key(other) <= self._policy.key(request)
        if not waits:
            self._awaited = None
        return waits

    def _still_blocked(self, request: Request) -> bool:
        """A long prompt at the head of the queue is not looked up at every step when the blocks it lacked have not come back."""
        rid, needed, step = self._blocked
        if rid != request.rid or not (self.running or self._in_flight) or self.next_step - step >= RETRY_STEPS:
            return False
        pool = self._kv.pool
        return pool.num_free + pool.num_evictable < needed and self._policy.victim_for_blocks(request, self.running) is None

    def _make_room(self, request: Request, path: list[Node], build: _Build) -> bool:
        """Are there pages for the whole prompt and a little for those who run? A better priority may take them from a worse."""
        kv = self._kv
        pool = kv.pool
        total = len(request.ids)
        while True:
            reserve = min(len(self.running) * kv.num_groups, pool.num_blocks // 16)
            needed = kv.prompt_pages(total, len(path)) + kv.num_idle(path) + reserve
            if needed <= pool.num_free + pool.num_evictable:
                return True
            self._blocked = (request.rid, needed, self.next_step)
            victim = self._policy.victim_for_blocks(request, self.running)
            if victim is None or pool.num_deferred or not self._give_way(victim, build):
                return False

    def _start(self, request: Request, path: list[Node], chunk: int, build: _Build) -> bool:
        kv = self._kv
        kv.take_prefix(request, path)
        cached = request.capacity
        request.num_computed = cached
        chunk = self._shrunk(request, chunk)
        if kv.grow(request, cached + chunk) is None:
            request.num_computed = 0
            kv.release(request)
            return False
        self._policy.remove(request)
        moved = self._move_partial_block(request, len(path), build)
        if moved:
            chunk = len(request.ids) - cached - moved
            cached += moved
        request.status = RUNNING
        request.known = True
        request.num_cached = request.num_computed = request.num_done = cached
        insort(self.running, request, key=self._policy.rank)
        if request.cache_limit_blocks and request.num_done < request.prompt_len - 1:
            self._filling = [other for other in self._filling if _fills(other)]
            self._filling.append(request)
        self._policy.started(request)
        if self._settings.enable_prefix_caching and not request.num_preemptions and not request.want_prompt_logprobs:
            self.prefix_queries += len(request.ids)
            self.prefix_hits += cached
        self.on_admit(request)
        build.new.append(request.as_new())
        self._add_prompt_row(request, chunk, NO_NEW_BLOCKS, build)
        return True

    def _move_partial_block(self, request: Request, num_shared: int, build: _Build) -> int:
        """Copy the last, partly filled block of the prompt from the choice that computed it; returns the tokens copied."""
        siblings = request.siblings
        if siblings is None or len(request.ids) > request.prompt_len:
            return 0
        leader, size = siblings.leader, self._kv.block_size
        count = request.prompt_len - 1 - num_shared * size
        ready = leader.status == RUNNING and leader.num_done >= request.prompt_len and leader is not request
        if not ready or not 0 < count < size or request.capacity <= num_shared * size:
            return 0
        sources = [table[num_shared] for table in leader.tables]
        if NO_BLOCK in sources:
            return 0
        for group, source in enumerate(sources):
            target = request.tables[group][num_shared]
            build.moves.append(KVMove(group=group, source_block=source, target_block=target, num_tokens=count))
            self._kv.pool.names(source, build.step_id)
        return count

    # -- when blocks run out

    def _grow(self, request: Request, end: int, build: _Build) -> NewBlocks | None:
        """Blocks for positions below `end`, if need be from requests of lower rank; None: not in this step."""
        kv = self._kv
        kv.slide(request, request.num_done)  # what plans in flight write is not in the tree yet: keep it until then, if there is room
        new_blocks = kv.grow(request, end)
        if new_blocks is not None:
            return new_blocks
        kv.slide(request, request.num_computed - request.num_inflight_drafts)
        while True:
            new_blocks = kv.grow(request, end)
            if new_blocks is not None:
                return new_blocks
            build.short = True
            if kv.missing_pages(request, end) <= kv.pool.num_reachable:
                return None  # enough once the plans in flight have retired
            victim = self._victim(request, build)
            if victim is None:
                return None
            self._preempt(victim, build)
            if victim is request:
                return None

    def _victim(self, request: Request, build: _Build) -> Request | None:
        """The request of lowest rank that may give way to `request`, itself included; None: those who have a row may keep it."""
        scheduled = {row.rid for row in build.rows}
        own = self._policy.rank(request)
        for candidate in reversed(self.running):
            if candidate is request:
                return request if request.num_total - request.num_computed == 1 else None
            if self._policy.rank(candidate) < own:
                return None
            if candidate.rid not in scheduled or (self._policy.displaces and candidate.priority > request.priority):
                return candidate
        return None

    def _give_way(self, victim: Request, build: _Build) -> bool:
        """Preempt a running request for a waiting one, unless this very plan introduces it."""
        if any(new.rid == victim.rid for new in build.new):
            return False
        self._preempt(victim, build)
        return True

    def _preempt(self, request: Request, build: _Build | None = None) -> None:
        """Take a running request's blocks; it starts again from its confirmed ids once its results in flight have come back."""
        if build is not None:
            self._drop_row(request, build)
        self._stop_running(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.num_computed = request.num_done = 0
        request.drafts = ()
        if request.last_step > self._kv.pool.retired:
            request.status = PREEMPTED
            self.parked.append(request)
        else:
            self._wait_again(request)

    def _drop_row(self, request: Request, build: _Build) -> None:
        """Undo a row of the plan under construction."""
        for index, row in enumerate(build.rows):
            if row.rid == request.rid:
                del build.rows[index]
                build.extra -= row.num_tokens - 1
                if row.samples:
                    request.num_inflight -= 1 + row.num_drafts
                    request.num_inflight_drafts -= row.num_drafts
                request.last_step = build.step_id - 1  # at most: the plans before this one
                return

    # -- leaving

    def stop(self, request: Request) -> None:
        """Forget a request for good, wherever it is; its blocks go back."""
        if request.status == RUNNING:
            self._stop_running(request)
        elif request.status == PREEMPTED:
            self.parked.remove(request)
        elif request.status == WAITING:
            self._policy.remove(request)

    def retire(self, step_id: int) -> None:
        """The plan's results are in: its pages may be reused, and requests preempted since may start again."""
        self._kv.pool.retire(step_id)

    def unpark(self) -> None:
        """Queue the preempted requests whose results have all come back."""
        if self.parked:
            retired = self._kv.pool.retired
            ready = [request for request in self.parked if request.last_step <= retired]
            self.parked = [request for request in self.parked if request.last_step > retired]
            for request in ready:
                self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        assert request.num_inflight == 0 and request.num_inflight_drafts == 0
        request.status = WAITING
        if request.want_prompt_logprobs:
            request.prompt_logprobs.clear()  # computed anew, delivered whole
        self._policy.push(request)

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self._policy.stopped(request)
        self._kv.release(request)
        if request.known:
            request.known = False
            self._forget.append(request.rid)


def _fills(request: Request) -> bool:
    """Its prompt is being computed."""
    return request.status == RUNNING and request.num_done < request.prompt_len
