"""The sampler: one token for each row of a batch whose rows all want something else.

Work is grouped by need. Every row takes one arg max, which also finds rows with NaN; a greedy row without edits takes nothing else.
Rows with edits, random rows and rows with log-probabilities are handled as sub-batches. What the host works out for a batch (who is in
which sub-batch, index tensors) is kept as long as the same slots come again. Nothing waits for the device.

A row's result depends on its own logits, options, history and randomness key only, bit for bit: never on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hexad.engine.executor.seam import Masks
from hexad.engine.plan import NewRequest, TokenLogprobs
from hexad.engine.sampling import rng
from hexad.engine.sampling.edits import Edit, History, apply_masks, make_edits
from hexad.engine.sampling.filters import DrawGroup, make_groups
from hexad.engine.sampling.logprobs import LogprobTensors, gather_in_blocks, to_token_logprobs
from hexad.engine.sampling.slots import SlotState, make_state
from hexad.operators.args import BestTokenArgs, DrawArgs
from hexad.operators.draw import kept
from hexad.operators.load import load_operators
from hexad.operators.registry import Kernel

_KEPT_BATCHES = 8  # compositions remembered: mixed steps alternate between a few
_GROUP_ELEMENTS = {"cpu": 2**20, "cuda": 2**25}  # logits of random rows handled at a time: cache on a CPU, memory on a GPU

NOT_FINITE = 1
NOTHING_ALLOWED = 2
_ERRORS = {
    NOT_FINITE: "the model gave NaN or infinite logits for this request",
    NOTHING_ALLOWED: "no token may follow: allowed_token_ids, bad_words, min_tokens and the grammar together exclude every one",
}


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one call drew; tensors on the sampler's device, or on the host after `to_cpu`."""

    token_ids: Tensor  # [R] int64; a bad row has some valid id
    codes: Tensor  # [R] uint8: 0, NOT_FINITE or NOTHING_ALLOWED
    logprobs: LogprobTensors | None  # of the rows in `logprob_rows`
    logprob_rows: tuple[int, ...]
    tops: tuple[int, ...]  # alternatives that each of them wants

    @property
    def bad(self) -> Tensor:
        """[R] bool: NaN, or no finite logit; that request alone must fail."""
        return self.codes != 0

    def first(self, rows: int) -> Sampled:
        """The first `rows` of a result without log-probabilities."""
        assert self.logprobs is None
        return Sampled(self.token_ids[:rows], self.codes[:rows], None, (), ())

    def to_cpu(self) -> Sampled:
        """Start the copy to the host. From CUDA it is asynchronous: wait for an event recorded after this call before reading."""
        logprobs = None if self.logprobs is None else LogprobTensors(*(_copy_out(t) for t in self.logprobs))
        return Sampled(_copy_out(self.token_ids), _copy_out(self.codes), logprobs, self.logprob_rows, self.tops)


@dataclass(frozen=True, slots=True)
class HostSampled:
    """`Sampled` as Python objects, one entry a row."""

    token_ids: list[int]
    errors: list[str | None]
    logprobs: list[TokenLogprobs | None]  # None: not asked for, or the row failed


