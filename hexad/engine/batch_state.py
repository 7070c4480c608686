"""The runner's host memory of requests: a slot each, their block tables, and one step's plan as flat arrays. No torch.

A request keeps its slot from the plan that brings it (`new`) to the plan that drops it (`finished`): the slot is its row in every
per-request tensor on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hexad.engine.plan import NO_BLOCK, KVMove, NewRequest, Row, StepPlan

# Keys that need not be read again, for a shared prefix to be worth launches of its own. A layer's attention on an H200, without and with
# them: 16 rows over 1,024 shared keys 19 and 15 us, 64 over 512 37 and 26, 256 over 2,048 325 and 77. Less was not measured.
MIN_SHARED_READS = 2**14

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class Arrival:
    """A request that enters with this step: its slot, and every id the host knows."""

    slot: int
    request: NewRequest
    ids: Ints32


@dataclass(slots=True)
class HostStep:
    """One plan as arrays. B rows in execution order (one-token rows first), T tokens, S sampled rows, G groups."""

    step_id: int
    rows: list[Row]  # execution order
    order: list[int]  # order[i] = place in the plan of execution row i
    dropped: list[int]  # slots to forget, before anything else
    arrivals: list[Arrival]
    kv_moves: tuple[KVMove, ...]
    slots: Ints  # [B] request slot of each row
    starts: Ints  # [B]
    counts: Ints  # [B] tokens of each row
    query_start: Ints32  # [B + 1]
    seq_lens: Ints32  # [B]
    positions: Ints  # [T]
    token_index: Ints  # [T] place in the flattened token table
    kv_slots: list[Ints]  # per group [T]
    block_tables: list[Ints32]  # per group [B, blocks]
    max_query_len: int
    max_seq_len: int
    max_prompt_len: int  # of the rows that are not decodes
    num_decodes: int  # leading rows with one token
    sampled: list[int]  # execution rows that sample
    sampled_slots: list[int]  # their request slots
    last_token: Ints  # [S] index of each sampled row's last token
    shared_lens: list[int]  # per group: keys (whole blocks) that all one-token rows share; 0: too few to matter
    scored: list[tuple[int, NewRequest]]  # (execution row, request) of rows over a prompt whose log-probabilities are wanted


class BatchState:
    """Slots and block tables. Changed by `step` alone, in the order of the plans."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.table_width = max_model_len + 1  # the token drawn at the last position is stored too
        self.block_size = block_size
        self.max_blocks = -(-self.table_width // block_size)
        self._tables = [np.full((max_num_seqs, self.max_blocks), NO_BLOCK, np.int32) for _ in range(num_groups)]
        self._filled = [[0] * max_num_seqs for _ in range(num_groups)]
        self._slot_of: dict[int, int] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._scored: dict[int, NewRequest] = {}  # requests that want prompt log-probabilities

    def __len__(self) -> int:
        return len(self._slot_of)

    def step(self, plan: StepPlan) -> HostStep:
        """Apply a plan: drop, add, extend tables; lay its rows out as arrays."""
        dropped = [self._drop(rid) for rid in plan.finished if rid in self._slot_of]
        arrivals = [self._add(request) for request in plan.new]
        rows, order = _decodes_first(plan.rows)
        for row in rows:
            if row.new_block_ids:
                self._extend(self._slot_of[row.rid], row.new_block_ids)
        return self._lay_out(plan, rows, order, dropped, arrivals)

    def _add(self, request: NewRequest) -> Arrival:
        assert request.rid not in self._slot_of, f"request {request.rid} came twice"
        assert self._free, f"more than {self.max_num_seqs} requests at once"
        slot = self._free.pop()
        self._slot_of[request.rid] = slot
        if request.want_prompt_logprobs:
            self._scored[request.rid] = request
        for table, filled in zip(self._tables, self._filled, strict=True):
            table[slot] = NO_BLOCK
            filled[slot] = 0
        self._extend(slot, request.block_ids)
        segments = [np.asarray(segment.ids, np.int32) for segment in request.prompt]
        ids = segments[0] if len(segments) == 1 else np.concatenate(segments)
        return Arrival(slot, request, ids)

    def _drop(self, rid: int) -> int:
        slot = self._slot_of.pop(rid)
        self._scored.pop(rid, None)
        self._free.append(slot)
        return slot

    def _extend(self, slot: int, block_ids: tuple[tuple[int, ...], ...]) -> None:
        for group, ids in enumerate(block_ids):
            if ids:
                low = self._filled[group][slot]
                self._tables[group][slot, low : low + len(ids)] = ids
                self._filled[group][slot] = low + len(ids)

    def _lay_out(self, plan: StepPlan, rows: list[Row], order: list[int], dropped: list[int], arrivals: list[Arrival]) -> HostStep:
        count, slot_of = len(rows), self._slot_of
        slots = np.fromiter([slot_of[row.rid] for row in rows], np.int64, count)
        starts = np.fromiter([row.start for row in rows], np.int64, count)
        counts = np.fromiter([row.num_tokens for row in rows], np.int64, count)
        query_start = np.zeros(count + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        seq_lens = starts + counts
        longest, widest = int(seq_lens.max(initial=0)), int(counts.max(initial=0))
        positions, token_slots = _positions(slots, starts, counts, query_start, widest)
        sampled = [index for index, row in enumerate(rows) if row.samples]
        width = -(-longest // self.block_size)
        in_block, offset = positions // self.block_size, positions % self.block_size
        num_decodes = count if widest <= 1 else int(np.argmax(counts > 1))
        block_tables = [table[slots, :width] for table in self._tables]
        return HostStep(
            step_id=plan.step_id,
            rows=rows,
            order=order,
            dropped=dropped,
            arrivals=arrivals,
            kv_moves=plan.kv_moves,
            slots=slots,
            starts=starts,
            counts=counts,
            query_start=query_start,
            seq_lens=seq_lens.astype(np.int32),
            positions=positions,
            token_index=token_slots * self.table_width + positions,
            kv_slots=[table[token_slots, in_block].astype(np.int64) * self.block_size + offset for table in self._tables],
            block_tables=block_tables,
            max_query_len=widest,
            max_seq_len=longest,
            max_prompt_len=int(seq_lens[num_decodes:].max(initial=0)),
            num_decodes=num_decodes,
            sampled=sampled,
            sampled_slots=slots[sampled].tolist(),
            last_token=query_start[1:][sampled].astype(np.int64) - 1,
            shared_lens=[_shared_len(table[:num_decodes], seq_lens[:num_decodes], self.block_size) for table in block_tables],
            scored=self._scored_rows(rows) if self._scored else [],
        )

    def _scored_rows(self, rows: list[Row]) -> list[tuple[int, NewRequest]]:
        wanted = [(index, self._scored[row.rid]) for index, row in enumerate(rows) if row.rid in self._scored]
        return [(index, request) for index, request in wanted if rows[index].start < request.prompt_len]


def _shared_len(table: Ints32, lengths: Ints, block_size: int) -> int:
    """Keys in leading blocks that all rows have in common; 0 where reading them once would save next to nothing."""
    rows = len(table)
    if rows < 2 or (rows - 1) * int(lengths.min()) < MIN_SHARED_READS or (table[:, 0] != table[0, 0]).any():
        return 0
    most = (int(lengths.min()) - 1) // block_size  # the newest key is a row's own
    same = (table[:, :most] == table[0, :most]).all(axis=0)
    shared = (most if same.all() else int(np.argmin(same))) * block_size
    return shared if (rows - 1) * shared >= MIN_SHARED_READS else 0


def _decodes_first(rows: Sequence[Row]) -> tuple[list[Row], list[int]]:
    """Rows with one token before the others, order kept otherwise; and where each came from."""
    order = list(range(len(rows)))
    wide = [row.num_tokens > 1 for row in rows]
    if any(wide):
        order.sort(key=wide.__getitem__)  # stable
        return [rows[place] for place in order], order
    return list(rows), order


def _positions(slots: Ints, starts: Ints, counts: Ints, query_start: Ints32, widest: int) -> tuple[Ints, Ints]:
    """(position, request slot) of each token."""
    if widest <= 1:
        return starts, slots
    positions = np.arange(int(query_start[-1]), dtype=np.int64) + np.repeat(starts - query_start[:-1], counts)
    return positions, np.repeat(slots, counts)
