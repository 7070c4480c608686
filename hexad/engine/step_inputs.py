"""One step's arrays on the device: two copies a step (one for 64-bit and one for 32-bit numbers), none on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hexad.engine.batch_state import HostStep
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


def to_device(step: HostStep, table_width: int, block_size: int, device: torch.device) -> DeviceStep:
    """Send a step's arrays to `device`. Does not wait."""
    rows = step.sampled
    drawn_positions = step.starts[rows] + step.counts[rows]
    drawn_index = step.slots[rows] * table_width + drawn_positions
    wide = _send([step.positions, step.token_index, step.last_token, drawn_positions, drawn_index, *step.kv_slots], device)
    shared = np.asarray(step.shared_lens, np.int32)
    narrow = _send([step.query_start, step.seq_lens, *step.block_tables, shared], device)
    groups = len(step.kv_slots)
    attention = tuple(
        AttentionBatch(
            query_start=narrow[0],
            seq_lens=narrow[1],
            block_table=narrow[2 + group],
            slots=wide[5 + group],
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            block_size=block_size,
            num_decodes=step.num_decodes,
            shared_len=narrow[-1][group : group + 1] if step.shared_lens[group] else None,
        )
        for group in range(groups)
    )
    return DeviceStep(wide[0], wide[1], wide[2], wide[3], wide[4], attention)


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