@dataclass(frozen=True, slots=True)
class _Batch:
    """All that the host knows about one batch composition."""

    slots: Tensor  # [R] int64
    edits_before: tuple[Edit, ...]  # before the grammar masks
    edits_after: tuple[Edit, ...]
    masked_rids: tuple[int, ...]
    masked_rows: Tensor | None
    edited_rows: Tensor | None  # None: no row is edited
    groups: tuple[DrawGroup, ...]
    logprob_rows: tuple[int, ...]
    logprob_index: Tensor | None
    tops: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Every row just takes its best token."""
        return self.edited_rows is None and not self.groups and self.logprob_index is None


class Sampler:
    """Draws tokens for the requests in its slots. `add` and `remove` follow the plans; one thread."""

    def __init__(
        self,
        vocab_size: int,
        padded_vocab: int,
        max_num_seqs: int,
        device: torch.device | str,
        operators: Mapping[str, str] | None = None,
    ) -> None:
        """`operators`: forced providers."""
        assert 0 < vocab_size <= padded_vocab
        self.vocab_size = vocab_size  # ids that the tokenizer knows; columns beyond are never drawn, ranked or listed
        self.padded_vocab = padded_vocab
        self.device = torch.device(device)
        self._states: list[SlotState | None] = [None] * max_num_seqs
        self._batches: dict[tuple[tuple[int, ...], tuple[int, ...]], _Batch] = {}
        self._operators = operators
        self._best_token: dict[torch.dtype, Kernel] = {}
        whole = DrawArgs(vocab_size, self.device.type)
        self._draw: Kernel = load_operators().bind("draw", whole, operators).call
        self.token_ranks: Kernel = load_operators().bind("token_ranks", whole, operators).call
        self._group_rows = max(1, _GROUP_ELEMENTS.get(self.device.type, 2**22) // vocab_size)

    def add(self, slot: int, request: NewRequest) -> None:
        """Put a request into a free slot."""
        assert self._states[slot] is None, f"slot {slot} is taken"
        self._states[slot] = make_state(request)
        self._batches.clear()

    def remove(self, slot: int) -> None:
        """Free a slot; an empty one is left alone."""
        self._states[slot] = None
        self._batches.clear()

    def __call__(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Tensor,
        token_table: Tensor,
        lengths: Tensor,
        masks: Masks | None = None,
        max_length: int | None = None,
    ) -> Sampled:
        """Draw one token a row. A slot may have several rows (drafts to verify), each with its own position and length.

        Args:
            logits: [R, padded_vocab] float32; changed in place.
            slots: the slot of each row.
            positions: [R] int64 on the device, position of the drawn token (randomness).
            token_table: [max_num_seqs, max_len] int32 or int64 on the device, all ids so far of each slot.
            lengths: [R] int64 on the device, how many ids of the slot's table row come before the drawn token.
            masks: packed grammar masks by rid; rows of other rids are free.
            max_length: an upper bound of `lengths` that the host knows: penalties read no more of the table.
        """
        batch = self._batch(tuple(slots), masks)
        if batch.is_plain:
            return self.take_best(logits)
        live = self._edit(logits, batch, token_table, lengths, masks, max_length)
        best, token_ids, codes = live.best, live.token_ids, live.codes
        for group in batch.groups:
            uniforms = rng.uniform(group.keys, positions[group.rows])
            token_ids[group.rows] = self._draw(_rows(live.logits, group.rows), best[group.rows], group.options, uniforms)
        logprobs = None
        if batch.logprob_index is not None:
            index = batch.logprob_index
            logprobs = gather_in_blocks(live.logits, index, best, token_ids, max(batch.tops), self._group_rows, self.token_ranks)
        return Sampled(token_ids, codes, logprobs, batch.logprob_rows, batch.tops)

    def is_plain(self, slots: Sequence[int], masks: Masks | None = None) -> bool:
        """True when every row just takes its best token: `take_best` then does all that a call would."""
        return self._batch(tuple(slots), masks).is_plain

    def take_best(self, logits: Tensor) -> Sampled:
        """The best token of each row of `logits`, of any dtype. Reads nothing but its argument, so that it can be captured in a graph."""
        if logits.dtype not in self._best_token:
            args = BestTokenArgs(self.vocab_size, logits.dtype, self.device.type)
            self._best_token[logits.dtype] = load_operators().bind("best_token", args, self._operators).call
        token_ids, codes = self._best_token[logits.dtype](logits)
        return Sampled(token_ids, codes, None, (), ())

    def probabilities(
        self,
        logits: Tensor,
        slots: Sequence[int],
        token_table: Tensor,
        lengths: Tensor,
        masks: Masks | None = None,
        max_length: int | None = None,
    ) -> Tensor:
        """The distribution that a call would draw from: [R, vocab_size] float64 (greedy rows: all mass on the arg max)."""
        batch = self._batch(tuple(slots), masks)
        live = self._edit(logits, batch, token_table, lengths, masks, max_length)
        result = torch.zeros(live.logits.shape, dtype=torch.float64, device=live.logits.device)
        result.scatter_(1, live.token_ids[:, None], 1.0)
        for group in batch.groups:
            weights, ids = kept(_rows(live.logits, group.rows), live.best[group.rows], group.options)
            shares = weights.to(torch.float64) / weights.sum(dim=-1, keepdim=True)
            if ids is None:
                result[group.rows] = shares
            else:
                result[group.rows] = torch.zeros_like(result[group.rows]).scatter_add_(1, ids, shares)
        return result

    def to_host(self, sampled: Sampled) -> HostSampled:
        """Python objects from host tensors (see `Sampled.to_cpu`)."""
        codes = sampled.codes.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(codes)
        if sampled.logprobs is not None:
            for row, entry in zip(sampled.logprob_rows, to_token_logprobs(sampled.logprobs, sampled.tops), strict=True):
                logprobs[row] = entry if codes[row] == 0 else None
        return HostSampled(sampled.token_ids.tolist(), [_ERRORS.get(code) for code in codes], logprobs)

    def _edit(
        self, logits: Tensor, batch: _Batch, token_table: Tensor, lengths: Tensor, masks: Masks | None, max_length: int | None
    ) -> _Live:
        """Apply all edits; find the best token of each row, and the rows that cannot be served."""
        live = logits[:, : self.vocab_size].to(torch.float32)
        plain = self.take_best(live)
        token_ids, codes = plain.token_ids, plain.codes
        best = live.gather(1, token_ids[:, None])[:, 0]
        if batch.edited_rows is None:
            return _Live(live, best, token_ids, codes)
        width = token_table.shape[1] if max_length is None else min(max_length, token_table.shape[1])
        history = History(token_table, batch.slots, lengths, width)
        for edit in batch.edits_before:
            edit.apply(live, history)
        if batch.masked_rows is not None and masks is not None:
            apply_masks(live, batch.masked_rows, [masks[rid] for rid in batch.masked_rids], self._upload)
        for edit in batch.edits_after:
            edit.apply(live, history)
        rows = batch.edited_rows
        best[rows], token_ids[rows] = _rows(live, rows).max(dim=-1)
        empty = (best == float("-inf")) & (codes == 0)
        return _Live(live, best, token_ids, codes + empty.to(torch.uint8) * NOTHING_ALLOWED)

    def _batch(self, slots: tuple[int, ...], masks: Masks | None) -> _Batch:
        """The composition's batch, made when it was not seen lately."""
        masked = tuple(row for row, slot in enumerate(slots) if self._state(slot).rid in masks) if masks else ()
        key = (slots, masked)
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= _KEPT_BATCHES:
                del self._batches[next(iter(self._batches))]
            batch = self._batches[key] = self._make_batch(slots, masked)
        return batch

    def _make_batch(self, slots: tuple[int, ...], masked: tuple[int, ...]) -> _Batch:
        states = [self._state(slot) for slot in slots]
        edited = sorted({row for row, state in enumerate(states) if state.edited} | set(masked))
        before, after = make_edits([(row, states[row]) for row in edited], self._make)
        random = [(row, s.params, s.key) for row, s in enumerate(states) if not s.params.greedy]
        listed = [(row, s.params.logprobs) for row, s in enumerate(states) if s.params.logprobs is not None]
        return _Batch(
            slots=self._make(slots, torch.int64),
            edits_before=before,
            edits_after=after,
            masked_rids=tuple(states[row].rid for row in masked),
            masked_rows=self._make(masked, torch.int64) if masked else None,
            edited_rows=self._make(edited, torch.int64) if edited else None,
            groups=make_groups(random, self.vocab_size, self._group_rows, self._make),
            logprob_rows=tuple(row for row, _ in listed),
            logprob_index=self._make([row for row, _ in listed], torch.int64) if listed else None,
            tops=tuple(top for _, top in listed),
        )

    def _state(self, slot: int) -> SlotState:
        state = self._states[slot]
        assert state is not None, f"slot {slot} is empty"
        return state

    def _make(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return self._upload(torch.tensor(values, dtype=dtype))

    def _upload(self, tensor: Tensor) -> Tensor:
        """Host tensor to the device; through pinned memory, because a copy from pageable memory waits for the stream."""
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Live:
    """A batch after its edits."""

    logits: Tensor  # [R, V] float32, without padding columns
    best: Tensor  # [R]
    token_ids: Tensor  # [R] arg max
    codes: Tensor  # [R]


def _rows(logits: Tensor, rows: Tensor) -> Tensor:
    """The named rows; all of them (rows are distinct and ascending) without a copy."""
    return logits if rows.shape[0] == logits.shape[0] else logits[rows]


def _copy_out(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
