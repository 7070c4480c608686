"""Drives a scheduler with the fake executor and checks everything that can be checked, at each step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hexad.common.clock import ManualClock
from hexad.common.params import SamplingParams
from hexad.engine.executor.fake import FakeExecutor, FakeScript, Fault, reference_tokens
from hexad.engine.plan import KVGroupSpec, KVLayout, TokenSegment
from hexad.orchestration.messages import Submit
from hexad.orchestration.replay import Replayer
from hexad.orchestration.request import TokenEvent
from hexad.orchestration.scheduler import Scheduler, SchedulerSettings

FULL = KVGroupSpec(kind="full", num_layers=1)


def sliding(window: int) -> KVGroupSpec:
    return KVGroupSpec(kind="sliding", num_layers=1, window=window)


def layout(num_blocks: int, block_size: int = 4, *groups: KVGroupSpec) -> KVLayout:
    return KVLayout(num_blocks=num_blocks, block_size=block_size, groups=groups or (FULL,))


@dataclass
class Seen:
    """What one choice was told."""

    prompt: tuple[int, ...]
    params: SamplingParams
    choice: int
    eos: tuple[int, ...]
    seed: int
    max_output: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    ended: bool = False


class Driver:
    """`check=False` leaves out the slow checks."""

    def __init__(
        self,
        kv: KVLayout,
        *,
        script: FakeScript | None = None,
        faults: tuple[Fault, ...] = (),
        drafts: int = 0,
        check: bool = True,
        clock: ManualClock | None = None,
        executor: FakeExecutor | None = None,
        **settings,
    ) -> None:
        self.clock = clock or ManualClock()
        self.settings = SchedulerSettings(**{"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, **settings})
        self.scheduler = Scheduler(self.settings, kv, self.clock)
        self.executor = executor or FakeExecutor(
            script=script or FakeScript(vocab_size=100), faults=faults, clock=self.clock, depth=self.settings.depth, drafts=drafts
        )
        self.executor.allocate(kv)
        self.replayer = Replayer(kv)
        self.check = check
        self.seen: dict[int, Seen] = {}
        self.plans = []
        self.observers = []
        self._pending = deque()
        self._names = 0

    def submit(self, prompt, *, request_id: str | None = None, eos=(), **fields) -> list[int]:
        names = set(Submit.__struct_fields__)
        outer = {key: fields.pop(key) for key in list(fields) if key in names}
        params = fields.pop("sampling", None) or SamplingParams(**{"max_tokens": 8, "seed": 1, **fields})
        self._names += 1
        prompt = tuple(prompt)
        name = request_id or f"r{self._names}"
        submit = Submit(request_id=name, prompt=(TokenSegment(prompt),), params=params, eos_token_ids=tuple(eos), **outer)
        rids = self.scheduler.add(submit)
        for choice, rid in enumerate(rids):
            request = self.scheduler.get(rid)
            self.seen[rid] = Seen(prompt, params, choice, tuple(eos), request.seed, request.max_output)
        self._checked()
        return rids

    def abort(self, rid: int, choice: int | None = None) -> None:
        request = self.scheduler.get(rid)
        if request is not None:
            self._take(self.scheduler.abort(request.request_id, choice=choice))
        self._checked()

    def expire(self) -> None:
        self._take(self.scheduler.expire())
        self._checked()

    def launch(self) -> bool:
        """Plan and execute one step if there is room for it."""
        if len(self._pending) >= self.settings.depth:
            return False
        plan = self.scheduler.schedule()
        self._checked()
        if plan is None:
            assert self._pending or not self.scheduler.has_work(), "the queue is stuck"
            return False
        assert plan.num_tokens <= self.settings.max_num_batched_tokens
        self.plans.append(plan)
        self.replayer.planned(plan)
        for observer in self.observers:
            observer.on_plan(plan)
        handle = self.executor.execute(plan)
        pending = handle.sample()
        drafts = handle.drafts()
        if drafts:
            self.scheduler.set_drafts(drafts)
        self._pending.append((plan, pending))
        return True

    def collect(self) -> bool:
        """Take in the oldest result."""
        if not self._pending:
            return False
        plan, pending = self._pending.popleft()
        result = pending.wait()
        self.replayer.retired(result)
        for observer in self.observers:
            observer.on_result(plan, result)
        self._take(self.scheduler.update(plan, result))
        self._checked()
        return True

    def step(self) -> None:
        """One turn of an asynchronous core loop."""
        launched = self.launch()
        if not launched or len(self._pending) >= self.settings.depth:
            self.collect()

    def drain(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work() and not self._pending:
                self.check_drained()
                return
            self.step()
        raise AssertionError("does not drain")

    def run(self, prompt, **fields) -> Seen:
        """One request, alone or not, until everything is done; its first choice."""
        rids = self.submit(prompt, **fields)
        self.drain()
        return self.seen[rids[0]]

    def check_drained(self) -> None:
        stats = self.scheduler.stats()
        assert stats.num_running == stats.num_waiting == stats.num_waiting_tokens == 0
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks, "a block leaked"
        assert self.replayer.report().violations == ()
        for rid, seen in self.seen.items():
            assert seen.ended, f"rid {rid} never ended"
            self.check_output(seen)

    def check_output(self, seen: Seen) -> None:
        expected, reason = self.reference(seen)
        if seen.finish_reason in ("stop", "length"):
            assert (seen.tokens, seen.finish_reason) == (expected, reason)
            if seen.params.logprobs is not None:
                assert [entry.token_id for entry in seen.logprobs] == seen.tokens
            if seen.params.prompt_logprobs is not None and seen.choice == 0:
                assert [entry and entry.token_id for entry in seen.prompt_logprobs] == [None, *seen.prompt[1:]]
        else:
            assert seen.tokens == expected[: len(seen.tokens)], "what was said before the end is wrong"

    def reference(self, seen: Seen) -> tuple[list[int], str]:
        return reference_tokens(
            seen.prompt,
            seen.params,
            seed=seen.seed,
            choice=seen.choice,
            eos=seen.eos,
            script=self.executor.script,
            max_output=seen.max_output,
        )

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            seen = self.seen[event.rid]
            assert not seen.ended, f"rid {event.rid} got an event after its terminal one"
            assert event.choice == seen.choice
            first = not seen.events
            assert first or (event.num_cached is None and event.queued_s is None)
            seen.events.append(event)
            seen.tokens += event.token_ids
            seen.logprobs += event.logprobs
            if event.prompt_logprobs:
                assert not seen.prompt_logprobs and len(seen.tokens) == len(event.token_ids), "prompt logprobs come once, before all tokens"
                seen.prompt_logprobs += event.prompt_logprobs
            seen.finish_reason, seen.error, seen.ended = event.finish_reason, event.error, event.terminal

    def _checked(self) -> None:
        if self.check:
            self.scheduler.check_integrity()
