"""Replays a recorded plan trace against simulated KV blocks: every read must find what the same prefix wrote. No torch.

The simulator knows nothing of the scheduler. It executes plans as an executor would, but instead of keys and values it writes tags: the
hash of the ids up to a position, the position included. It checks that

- each position that a row reads (all earlier ones, or those of the group's window) holds the tag of the row's own prefix, before and
  after the step's writes, so that no row depends on or destroys what another row of the same step uses;
- a block is handed out only when no plan in flight names it;
- rows go on where the request stands, sample at its end, and name known requests and blocks of the pool;
- what a failed row wrote is never read.

`python -m hexad.orchestration.replay FILE` prints the report; exit code 1 if there are violations.
"""

from __future__ import annotations

import sys
from collections import deque
from hashlib import blake2b
from pathlib import Path

import msgspec

from hexad.common.params import SamplingParams
from hexad.engine.plan import NO_BLOCK, KVLayout, NewRequest, Row, RowResult, StepPlan, StepResult
from hexad.orchestration.recorder import Planned, Retired, TraceHeader, read_trace

MAX_VIOLATIONS = 100
UNWRITTEN, POISONED = b"", b"failed"
_NO_PARAMS = SamplingParams()


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay saw. `violations` is empty for a correct trace (at most the first 100)."""

    num_steps: int
    num_rows: int
    num_tokens: int  # positions computed
    num_reads: int  # positions read, over rows and groups
    num_moves: int
    num_new: int  # requests introduced, resumed ones again
    num_cached_tokens: int  # positions not computed because a block held them
    num_blocks_taken: int  # blocks handed out
    max_in_flight: int
    violations: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.violations


class _Life:
    """One request from `new` to `finished`: as planned (tables, `planned`) and as executed (ids, tags, `computed`)."""

    __slots__ = ("computed", "failed", "ids_len", "planned", "rid", "seen", "tables", "tags")

    def __init__(self, new: NewRequest, num_groups: int) -> None:
        self.rid = new.rid
        self.tables = [list(table) for table in new.block_ids]
        self.planned = new.num_cached
        self.computed = new.num_cached
        self.failed = False  # rows planned before the scheduler knew are excused
        self.tags: list[bytes] = []  # tags[p]: of ids 0..p
        self.seen: list[dict[int, int]] = [{} for _ in range(num_groups)]  # block -> write count when its tags were right
        state = repr(new.adapter_id).encode()
        for segment in new.prompt:
            for token in segment.ids:
                state = _tag(state, token)
                self.tags.append(state)
        self.ids_len = len(self.tags)

    def append(self, token: int) -> None:
        self.tags.append(_tag(self.tags[-1], token))
        self.ids_len += 1


def _tag(state: bytes, token: int) -> bytes:
    return blake2b(state + token.to_bytes(8, "little"), digest_size=12).digest()


class Replayer:
    """Feed it `planned` and `retired` in the order in which they happened; works on a live scheduler as well."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._size = layout.block_size
        self._windows = [spec.window for spec in layout.groups]
        self._tags = [[UNWRITTEN] * (layout.num_blocks * layout.block_size) for _ in layout.groups]
        self._writes = [[0] * layout.num_blocks for _ in layout.groups]  # write count of each (group, block)
        self._last_named = [-1] * layout.num_blocks  # last plan that names the block
        self._retired = -1
        self._next_step = 0
        self._lives: dict[int, _Life] = {}
        self._in_flight: deque[tuple[StepPlan, list[_Life]]] = deque()
        self._violations: list[str] = []
        self._num_rows = self._num_tokens = self._num_reads = self._num_moves = self._num_new = 0
        self._num_cached = self._num_taken = self._max_in_flight = 0

    # -- what happens

    def planned(self, plan: StepPlan) -> None:
        """A plan was made: check what it hands out and where it goes on."""
        if plan.step_id != self._next_step:
            self._violation(plan, f"step {self._next_step} was due")
        self._next_step = plan.step_id + 1
        for rid in plan.finished:
            if self._lives.pop(rid, None) is None:
                self._violation(plan, f"rid {rid} is finished but unknown")
        taken: list[int] = []
        for new in plan.new:
            taken += self._introduce(plan, new)
        lives: list[_Life] = []
        for row in plan.rows:
            life = self._lives.get(row.rid)
            if life is None:
                self._violation(plan, f"rid {row.rid} has a row but was never introduced")
                life = _Life(NewRequest(rid=row.rid, prompt=(), prompt_len=0, params=_NO_PARAMS), len(self._windows))
            lives.append(life)
            taken += self._continue(plan, row, life)
        self._check_taken(plan, taken)
        self._name(plan, lives)
        if plan.num_tokens != sum(row.num_tokens for row in plan.rows):
            self._violation(plan, "num_tokens is not the sum over its rows")
        if len({row.rid for row in plan.rows}) != len(plan.rows):
            self._violation(plan, "a request has two rows")
        self._in_flight.append((plan, lives))
        self._max_in_flight = max(self._max_in_flight, len(self._in_flight))

    def retired(self, result: StepResult) -> None:
        """The oldest plan's result is there: execute it now that all ids are known."""
        plan, lives = self._in_flight.popleft()
        if plan.step_id != result.step_id:
            self._violation(plan, f"result of step {result.step_id} came")
        for move in plan.kv_moves:
            self._move(move.group, move.source_block, move.target_block, move.num_tokens)
        for out, life in zip(result.rows, lives, strict=True):
            life.failed |= out.error is not None
        spans = [self._span(plan, row, out, life) for row, out, life in zip(plan.rows, result.rows, lives, strict=True)]
        for life, (start, _) in zip(lives, spans, strict=True):
            if not life.failed:
                self._read(plan, life, start, start)
        for life, (start, end) in zip(lives, spans, strict=True):
            self._write(plan, life, start, end)
        for row, out, life, (start, end) in zip(plan.rows, result.rows, lives, spans, strict=True):
            if not life.failed:
                self._read(plan, life, start, end)
                self._finish_row(plan, row, out, life, end)
        self._retired = plan.step_id

    def report(self) -> ReplayReport:
        """Totals so far."""
        return ReplayReport(
            num_steps=self._next_step,
            num_rows=self._num_rows,
            num_tokens=self._num_tokens,
            num_reads=self._num_reads,
            num_moves=self._num_moves,
            num_new=self._num_new,
            num_cached_tokens=self._num_cached,
            num_blocks_taken=self._num_taken,
            max_in_flight=self._max_in_flight,
            violations=tuple(self._violations),
        )

    # -- planning

    def _introduce(self, plan: StepPlan, new: NewRequest) -> list[int]:
        """A new request; returns the blocks that it does not share."""
        if new.rid in self._lives:
            self._violation(plan, f"rid {new.rid} is new but known")
        if len(new.block_ids) != len(self._windows):
            self._violation(plan, f"rid {new.rid} has {len(new.block_ids)} tables, the layout has {len(self._windows)} groups")
        life = self._lives[new.rid] = _Life(new, len(self._windows))
        self._num_new += 1
        self._num_cached += new.num_cached
        if not 0 <= new.num_cached < life.ids_len:
            self._violation(plan, f"rid {new.rid}: {new.num_cached} of {life.ids_len} positions cached, at least one must be computed")
        shared = new.num_cached // self._size
        return [block for table in new.block_ids for block in table[shared:] if block != NO_BLOCK]

    def _continue(self, plan: StepPlan, row: Row, life: _Life) -> list[int]:
        """A row at planning time; returns the blocks it adds."""
        if row.start != life.planned:
            self._violation(plan, f"rid {row.rid} goes on at {row.start}, it stands at {life.planned}")
        life.planned = row.start + row.num_tokens
        taken: list[int] = []
        for table, added in zip(life.tables, row.new_block_ids, strict=False):
            table.extend(added)
            taken.extend(added)
        covered = min(map(len, life.tables), default=0) * self._size
        if covered < life.planned:
            self._violation(plan, f"rid {row.rid} computes up to {life.planned}, a table ends at {covered}")
        return taken

    def _check_taken(self, plan: StepPlan, taken: list[int]) -> None:
        self._num_taken += len(taken)
        if len(set(taken)) != len(taken):
            self._violation(plan, "a block was handed out twice")
        for block in taken:
            if not 0 <= block < self._layout.num_blocks:
                self._violation(plan, f"block {block} is not in the pool")
            elif self._last_named[block] > self._retired:
                self._violation(plan, f"block {block} was handed out while step {self._last_named[block]}, which names it, is in flight")

    def _name(self, plan: StepPlan, lives: list[_Life]) -> None:
        """Note the blocks that the plan reads or writes."""
        last_named, size, step = self._last_named, self._size, plan.step_id
        for row, life in zip(plan.rows, lives, strict=True):
            for window, table in zip(self._windows, life.tables, strict=False):
                low = max(0, row.start - window + 1) // size if window else 0
                for block in table[low : -(-(row.start + row.num_tokens) // size)]:
                    last_named[block] = step
        for move in plan.kv_moves:
            last_named[move.source_block] = last_named[move.target_block] = step

    # -- executing

    def _span(self, plan: StepPlan, row: Row, out: RowResult, life: _Life) -> tuple[int, int]:
        """Positions that the row really computed; its accepted drafts become ids first."""
        if life.failed:
            return life.computed, min(row.start + row.num_tokens, life.ids_len)
        for token in out.tokens[: out.num_accepted]:
            life.append(token)
        start = life.computed
        end = start + row.num_tokens - (row.num_drafts - out.num_accepted)
        if end > life.ids_len:
            self._violation(plan, f"rid {row.rid} computes position {end - 1}, only {life.ids_len} ids exist")
            end = life.ids_len
        self._num_rows += 1
        self._num_tokens += end - start
        return start, end

    def _finish_row(self, plan: StepPlan, row: Row, out: RowResult, life: _Life, end: int) -> None:
        life.planned -= row.num_drafts - out.num_accepted
        if row.samples and end != life.ids_len:
            self._violation(plan, f"rid {row.rid} samples after position {end - 1}, its last id is at {life.ids_len - 1}")
        life.computed = end
        for token in out.tokens[out.num_accepted :]:
            life.append(token)

    def _write(self, plan: StepPlan, life: _Life, start: int, end: int) -> None:
        size = self._size
        for group, table in enumerate(life.tables):
            tags, writes = self._tags[group], self._writes[group]
            for position in range(start, end):
                block = table[position // size]
                if block == NO_BLOCK:
                    self._violation(plan, f"rid {life.rid} group {group} has no block for position {position}")
                    continue
                tags[block * size + position % size] = POISONED if life.failed else life.tags[position]
                writes[block] += 1

    def _read(self, plan: StepPlan, life: _Life, start: int, end: int) -> None:
        """Check the positions below `end` that computing from `start` reads. Blocks not written since they were right stay right."""
        size = self._size
        for group, (window, table) in enumerate(zip(self._windows, life.tables, strict=False)):
            low = max(0, start - window + 1) if window else 0
            self._num_reads += end - low
            seen, writes = life.seen[group], self._writes[group]
            for index in range(low // size, -(-end // size)):
                block = table[index]
                if block == NO_BLOCK:
                    self._violation(plan, f"rid {life.rid} group {group} reads block {index}, which it does not have")
                elif seen.get(block) != writes[block]:
                    first, last = max(low, index * size), min(end, (index + 1) * size)
                    if self._compare(plan, life, group, block, first, last) and first == index * size and last == first + size:
                        seen[block] = writes[block]

    def _compare(self, plan: StepPlan, life: _Life, group: int, block: int, first: int, last: int) -> bool:
        offset = block * self._size + first % self._size
        found, expected = self._tags[group][offset : offset + last - first], life.tags[first:last]
        if found == expected:
            return True
        position = next(first + index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        what = {UNWRITTEN: "nothing", POISONED: "what a failed row wrote"}.get(found[position - first], "another prefix")
        self._violation(plan, f"rid {life.rid} group {group} block {block} reads position {position} and finds {what}")
        return False

    def _move(self, group: int, source: int, target: int, count: int) -> None:
        size, tags = self._size, self._tags[group]
        tags[target * size : target * size + count] = tags[source * size : source * size + count]
        self._writes[group][target] += 1
        self._num_moves += 1

    def _violation(self, plan: StepPlan, text: str) -> None:
        if len(self._violations) < MAX_VIOLATIONS:
            self._violations.append(f"step {plan.step_id}: {text}")


def replay(path: Path | str) -> ReplayReport:
    """Replay a recorded trace.

    Raises:
        ValueError: the file is not a trace.
    """
    replayer: Replayer | None = None
    for record in read_trace(path):
        if isinstance(record, TraceHeader):
            replayer = Replayer(record.layout)
        elif isinstance(record, Planned):
            assert replayer is not None
            replayer.planned(record.plan)
        elif isinstance(record, Retired):
            assert replayer is not None
            replayer.retired(record.result)
    assert replayer is not None
    return replayer.report()


def main() -> int:
    """Print the report of the trace named on the command line."""
    if len(sys.argv) != 2:
        print("usage: python -m hexad.orchestration.replay FILE")
        return 2
    report = replay(sys.argv[1])
    print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
