"""An executor without a model: deterministic tokens, settable speed, scripted outputs and faults. No torch.

What it draws is a pure function of (all ids so far, seed, choice, position): `reference_tokens` computes the same without any engine.
Its "KV" slots hold a hash of the prefix that was computed there; each row reads them back through the block tables it was given, and
a slot that does not hold what this request's ids imply is an error of the scheduler (`KVMismatchError`), found at once.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from hexad.common.clock import Clock, ManualClock, SystemClock
from hexad.common.errors import EngineDeadError, ModelError
from hexad.common.params import SamplingParams
from hexad.engine.executor.seam import LoadReport, Masks
from hexad.engine.plan import NO_BLOCK, KVBudget, KVGroupSpec, KVLayout, NewRequest, Row, RowResult, StepPlan, StepResult, TokenLogprobs

MASK64 = 2**64 - 1
_MULTIPLIER, _INCREMENT = 6_364_136_223_846_793_005, 1_442_695_040_888_963_407


class KVMismatchError(AssertionError):
    """A row read a KV slot that holds something else than its own prefix."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that goes wrong at one step.

    kind: "fail" (the rid's row errs), "nan" (likewise, with the message of a real engine), "die" (the whole executor, for good),
    "hang" (the step never completes), "load" (loading raises; `step` is ignored).
    """

    kind: str
    step: int = 0
    rid: int | None = None  # "fail", "nan": None means every row of the step


class FakeScript(msgspec.Struct, frozen=True, kw_only=True):
    """What it says. Scripts win over hashing; after a script comes EOS, if the request has one, else hashed tokens."""

    vocab_size: int = 1_000
    outputs: dict[tuple[int, ...], tuple[int, ...]] = {}  # prompt ids -> output ids
    eos_every: int = 0  # n > 0: a hashed token is EOS with probability 1/n, by its prefix
    first_id: int = 0  # hashed tokens are first_id .. vocab_size - 1


class FakeSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Device time of a step: `step_s + token_s * tokens`. All 0: instant."""

    step_s: float = 0.0
    token_s: float = 0.0


def extend_hash(state: int, token: int) -> int:
    """Hash of a prefix and one more id."""
    state = ((state ^ token) * _MULTIPLIER + _INCREMENT) & MASK64
    return state ^ (state >> 29)


class Drawer:
    """Draws the tokens of one choice."""

    __slots__ = ("_choice", "_eos", "_masked", "_params", "_script", "_scripted", "_seed", "prompt_len")

    def __init__(
        self, script: FakeScript, prompt: Sequence[int], params: SamplingParams, seed: int, choice: int, eos: tuple[int, ...]
    ) -> None:
        self._script = script
        self._scripted = script.outputs.get(tuple(prompt)) if script.outputs else None
        self._params = params
        self._seed = 0 if params.greedy else seed
        self._choice = 0 if params.greedy else choice
        self._eos = () if params.ignore_eos else eos
        self._masked = frozenset(eos) | frozenset(params.stop_token_ids)
        self.prompt_len = len(prompt)

    def draw(self, state: int, position: int, mask: bytes | None = None) -> int:
        """The token at `position` after the prefix hashed in `state`."""
        script, index = self._script, position - self.prompt_len
        if self._scripted is not None:
            if index < len(self._scripted):
                return self._scripted[index]
            if self._eos:
                return self._eos[0]
        value = extend_hash(extend_hash(state, self._seed ^ 0x5EED), self._choice)
        if mask is not None:
            return _nth_allowed(mask, value, script.vocab_size)
        allowed = self._params.allowed_token_ids
        if allowed is not None:
            return allowed[value % len(allowed)]
        if script.eos_every and self._eos and value % script.eos_every == 0 and index >= self._params.min_tokens:
            return self._eos[0]
        token = script.first_id + (value >> 20) % (script.vocab_size - script.first_id)
        if index < self._params.min_tokens:
            while token in self._masked:
                token = script.first_id + (token + 1 - script.first_id) % (script.vocab_size - script.first_id)
        return token


def reference_tokens(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    choice: int = 0,
    eos: tuple[int, ...] = (),
    script: FakeScript | None = None,
    max_output: int | None = None,
) -> tuple[list[int], str]:
    """What the fake engine must give for a request, and its finish reason; no engine is involved."""
    drawer = Drawer(script or FakeScript(), prompt, params, seed, choice, eos)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    limit = max_output if max_output is not None else params.max_tokens
    assert limit is not None, "the reference needs a limit"
    state = 0
    for token in prompt:
        state = extend_hash(state, token)
    output: list[int] = []
    while len(output) < limit:
        token = drawer.draw(state, len(prompt) + len(output))
        output.append(token)
        if token in stops and len(output) > params.min_tokens:
            return output, "stop"
        state = extend_hash(state, token)
    return output, "length"


def fake_logprobs(token: int, state: int, count: int, vocab_size: int) -> TokenLogprobs:
    """Made-up log-probabilities: a pure function of the token and its prefix."""
    logprob = -((extend_hash(state, token) >> 40) % 1_000) / 100.0
    top = tuple(((token + k) % vocab_size, logprob - k) for k in range(count))
    return TokenLogprobs(token_id=token, logprob=logprob, rank=1, top=top)


class _State:
    """What the device would know of one request."""

    __slots__ = ("chain", "computed", "drawer", "failure", "ids", "new", "tables")

    def __init__(self, new: NewRequest, drawer: Drawer, ids: array[int]) -> None:
        self.new = new
        self.drawer = drawer
        self.ids = ids  # known ids, sampled ones included
        self.chain: list[int] = []  # chain[p]: hash of ids 0..p
        self.tables = [list(table) for table in new.block_ids]
        self.computed = new.num_cached
        self.failure: str | None = None  # a failed row drew no token: plans already in flight can only fail too


class _Clocked(Protocol):
    def now(self) -> float: ...


class FakeExecutor:
    """Implements the executor seam. `check_kv`: "all" reads every visible slot of each row, "last" the one before it, "off" none."""

    def __init__(
        self,
        *,
        script: FakeScript | None = None,
        speed: FakeSpeed | None = None,
        faults: Sequence[Fault] = (),
        clock: Clock | None = None,
        depth: int = 2,
        check_kv: str = "all",
        budget: KVBudget | None = None,
        drafts: int = 0,
    ) -> None:
        assert check_kv in ("all", "last", "off"), check_kv
        self.depth = depth
        self.script = script or FakeScript()
        self.closed = False
        self.num_steps = 0
        self._speed = speed or FakeSpeed()
        self._faults = tuple(faults)
        self._clock = clock or SystemClock()
        self._check_kv = check_kv
        self._budget = budget or _default_budget()
        self._num_drafts = drafts
        self._states: dict[int, _State] = {}
        self._slots: list[list[int]] = []  # group -> slot -> prefix hash
        self._layout: KVLayout | None = None
        self._ready_s = 0.0  # when the device is free again
        self._dead: str | None = None
        self._hung = False
        self._next_step = 0

    # -- the seam

    def load(self) -> LoadReport:
        if any(fault.kind == "load" for fault in self._faults):
            raise ModelError("injected: the weights cannot be read")
        return LoadReport(device="fake", dtype="float32", weight_bytes=0, phases_s={}, operators={})

    def kv_bytes(self) -> KVBudget:
        return self._budget

    def allocate(self, layout: KVLayout) -> None:
        self._layout = layout
        self._slots = [[0] * (layout.num_blocks * layout.block_size) for _ in layout.groups] if self._check_kv != "off" else []

    def execute(self, plan: StepPlan) -> FakeHandle:
        assert not self.closed and self._layout is not None, "execute before allocate or after close"
        assert plan.step_id == self._next_step, f"step {plan.step_id} came, {self._next_step} was due"
        self._next_step += 1
        self.num_steps += 1
        for fault in self._faults:
            if fault.step == plan.step_id and fault.kind == "die":
                self._dead = f"injected: the device died at step {plan.step_id}"
            elif fault.step == plan.step_id and fault.kind == "hang":
                self._hung = True
        busy_s = self._speed.step_s + self._speed.token_s * plan.num_tokens
        self._ready_s = max(self._ready_s, self._clock.now()) + busy_s
        return FakeHandle(self, plan, self._ready_s, busy_s)

    def close(self) -> None:
        self.closed = True
        self._states.clear()

    # -- computing

    def compute(self, plan: StepPlan, masks: Masks | None) -> tuple[RowResult, ...]:
        """Everything a step does, in the order of the seam's contract."""
        for rid in plan.finished:
            self._states.pop(rid, None)
        if self._slots:
            for move in plan.kv_moves:
                self._copy(move.group, move.source_block, move.target_block, move.num_tokens)
        for new in plan.new:
            self._states[new.rid] = self._make_state(new)
        failing = [fault for fault in self._faults if fault.step == plan.step_id and fault.kind in ("fail", "nan")]
        return tuple([self._row(row, failing, masks) for row in plan.rows])

    def _make_state(self, new: NewRequest) -> _State:
        ids: array[int] = array("I")
        for segment in new.prompt:
            ids.extend(segment.ids)
        prompt = ids[: new.prompt_len]
        state = _State(new, Drawer(self.script, prompt, new.params, new.seed, new.choice, new.eos_token_ids), ids)
        value = 0
        for token in ids:
            value = extend_hash(value, token)
            state.chain.append(value)
        return state

    def _row(self, row: Row, failing: list[Fault], masks: Masks | None) -> RowResult:
        state = self._states[row.rid]
        if state.failure is not None:
            return RowResult(rid=row.rid, error=state.failure)
        for table, added in zip(state.tables, row.new_block_ids, strict=False):
            table.extend(added)
        start = state.computed  # the plan's own `start` counts drafts in flight as accepted
        assert start <= row.start, f"rid {row.rid}: row starts at {row.start}, only {start} positions are there"
        accepted, known = self._verify(row, state, start)
        end = start + row.num_tokens - (row.num_drafts - accepted)
        assert end <= len(state.ids), f"rid {row.rid}: position {end - 1} has no id"
        if self._slots:
            self._write_and_read(row, state, start, end)
        state.computed = end
        for fault in failing:
            if fault.rid is None or fault.rid == row.rid:
                what = "logits are not finite (NaN)" if fault.kind == "nan" else "injected failure"
                state.failure = f"{what} at position {end - 1}"
                return RowResult(rid=row.rid, error=state.failure)
        if not row.samples:
            return RowResult(rid=row.rid, prompt_logprobs=self._prompt_logprobs(state, start, end))
        assert end == len(state.ids), f"rid {row.rid} samples at {end}, but {len(state.ids)} ids are known"
        chain = state.chain
        token = state.drawer.draw(chain[-1], end, masks.get(row.rid) if masks and row.masked else None)
        tokens = (*known, token) if known else (token,)
        logprobs: tuple[TokenLogprobs, ...] = ()
        count = state.new.params.logprobs
        if count is not None:
            first = end - len(known)
            logprobs = tuple(
                fake_logprobs(value, chain[first + index - 1], count, self.script.vocab_size) for index, value in enumerate(tokens)
            )
        prompt_logprobs = self._prompt_logprobs(state, start, end) if state.new.want_prompt_logprobs else ()
        state.ids.append(token)
        chain.append(extend_hash(chain[-1], token))
        return RowResult(rid=row.rid, tokens=tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, num_accepted=accepted)

    def _verify(self, row: Row, state: _State, start: int) -> tuple[int, tuple[int, ...]]:
        """Accept the drafts that are what would have been drawn; they become ids."""
        accepted = 0
        for draft in row.drafts:
            if state.drawer.draw(state.chain[-1], len(state.ids)) != draft:
                break
            state.ids.append(draft)
            state.chain.append(extend_hash(state.chain[-1], draft))
            accepted += 1
        return accepted, row.drafts[:accepted]

    def _write_and_read(self, row: Row, state: _State, start: int, end: int) -> None:
        assert self._layout is not None
        size, chain = self._layout.block_size, state.chain
        for group, spec in enumerate(self._layout.groups):
            slots, table = self._slots[group], state.tables[group]
            for position in range(start, end):
                block = table[position // size]
                if block == NO_BLOCK:
                    raise KVMismatchError(f"rid {row.rid} group {group}: position {position} has no block to write to")
                slots[block * size + position % size] = chain[position]
            low = max(0, start - spec.window + 1) if spec.window else 0
            for position in range(low if self._check_kv == "all" else max(low, start - 1), start):
                block = table[position // size]
                if block == NO_BLOCK or slots[block * size + position % size] != chain[position]:
                    raise KVMismatchError(f"rid {row.rid} group {group} block {block}: position {position} is not what was written there")

    def _copy(self, group: int, source: int, target: int, count: int) -> None:
        assert self._layout is not None
        slots, size = self._slots[group], self._layout.block_size
        slots[target * size : target * size + count] = slots[source * size : source * size + count]

    def _prompt_logprobs(self, state: _State, start: int, end: int) -> tuple[TokenLogprobs | None, ...]:
        """For the prompt positions just computed; position 0 has none."""
        new = state.new
        if not new.want_prompt_logprobs:
            return ()
        count = new.params.prompt_logprobs or 0
        return tuple(
            fake_logprobs(state.ids[position], state.chain[position - 1], count, self.script.vocab_size) if position else None
            for position in range(start, min(end, new.prompt_len))
        )

    # -- results

    def wait_until(self, ready_s: float, timeout_s: float | None) -> None:
        """Let the device finish: real clocks sleep, a manual one is moved."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        remaining_s = float("inf") if self._hung else ready_s - self._clock.now()
        late = timeout_s is not None and remaining_s > timeout_s
        assert late or not self._hung, "a hung step is waited for without a time limit"
        self._sleep(timeout_s if late and timeout_s is not None else remaining_s)
        if late:
            raise TimeoutError(f"the step did not complete within {timeout_s:g} s")

    def is_ready(self, ready_s: float) -> bool:
        return self._dead is not None or (not self._hung and self._clock.now() >= ready_s)

    def propose(self, plan: StepPlan) -> dict[int, tuple[int, ...]]:
        """Drafts after a step: the true continuation, with every third draft spoilt."""
        drafts: dict[int, tuple[int, ...]] = {}
        if not self._num_drafts:
            return drafts
        for row in plan.rows:
            state = self._states.get(row.rid)
            if state is None or not row.samples:
                continue
            value, position, ids = state.chain[-1], len(state.ids), []
            for _ in range(self._num_drafts):
                token = state.drawer.draw(value, position)
                if value % 3 == 0:
                    token = (token + 1) % self.script.vocab_size
                ids.append(token)
                value = extend_hash(value, token)
                position += 1
            drafts[row.rid] = tuple(ids)
        return drafts

    def _sleep(self, seconds: float) -> None:
        if seconds <= 0:
            return
        if isinstance(self._clock, ManualClock):
            self._clock.advance(seconds)
        else:
            time.sleep(seconds)


class FakeHandle:
    """One step in flight."""

    __slots__ = ("_busy_s", "_executor", "_plan", "_ready_s", "_sampled", "step_id")

    def __init__(self, executor: FakeExecutor, plan: StepPlan, ready_s: float, busy_s: float) -> None:
        self._executor = executor
        self._plan = plan
        self._ready_s = ready_s
        self._busy_s = busy_s
        self._sampled = False
        self.step_id = plan.step_id

    def sample(self, masks: Masks | None = None) -> FakePending:
        assert not self._sampled, "a step is sampled once"
        self._sampled = True
        result = StepResult(step_id=self.step_id, rows=self._executor.compute(self._plan, masks), busy_s=self._busy_s)
        return FakePending(self._executor, result, self._ready_s)

    def drafts(self) -> Mapping[int, tuple[int, ...]]:
        return self._executor.propose(self._plan)


class FakePending:
    """A result on its way."""

    __slots__ = ("_executor", "_ready_s", "_result")

    def __init__(self, executor: FakeExecutor, result: StepResult, ready_s: float) -> None:
        self._executor = executor
        self._result = result
        self._ready_s = ready_s

    def done(self) -> bool:
        return self._executor.is_ready(self._ready_s)

    def wait(self, timeout_s: float | None = None) -> StepResult:
        self._executor.wait_until(self._ready_s, timeout_s)
        return self._result


def _nth_allowed(mask: bytes, value: int, vocab_size: int) -> int:
    """The (value modulo count)-th token whose bit is set."""
    bits = int.from_bytes(mask, "little") & ((1 << vocab_size) - 1)
    count = bits.bit_count()
    assert count, "a mask that allows nothing"
    for _ in range(value % count):
        bits &= bits - 1
    return (bits & -bits).bit_length() - 1


def _default_budget() -> KVBudget:
    groups = (KVGroupSpec(kind="full", num_layers=1),)
    return KVBudget(available_bytes=4_096 * 1_024, page_bytes=1_024, block_size=16, groups=groups, breakdown={"fake": 4_096 * 1_024})
