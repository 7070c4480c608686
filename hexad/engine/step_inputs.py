"""One step's arrays on the device: two copies a step (one for 64-bit and one for 32-bit numbers), none on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hexad.engine.batch_state import HostStep
from hexad.models.inputs import LastTokens
from hexad.operators.batch import AttentionBatch


@dataclass(slots=True)
class DeviceStep:
    """What the forward pass and sampling read."""

    positions: torch.Tensor  # [T] int64
    token_index: torch.Tensor  # [T] int64: place in the flattened token table
    last_token: torch.Tensor  # [S] int64
    drawn_positions: torch.Tensor  # [S] int64: position of the token to draw
    drawn_index: torch.Tensor  # [S] int64: its place in the flattened token table
    attention: tuple[AttentionBatch, ...]
    last: tuple[LastTokens, ...] | None  # the sampled rows' last tokens, per KV group


def to_device(step: HostStep, table_width: int, block_size: int, device: torch.device, *, pick_last: bool = False) -> DeviceStep:
    """Send a step's arrays to `device`. Does not wait. `pick_last`: also what a step is described by that returns last tokens alone."""
    rows = step.sampled
    drawn_positions = step.starts[rows] + step.counts[rows]
    drawn_index = step.slots[rows] * table_width + drawn_positions
    wide = _send([step.positions, step.token_index, step.last_token, drawn_positions, drawn_index, *step.kv_slots], device)
    shared = np.asarray(step.shared_lens, np.int32)
    of_last = [np.arange(len(rows) + 1, dtype=np.int32), step.seq_lens[rows], *(t[rows] for t in step.block_tables)] if pick_last else []
    narrow = _send([step.query_start, step.seq_lens, *step.block_tables, shared, *of_last], device)
    groups = len(step.kv_slots)
    attention = tuple(
        AttentionBatch(
            query_start=narrow[0],
            seq_lens=narrow[1],
            block_table=narrow[2 + group],
            slots=wide[5 + group],
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            max_prompt_len=step.max_prompt_len,
            block_size=block_size,
            num_decodes=step.num_decodes,
            shared_len=narrow[2 + groups][group : group + 1] if step.shared_lens[group] else None,
        )
        for group in range(groups)
    )
    last = _last_tokens(wide[2], narrow[3 + groups :], attention) if pick_last else None
    return DeviceStep(wide[0], wide[1], wide[2], wide[3], wide[4], attention, last)


def _last_tokens(index: torch.Tensor, parts: list[torch.Tensor], groups: tuple[AttentionBatch, ...]) -> tuple[LastTokens, ...]:
    """One query a row: `parts` are its query_start, seq_lens and the block tables of each group."""
    made = []
    for whole, table in zip(groups, parts[2:], strict=True):
        batch = AttentionBatch(
            query_start=parts[0],
            seq_lens=parts[1],
            block_table=table,
            slots=index,
            max_query_len=1,
            max_seq_len=whole.max_seq_len,
            block_size=whole.block_size,
            num_decodes=len(index),
        )
        made.append(LastTokens(index, batch))
    return tuple(made)


def _send(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """The arrays (one dtype) on `device`, packed into one transfer."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    # each starts at a multiple of 16 bytes: kernels are compiled once more for pointers that do not
    each = 16 // arrays[0].itemsize
    sizes = [-(-array.size // each) * each for array in arrays]
    # pinned memory comes from torch's caching allocator, which reuses a buffer only after the copy from it is done
    staging = torch.empty(sum(sizes), dtype=torch.from_numpy(arrays[0]).dtype, pin_memory=device.type == "cuda")
    for place, array in zip(np.split(staging.numpy(), np.cumsum(sizes)[:-1]), arrays, strict=True):
        place[: array.size] = array.reshape(-1)
    parts = torch.split(staging.to(device, non_blocking=True), sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]
