"""How a shared prefix is cut into programs, and the launchers that serve it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.triton.cascade import shared_kernel
from hexad.operators.triton.launch import Launcher

if TYPE_CHECKING:
    from hexad.operators.triton.attention import Layout

MAX_SHARED_SPLITS = 16


@dataclass(frozen=True)
class SharedTiles:
    """Tile sizes of `shared_kernel`."""

    pairs: int  # (row, query head) pairs a program
    warps: int
    stages: int  # one is for the block table, the others for tiles of keys and values
    per_sm: int  # programs that a multiprocessor holds at once; more parts than that would wait for a second turn


def shared_tiles(dim_pad: int, item_bytes: int, capability: int) -> SharedTiles:
    """Two programs a multiprocessor: one multiplies while the other waits. On an H200, 128 pairs by eight warps took 92 us, not 86."""
    if item_bytes == 4:  # no matrix units in full precision
        return SharedTiles(32, 4, 1, 1)
    if capability >= 90 and dim_pad <= 128:
        return SharedTiles(64, 4, 3, 2)
    return SharedTiles(64, 4, 2, 2 if capability == 80 and dim_pad <= 128 else 1)


class SharedPrefix:
    """The launchers of one layout by tile sizes."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.forced: SharedTiles | None = None  # for measurements
        self._launchers: dict[SharedTiles, Launcher] = {}

    def tiles(self) -> SharedTiles:
        return self.forced or shared_tiles(self.layout.dim_pad, self.layout.args.dtype.itemsize, self.layout.on.capability)

    def splits(self, rows: int) -> int:
        """Parts of the prefix with which the programs fill the card, and are all at work at once."""
        tiles = self.tiles()
        programs = self.layout.args.kv_heads * triton.cdiv(rows * self.layout.group, tiles.pairs)
        return int(max(1, min(MAX_SHARED_SPLITS, tiles.per_sm * self.layout.on.multiprocessors // programs)))

    def launcher(self, tiles: SharedTiles) -> Launcher:
        if tiles not in self._launchers:
            layout = self.layout
            args, tile, pdl = layout.args, layout.decode_tiles.tile, layout.on.tensor_copies
            constants: dict[str, Any] = {
                "HEADS": args.heads, "GROUP": layout.group, "DIM": args.head_dim, "DIM_PAD": layout.dim_pad, **layout.shared,
                "PAIRS": tiles.pairs, "TILE": tile, "STAGES": tiles.stages, "TENSOR_COPY": layout.copied(tile),
                "PRECISION": layout.precision, "PDL": pdl,
            }  # fmt: skip
            self._launchers[tiles] = Launcher(shared_kernel, constants, num_warps=tiles.warps, num_stages=tiles.stages, pdl=pdl)
        return self._launchers[tiles]

    def attend(
        self, q: torch.Tensor, kv: KVPages, batch: AttentionBatch, rows: int, *, serial: bool
    ) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Number of parts, partial results [splits, rows, heads, dim], and their maxima and norms [splits, rows, heads, 2]."""
        tiles, splits, layout = self.tiles(), self.splits(rows), self.layout
        shape = (splits, rows, layout.args.heads)
        partial = torch.empty((*shape, layout.dim_pad), dtype=torch.float32, device=q.device)
        stats = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
        grid = (layout.args.kv_heads, triton.cdiv(rows * layout.group, tiles.pairs), splits)
        k_desc, v_desc = layout.descriptors(kv, layout.decode_tiles.tile)
        self.launcher(tiles)(
            grid, q, kv.k, kv.v, k_desc, v_desc, batch.block_table, batch.shared_len, partial, stats, rows, splits, serial=serial
        )
        return splits, partial, stats
