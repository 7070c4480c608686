"""Decode steps as CUDA graphs: one launch a step in place of hundreds.

A graph is captured for (rows, table width, ends) the first time such a step comes: rows and width are rounded up to a few sizes, so that
a running server needs a handful. Capturing takes one eager run and one capture, tens of milliseconds; nothing is compiled.

A captured step gathers its input ids from the token table, runs the network and the head, and either takes the arg max and stores it in
the token table (greedy rows without edits: the whole step is one graph) or leaves the logits for the sampler. Its inputs arrive in one
copy from pinned memory. Rows past the batch are padding: no KV is written for them, and their draw goes to a spare cell of the table.

All graphs share one memory pool: what a replay leaves behind is good until the next replay, and every reader is queued before that.
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hexad.engine.batch_state import HostStep
from hexad.engine.sampling.sampler import Sampled, Sampler
from hexad.models.build import Model
from hexad.models.inputs import ForwardInputs
from hexad.operators.batch import AttentionBatch, KVPages

log = logging.getLogger(__name__)

MAX_ROWS = 1024
STAGING_BUFFERS = 4  # more than the steps that can be in flight
MIN_WIDTH = 64  # columns of the block table


def row_bucket(rows: int) -> int:
    """Rows of the graph that serves `rows`: padding costs at most a quarter from 32 rows up."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 16 if rows <= 256 else 32 if rows <= 512 else 64
    return -(-rows // step) * step


def width_bucket(blocks: int, max_blocks: int) -> int:
    """Columns of the block table: powers of four from MIN_WIDTH, at most `max_blocks`."""
    width = MIN_WIDTH
    while width < blocks:
        width *= 4
    return min(width, max_blocks)


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a replay left: everything drawn, or logits for the sampler. Good until the next replay."""

    sampled: Sampled | None
    logits: torch.Tensor  # [B, vocab] float32; empty if all is drawn
    positions: torch.Tensor  # [B] int64
    drawn_index: torch.Tensor  # [B] int64: place in the flattened token table of the token to draw


@dataclass(frozen=True, slots=True)
class StepFrame:
    """The engine state that captured steps read and write; its tensors never move."""

    model: Model
    kv_layers: list[KVPages]
    tokens: torch.Tensor  # [max_num_seqs * table_width + 1] int64: the flattened token table and a spare cell
    sampler: Sampler
    table_width: int
    block_size: int
    groups: int
    max_blocks: int
    max_model_len: int


class _Inputs:
    """One graph's inputs: a device buffer, views of it, and pinned buffers to fill it from."""

    def __init__(self, frame: StepFrame, rows: int, width: int, device: torch.device) -> None:
        self.rows, self.width, self.groups = rows, width, frame.groups
        wide, narrow = (3 + frame.groups) * rows, rows + frame.groups * rows * width
        size = wide * 8 + narrow * 4
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._staging = [torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(STAGING_BUFFERS)]
        self._wide = [buffer.numpy()[: wide * 8].view(np.int64).reshape(-1, rows) for buffer in self._staging]
        self._narrow = [buffer.numpy()[wide * 8 :].view(np.int32) for buffer in self._staging]
        self._next = 0
        self._spare = frame.tokens.numel() - 1
        self._table_width = frame.table_width
        longs = self._device[: wide * 8].view(torch.int64).view(-1, rows)
        ints = self._device[wide * 8 :].view(torch.int32)
        self.positions, self.token_index, self.drawn_index = longs[0], longs[1], longs[2]
        self.slots = longs[3:]
        self.seq_lens = ints[:rows]
        self.tables = ints[rows:].view(frame.groups, rows, width)
        self.query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.pad()

    def pad(self) -> None:
        """Only padding rows: what a graph is captured with."""
        wide, _narrow = self._take()
        self._pad_from(wide, 0)
        self._send()

    def fill(self, host: HostStep) -> None:
        """The rows of a step, then padding."""
        count = len(host.rows)
        wide, narrow = self._take()
        wide[0, :count] = host.positions
        wide[1, :count] = host.token_index
        wide[2, :count] = host.slots * self._table_width + host.positions + 1
        for group, slots in enumerate(host.kv_slots):
            wide[3 + group, :count] = slots
        self._pad_from(wide, count)
        narrow[:count] = host.seq_lens
        narrow[count : self.rows] = 0
        tables = narrow[self.rows :].reshape(self.groups, self.rows, self.width)
        for group, table in enumerate(host.block_tables):
            tables[group, :count, : table.shape[1]] = table
        self._send()

    def _take(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        return self._wide[self._next], self._narrow[self._next]

    def _pad_from(self, wide: npt.NDArray[np.int64], count: int) -> None:
        wide[:2, count:] = 0
        wide[2, count:] = self._spare
        wide[3:, count:] = -1

    def _send(self) -> None:
        self._device.copy_(self._staging[self._next], non_blocking=True)
        self._next = (self._next + 1) % STAGING_BUFFERS


class _Captured:
    """One graph with its inputs and outputs."""

    def __init__(self, frame: StepFrame, inputs: _Inputs, logits: torch.Tensor | None) -> None:
        self.frame, self.inputs, self.logits = frame, inputs, logits
        self.graph = torch.cuda.CUDAGraph()
        self.sampled: Sampled | None = None
        self._batches = tuple(
            AttentionBatch(
                query_start=inputs.query_start,
                seq_lens=inputs.seq_lens,
                block_table=inputs.tables[group],
                slots=inputs.slots[group],
                max_query_len=1,
                max_seq_len=frame.max_model_len,
                block_size=frame.block_size,
                num_decodes=inputs.rows,
            )
            for group in range(frame.groups)
        )

    def compute(self) -> Sampled | None:
        """The step itself: run once to warm up, once to be captured."""
        frame, inputs = self.frame, self.inputs
        token_ids = frame.tokens.index_select(0, inputs.token_index)
        hidden = frame.model.forward(ForwardInputs(token_ids, inputs.positions, self._batches), frame.kv_layers)
        if self.logits is not None:
            frame.model.logits(hidden, out=self.logits)
            return None
        sampled = frame.sampler.take_best(frame.model.logits(hidden))
        frame.tokens.index_copy_(0, inputs.drawn_index, sampled.token_ids)
        return sampled

    def run(self, host: HostStep) -> Decoded:
        self.inputs.fill(host)
        self.graph.replay()
        count, inputs = len(host.rows), self.inputs
        sampled = None if self.sampled is None else self.sampled.first(count)
        logits = inputs.seq_lens[:0] if self.logits is None else self.logits[:count]
        return Decoded(sampled, logits, inputs.positions[:count], inputs.drawn_index[:count])


class DecodeGraphs:
    """The graphs of one engine. One thread; `frame` must outlive it."""

    def __init__(self, frame: StepFrame, device: torch.device) -> None:
        self._frame = frame
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        self._captured: dict[tuple[int, int, bool], _Captured] = {}
        self._logits: torch.Tensor | None = None

    def serves(self, host: HostStep) -> bool:
        """True for steps of one-token rows that all draw."""
        count = len(host.rows)
        return 0 < count <= MAX_ROWS and host.max_query_len == 1 and len(host.sampled) == count and not host.scored

    def run(self, host: HostStep, *, greedy: bool) -> Decoded:
        """Compute a step that `serves` accepted. `greedy`: every row takes its best token (see `Sampler.is_plain`)."""
        key = (row_bucket(len(host.rows)), width_bucket(host.block_tables[0].shape[1], self._frame.max_blocks), greedy)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(*key)
        return captured.run(host)

    def _capture(self, rows: int, width: int, greedy: bool) -> _Captured:
        started = time.perf_counter()
        captured = _Captured(self._frame, _Inputs(self._frame, rows, width, self._device), None if greedy else self._logits_of(rows))
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            captured.compute()  # compiles kernels, makes workspaces
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        collecting = gc.isenabled()
        gc.disable()  # a collection that frees device memory would end the capture
        try:
            with torch.cuda.graph(captured.graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                captured.sampled = captured.compute()
        finally:
            if collecting:
                gc.enable()
        log.info("captured a decode graph for %d rows, %d blocks in %.0f ms", rows, width, (time.perf_counter() - started) * 1e3)
        return captured

    def _logits_of(self, rows: int) -> torch.Tensor:
        """Rows of the one buffer that all graphs leave their logits in."""
        if self._logits is None or self._logits.shape[0] < rows:
            vocab = self._frame.model.spec.vocab_size
            # graphs captured before keep the smaller buffer alive
            self._logits = torch.empty(max(rows, 64), vocab, dtype=torch.float32, device=self._device)
        return self._logits[:rows]
