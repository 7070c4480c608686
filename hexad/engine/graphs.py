"""Steps as CUDA graphs: one launch a step in place of hundreds, for decode steps and for short prompts.

A graph is captured for a shape (rows, tokens, table width, what it ends with) the first time such a step comes: all are rounded up to a
few sizes, so that a running server needs a handful. Capturing takes one eager run and one capture, tens of milliseconds; nothing is
compiled. Longer prompts are launched kernel by kernel: the card then takes longer than the host.

A captured step gathers its input ids from the token table, runs the network and the head, and either takes the arg max and stores it in
the token table (greedy rows without edits: the whole step is one graph) or leaves the logits for the sampler. Its inputs arrive in one
copy from pinned memory. Padding tokens write no KV, and the draw of a padding row goes to a spare cell of the table.

All graphs share one memory pool: what a replay leaves behind is good until the next replay, and every reader is queued before that.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hexad.engine.batch_state import HostStep
from hexad.engine.sampling.sampler import Sampled, Sampler
from hexad.models.build import Model
from hexad.models.inputs import ForwardInputs
from hexad.operators.batch import AttentionBatch, KVPages

log = logging.getLogger(__name__)

MAX_DECODE_ROWS = 1024
MAX_PROMPT_ROWS = 8
MAX_PROMPT_TOKENS = 512  # beyond, the card is busy for longer than the host needs to launch
STAGING_BUFFERS = 4  # more than the steps that can be in flight
MIN_WIDTH = 64  # columns of the block table


def row_bucket(rows: int) -> int:
    """Rows of the graph that serves `rows`: padding costs at most a quarter from 32 rows up."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 16 if rows <= 256 else 32 if rows <= 512 else 64
    return -(-rows // step) * step


def token_bucket(tokens: int) -> int:
    """Tokens of the graph that serves short prompts of `tokens` together."""
    return max(16, 1 << (tokens - 1).bit_length()) if tokens <= 64 else -(-tokens // 64) * 64


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


@dataclass(frozen=True, slots=True)
class Shape:
    """What a graph is captured for."""

    rows: int
    tokens: int
    width: int  # columns of the block tables
    decode: bool  # one token a row
    greedy: bool  # ends with the drawn tokens, else with logits
    shared: tuple[bool, ...] = ()  # per group: the rows share a prefix


def shape_of(host: HostStep, max_blocks: int, *, greedy: bool) -> Shape | None:
    """The shape that serves a step, or None: a long or mixed one, or one with rows that do not draw."""
    count, tokens = len(host.rows), len(host.positions)
    if not count or len(host.sampled) != count or host.scored:
        return None
    width = width_bucket(host.block_tables[0].shape[1], max_blocks)
    if host.max_query_len == 1 and count <= MAX_DECODE_ROWS:
        rows = row_bucket(count)
        return Shape(rows, rows, width, True, greedy, tuple(length > 0 for length in host.shared_lens))
    if host.num_decodes == 0 and count <= MAX_PROMPT_ROWS and tokens <= MAX_PROMPT_TOKENS:
        return Shape(row_bucket(count), token_bucket(tokens), width, False, greedy, (False,) * len(host.shared_lens))
    return None


class _Inputs:
    """One graph's inputs: a device buffer, views of it, and pinned buffers to fill it from."""

    def __init__(self, frame: StepFrame, shape: Shape, device: torch.device) -> None:
        groups = frame.groups
        wide, narrow = _sizes(shape, groups)
        size = wide * 8 + narrow * 4
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        staging = [torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(STAGING_BUFFERS)]
        self._staging = [(buffer, _Views.of(*_halves(buffer.numpy(), wide * 8), shape, groups)) for buffer in staging]
        self._next = 0
        self._spare = frame.tokens.numel() - 1
        self._table_width = frame.table_width
        longs, ints = self._device[: wide * 8].view(torch.int64), self._device[wide * 8 :].view(torch.int32)
        self.on_device = _Views.of(longs, ints, shape, groups)
        self._fill_padding(self._staging[0][1], 0, 0)
        self._send()

    def fill(self, host: HostStep) -> None:
        """The rows of a step, then padding."""
        count, tokens = len(host.rows), len(host.positions)
        views = self._staging[self._next][1]
        views.positions[:tokens] = host.positions
        views.token_index[:tokens] = host.token_index
        views.last_token[:count] = host.last_token
        views.drawn_index[:count] = host.slots * self._table_width + host.starts + host.counts
        views.seq_lens[:count] = host.seq_lens
        views.query_start[: count + 1] = host.query_start
        views.shared_lens[:] = host.shared_lens
        for group, (slots, table) in enumerate(zip(host.kv_slots, host.block_tables, strict=True)):
            views.slots[group, :tokens] = slots
            views.tables[group, :count, : table.shape[1]] = table
        self._fill_padding(views, count, tokens)
        self._send()

    def _fill_padding(self, views: _Views, count: int, tokens: int) -> None:
        """Padding tokens write nowhere; padding rows have no tokens, or in a decode step one padding token each."""
        views.positions[tokens:] = 0
        views.token_index[tokens:] = 0
        views.slots[:, tokens:] = -1
        views.last_token[count:] = 0
        views.drawn_index[count:] = self._spare
        views.seq_lens[count:] = 0
        padding_rows = len(views.query_start) - 1 - count
        one_each = len(views.positions) == len(views.seq_lens)
        views.query_start[count:] = tokens + (np.arange(padding_rows + 1) if one_each else 0)

    def _send(self) -> None:
        self._device.copy_(self._staging[self._next][0], non_blocking=True)
        self._next = (self._next + 1) % STAGING_BUFFERS


def _aligned(count: int, item_bytes: int) -> int:
    """`count` items rounded up so that what follows starts at a multiple of 16 bytes."""
    each = 16 // item_bytes
    return -(-count // each) * each


def _sizes(shape: Shape, groups: int) -> tuple[int, int]:
    """64-bit and 32-bit numbers of one input buffer."""
    wide = (2 + groups) * _aligned(shape.tokens, 8) + 2 * _aligned(shape.rows, 8)
    narrow = _aligned(shape.rows, 4) + _aligned(shape.rows + 1, 4) + _aligned(groups, 4) + groups * shape.rows * shape.width
    return wide, narrow


def _halves(buffer: npt.NDArray[np.uint8], wide_bytes: int) -> tuple[Any, Any]:
    return buffer[:wide_bytes].view(np.int64), buffer[wide_bytes:].view(np.int32)


@dataclass(frozen=True, slots=True)
class _Views:
    """The parts of one input buffer, on the host (numpy) or on the device (torch)."""

    positions: Any  # [T]
    token_index: Any  # [T] place in the flattened token table
    slots: Any  # [G, T]
    last_token: Any  # [B]
    drawn_index: Any  # [B] place in the flattened token table of the token to draw
    seq_lens: Any  # [B]
    query_start: Any  # [B + 1]
    shared_lens: Any  # [G]
    tables: Any  # [G, B, W]

    @staticmethod
    def of(longs: Any, ints: Any, shape: Shape, groups: int) -> _Views:
        rows, tokens = shape.rows, shape.tokens
        long, pair = _aligned(tokens, 8), _aligned(rows, 8)
        after = (2 + groups) * long
        lengths = _aligned(rows, 4)
        shared = lengths + _aligned(rows + 1, 4)
        table = shared + _aligned(groups, 4)
        return _Views(
            positions=longs[:tokens],
            token_index=longs[long : long + tokens],
            slots=longs[2 * long : after].reshape(groups, long)[:, :tokens],
            last_token=longs[after : after + rows],
            drawn_index=longs[after + pair : after + pair + rows],
            seq_lens=ints[:rows],
            query_start=ints[lengths : lengths + rows + 1],
            shared_lens=ints[shared : shared + groups],
            tables=ints[table:].reshape(groups, rows, shape.width),
        )


class _Captured:
    """One graph with its inputs and outputs."""

    def __init__(self, frame: StepFrame, shape: Shape, device: torch.device, logits: torch.Tensor | None) -> None:
        self.frame, self.shape, self.logits = frame, shape, logits
        self.inputs = _Inputs(frame, shape, device)
        self.replay: Callable[[], None]  # set when it is captured
        self.sampled: Sampled | None = None
        views = self.inputs.on_device
        self._batches = tuple(
            AttentionBatch(
                query_start=views.query_start,
                seq_lens=views.seq_lens,
                block_table=views.tables[group],
                slots=views.slots[group],
                max_query_len=1 if shape.decode else shape.tokens,
                max_seq_len=frame.max_model_len,
                block_size=frame.block_size,
                num_decodes=shape.rows if shape.decode else 0,
                shared_len=views.shared_lens[group : group + 1] if shape.shared[group] else None,
            )
            for group in range(frame.groups)
        )

    def compute(self) -> Sampled | None:
        """The step itself: run once to warm up, once to be captured."""
        frame, views = self.frame, self.inputs.on_device
        token_ids = frame.tokens.index_select(0, views.token_index)
        hidden = frame.model.forward(ForwardInputs(token_ids, views.positions[:], self._batches), frame.kv_layers)
        if not self.shape.decode:
            hidden = hidden.index_select(0, views.last_token)
        if self.logits is not None:
            frame.model.logits(hidden, out=self.logits)
            return None
        sampled = frame.sampler.take_best(frame.model.scores(hidden))
        frame.tokens.index_copy_(0, views.drawn_index, sampled.token_ids)
        return sampled

    def run(self, host: HostStep) -> Decoded:
        self.inputs.fill(host)
        self.replay()
        count, views = len(host.rows), self.inputs.on_device
        sampled = None if self.sampled is None else self.sampled.first(count)
        logits = views.seq_lens[:0] if self.logits is None else self.logits[:count]
        return Decoded(sampled, logits, views.drawn_index[:count])


class StepGraphs:
    """The graphs of one engine. One thread; `frame` must outlive it."""

    def __init__(self, frame: StepFrame, device: torch.device) -> None:
        self._frame = frame
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._captured: dict[Shape, _Captured] = {}
        self._logits: torch.Tensor | None = None

    def run(self, host: HostStep, *, greedy: bool) -> Decoded | None:
        """Compute a step; None if no graph serves it. `greedy`: every row takes its best token (see `Sampler.is_plain`)."""
        shape = shape_of(host, self._frame.max_blocks, greedy=greedy)
        if shape is None:
            return None
        captured = self._captured.get(shape)
        if captured is None:
            captured = self._captured[shape] = self._capture(shape)
        return captured.run(host)

    def _capture(self, shape: Shape) -> _Captured:
        started = time.perf_counter()
        captured = _Captured(self._frame, shape, self._device, None if shape.greedy else self._logits_of(shape.rows))
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            captured.compute()  # compiles kernels, makes workspaces
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        collecting = gc.isenabled()
        gc.disable()  # a collection that frees device memory would end the capture
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                captured.sampled = captured.compute()
        finally:
            if collecting:
                gc.enable()
        captured.replay = graph.replay
        log.info("captured %s in %.0f ms", shape, (time.perf_counter() - started) * 1e3)
        return captured

    def _logits_of(self, rows: int) -> torch.Tensor:
        """Rows of the one buffer that all graphs leave their logits in."""
        if self._logits is None or self._logits.shape[0] < rows:
            vocab = self._frame.model.spec.vocab_size
            # graphs captured before keep the smaller buffer alive
            self._logits = torch.empty(max(rows, 64), vocab, dtype=torch.float32, device=self._device)
        return self._logits[:rows]
