"""Storage of keys and values: one pool of equal pages that all KV groups share.

A block id names one page. A page of any group holds the keys and values of `block_size` tokens in that group's layers; groups have equal
numbers of layers, so layer j of every group lives in the same tensor and block ids keep groups apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from hexad.engine.plan import KVGroupSpec, KVLayout, KVMove
from hexad.models.spec import ModelSpec
from hexad.operators.batch import KVPages
from hexad.operators.kv_int8 import row_width


def kv_groups(spec: ModelSpec) -> tuple[KVGroupSpec, ...]:
    """The KV groups of a model, in the order of its block tables."""
    return tuple(
        KVGroupSpec(kind=kind, num_layers=len(layers), window=spec.attention.window if kind == "sliding" else None)
        for kind, layers in spec.kv_layer_groups
    )


def page_bytes(spec: ModelSpec, kv_dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block over all layers of one group."""
    layers = len(spec.kv_layer_groups[0][1])
    return layers * 2 * block_size * spec.attention.kv_heads * row_width(spec.attention.head_dim, kv_dtype) * kv_dtype.itemsize


class KVStorage:
    """The pool. `layers[i]` are the pages of the model's layer i."""

    def __init__(self, layout: KVLayout, spec: ModelSpec, kv_dtype: torch.dtype, device: torch.device) -> None:
        shape = (layout.num_blocks, layout.block_size, spec.attention.kv_heads, row_width(spec.attention.head_dim, kv_dtype))
        depth = len(spec.kv_layer_groups[0][1])
        self._pages = [KVPages(*(_zeros(shape, kv_dtype, device) for _ in range(2))) for _ in range(depth)]
        self.layers: list[KVPages] = [self._pages[0]] * spec.num_layers
        for _kind, layers in spec.kv_layer_groups:
            for position, layer in enumerate(layers):
                self.layers[layer] = self._pages[position]
        self.nbytes = sum(pages.k.nbytes + pages.v.nbytes for pages in self._pages)

    def move(self, moves: Iterable[KVMove]) -> None:
        """Copy the first tokens of blocks onto other blocks, in order."""
        for move in moves:
            for pages in self._pages:
                for tensor in (pages.k, pages.v):
                    tensor[move.target_block, : move.num_tokens] = tensor[move.source_block, : move.num_tokens]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not empty: unread memory can never be NaN. On a CPU through numpy (calloc): the system hands out a zero page when it is first
    touched, so that a large pool costs neither time nor memory before it is used; `torch.zeros` writes all of it at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, np.uint8)).view(dtype).view(shape)
