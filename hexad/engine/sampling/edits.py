"""Changes to logits before anything is drawn, in this order: allowed ids, grammar masks, bad words, min_tokens, logit_bias, penalties.

Each is compiled, when the composition of a batch changes, into index tensors over the rows it concerns, and applied in place. Histories are
read from the token table on the device, so the newest token need not be known to the host. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hexad.engine.sampling.slots import SlotState

_BANNED = float("-inf")

MakeTensor = Callable[[Sequence[float], torch.dtype], Tensor]


class History(NamedTuple):
    """The ids so far of the batch's rows."""

    table: Tensor  # [max_num_seqs, max_len] int32 or int64
    slots: Tensor  # [R] int64: the table's row of each row
    lengths: Tensor  # [R] int64: valid ids there
    width: int  # no row is longer


class Edit(Protocol):
    """One kind of change, to all rows that asked for it. `logits` [R, V] is changed in place."""

    def apply(self, logits: Tensor, history: History) -> None: ...


@dataclass(frozen=True, slots=True)
class Allow:
    """Only the listed ids keep their logits."""

    rows: Tensor  # [A] rows with a list
    entry_rows: Tensor  # [N]
    entry_ids: Tensor  # [N]

    def apply(self, logits: Tensor, history: History) -> None:
        saved = logits[self.entry_rows, self.entry_ids]
        logits.index_fill_(0, self.rows, _BANNED)
        logits[self.entry_rows, self.entry_ids] = saved


@dataclass(frozen=True, slots=True)
class Ban:
    """Ids that are never drawn."""

    entry_rows: Tensor
    entry_ids: Tensor

    def apply(self, logits: Tensor, history: History) -> None:
        banned = torch.full((), _BANNED, device=logits.device)  # assigning a Python number would wait for the device
        logits.index_put_((self.entry_rows, self.entry_ids), banned)


@dataclass(frozen=True, slots=True)
class BanSequences:
    """The last id of a sequence is banned right after the rest of it was generated (ids of the prompt do not count)."""

    entry_rows: Tensor  # [N]
    entry_ids: Tensor  # [N] last ids
    prefix: Tensor  # [N, M] ids before the last, right-aligned, -1 for none
    prefix_len: Tensor  # [N]
    prompt_len: Tensor  # [N]

    def apply(self, logits: Tensor, history: History) -> None:
        lengths = history.lengths[self.entry_rows]
        width = self.prefix.shape[-1]
        place = lengths[:, None] + torch.arange(-width, 0, device=logits.device)  # [N, M] positions in the table
        recent = history.table[history.slots[self.entry_rows][:, None], place.clamp(min=0)]
        matched = ((recent == self.prefix) | (self.prefix < 0)).all(dim=-1)
        matched &= lengths - self.prefix_len >= self.prompt_len
        # Added, not assigned: of two entries for one id, the one that does not match must not undo the other.
        change = torch.zeros(matched.shape, dtype=logits.dtype, device=logits.device).masked_fill_(matched, _BANNED)
        logits.index_put_((self.entry_rows, self.entry_ids), change, accumulate=True)


@dataclass(frozen=True, slots=True)
class HoldBackEnd:
    """Ids that would end the choice are masked while fewer than min_tokens were generated."""

    entry_rows: Tensor  # [N]
    entry_ids: Tensor  # [N]
    until: Tensor  # [N] length of prompt and output from which they are free

    def apply(self, logits: Tensor, history: History) -> None:
        held = history.lengths[self.entry_rows] < self.until
        values = logits[self.entry_rows, self.entry_ids]
        logits[self.entry_rows, self.entry_ids] = values.masked_fill_(held, _BANNED)


@dataclass(frozen=True, slots=True)
class Bias:
    """logit_bias: added as it is."""

    entry_rows: Tensor
    entry_ids: Tensor
    bias: Tensor  # [N] float32

    def apply(self, logits: Tensor, history: History) -> None:
        logits[self.entry_rows, self.entry_ids] = logits[self.entry_rows, self.entry_ids] + self.bias


@dataclass(frozen=True, slots=True)
class Penalise:
    """Repetition (prompt and output; positive logits divided, negative multiplied), then frequency and presence (output only)."""

    rows: Tensor  # [P]
    prompt_len: Tensor  # [P]
    repetition: Tensor  # [P, 1]
    frequency: Tensor  # [P, 1]
    presence: Tensor  # [P, 1]
    counted: bool  # some row has a frequency or presence penalty

    def apply(self, logits: Tensor, history: History) -> None:
        vocab = logits.shape[-1]
        ids = history.table[history.slots[self.rows], : history.width].to(torch.int64)  # [P, L]
        place = torch.arange(ids.shape[-1], device=ids.device)
        valid = (place < history.lengths[self.rows][:, None]) & (ids >= 0) & (ids < vocab)
        # Entries past the end repeat the first id: every change below depends on the id alone, so repeats are harmless.
        ids = torch.where(valid, ids, ids[:, :1].clamp(0, vocab - 1))
        rows = self.rows[:, None]
        values = logits[rows, ids]
        values = torch.where(values > 0, values / self.repetition, values * self.repetition)
        if self.counted:
            generated = valid & (place >= self.prompt_len[:, None])
            counts = torch.zeros((ids.shape[0], vocab), dtype=torch.int32, device=ids.device)
            counts.scatter_add_(1, ids, generated.to(torch.int32))
            count = counts.gather(1, ids).to(values.dtype)
            values = values - self.frequency * count - self.presence * (count > 0)
        logits[rows, ids] = values


def apply_masks(logits: Tensor, rows: Tensor, masks: Sequence[bytes], to_device: Callable[[Tensor], Tensor]) -> None:
    """Grammar masks: one packed bit a token, little endian; tokens beyond a mask's end are banned. rows: [M]."""
    vocab = logits.shape[-1]
    num_bytes = (vocab + 7) // 8
    packed = bytearray().join(mask[:num_bytes].ljust(num_bytes, b"\0") for mask in masks)
    words = to_device(torch.frombuffer(packed, dtype=torch.uint8).view(len(masks), num_bytes))
    allowed = (words[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=words.device)) & 1  # [M, bytes, 8]
    banned = allowed.view(len(masks), -1)[:, :vocab] == 0
    logits[rows] = logits[rows].masked_fill_(banned, _BANNED)


Rows = Sequence[tuple[int, SlotState]]


def make_edits(rows: Rows, make: MakeTensor) -> tuple[tuple[Edit, ...], tuple[Edit, ...]]:
    """Edits that come before, and after, the grammar masks, for rows given as (row, state)."""
    before: list[Edit] = []
    after: list[Edit] = []
    allowed = [(row, state) for row, state in rows if state.params.allowed_token_ids is not None]
    if allowed:
        entries = _entries((row, s.params.allowed_token_ids or ()) for row, s in allowed)
        before.append(Allow(make([row for row, _ in allowed], torch.int64), *_index(entries, make)))
    if banned := _entries((row, s.banned) for row, s in rows):
        after.append(Ban(*_index(banned, make)))
    if any(s.sequences for _, s in rows):
        after.append(_make_sequences(rows, make))
    if ending := _entries((row, s.ending) for row, s in rows):
        until = [s.prompt_len + s.params.min_tokens for _, s in rows for _ in s.ending]
        after.append(HoldBackEnd(*_index(ending, make), make(until, torch.int64)))
    if biased := _entries((row, s.params.logit_bias) for row, s in rows):
        bias = [value for _, s in rows for value in s.params.logit_bias.values()]
        after.append(Bias(*_index(biased, make), make(bias, torch.float32)))
    if penalised := [(row, s) for row, s in rows if s.params.penalised]:
        after.append(_make_penalties(penalised, make))
    return tuple(before), tuple(after)


def _entries(ids_by_row: Iterable[tuple[int, Iterable[int]]]) -> list[tuple[int, int]]:
    return [(row, token_id) for row, ids in ids_by_row for token_id in ids]


def _index(entries: Sequence[tuple[int, int]], make: MakeTensor) -> tuple[Tensor, Tensor]:
    return make([row for row, _ in entries], torch.int64), make([token_id for _, token_id in entries], torch.int64)


def _make_sequences(rows: Rows, make: MakeTensor) -> BanSequences:
    entries = [(row, s.prompt_len, word) for row, s in rows for word in s.sequences]
    width = max(len(word) for _, _, word in entries) - 1
    prefixes = [(-1,) * (width - len(word) + 1) + word[:-1] for _, _, word in entries]
    return BanSequences(
        entry_rows=make([row for row, _, _ in entries], torch.int64),
        entry_ids=make([word[-1] for _, _, word in entries], torch.int64),
        prefix=make([token_id for prefix in prefixes for token_id in prefix], torch.int64).view(-1, width),
        prefix_len=make([len(word) - 1 for _, _, word in entries], torch.int64),
        prompt_len=make([prompt_len for _, prompt_len, _ in entries], torch.int64),
    )


def _make_penalties(rows: Rows, make: MakeTensor) -> Penalise:
    params = [s.params for _, s in rows]
    return Penalise(
        rows=make([row for row, _ in rows], torch.int64),
        prompt_len=make([s.prompt_len for _, s in rows], torch.int64),
        repetition=make([p.repetition_penalty for p in params], torch.float32)[:, None],
        frequency=make([p.frequency_penalty for p in params], torch.float32)[:, None],
        presence=make([p.presence_penalty for p in params], torch.float32)[:, None],
        counted=any(p.frequency_penalty or p.presence_penalty for p in params),
    )
