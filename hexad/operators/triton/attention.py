"""`paged_attention` on NVIDIA GPUs: decode rows through split keys, the others through the prefill kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from hexad.operators.args import AttentionArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.registry import Kernel
from hexad.operators.triton.decode import ITEM_FIELDS, combine_kernel, decode_kernel, plan_kernel
from hexad.operators.triton.launch import Launcher, Target, capturing, pow2, target
from hexad.operators.triton.prefill import prefill_kernel
from hexad.operators.triton.prefill_hopper import PIECE, QUERIES, STAGES, page_layout, prefill_hopper_kernel
from hexad.operators.triton.shared_prefix import MAX_SHARED_SPLITS, SharedPrefix

PAGES = (16, 32, 64, 128, 256)
MAX_ROWS = 4096
MEDIUM = 768  # query tokens a row up to which the general kernel is faster than the warp-specialised one, keys being few
LONG_KEYS = 1024  # an H200 took 520 us in place of 650 for 64 rows of 128 queries over 2,176 keys
# Up to so many keys all heads of a row are computed abreast, the longest walks first, so that none is left to end alone (H200: one prompt
# of 1,024 tokens 36 -> 28 us, of 2,048 91 -> 78). Beyond, one head after another: what programs read together stays together in the L2
# (16 x 512 behind 2,048: 575 -> 559 us).
ABREAST_KEYS = 2048
MOST_DEEP = 65_535  # programs along a grid's third axis
PLAN_ITEMS = 16  # items a program of the plan
Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]  # items, starts, partial, stats, capacity
MANY_ROWS = 32  # from here on a row has few items
HEADS_TOGETHER = 8  # query heads of such a row that one program merges
WANTED_PROGRAMS = 4  # decode programs a multiprocessor that fill the card


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one attention kernel."""

    tile: int  # keys
    warps: int
    stages: int
    queries: int = 0  # prefill only


def decode_tiles(dim_pad: int, item_bytes: int, capability: int) -> Tiles:
    """Keys a tile so that K and V of all stages fit two programs a multiprocessor (one where shared memory is small)."""
    stage_bytes = 2 * 64 * dim_pad * item_bytes
    tile = 64 if stage_bytes <= 32 * 1024 else max(16, 64 * 32 * 1024 // stage_bytes)
    return Tiles(tile, warps=4, stages=2 if capability == 89 else 3)


def prefill_tiles(dim_pad: int, item_bytes: int, capability: int, max_queries: int) -> Tiles:
    """Tiles that keep the accumulator in registers and two programs a multiprocessor where they fit."""
    if item_bytes == 4:  # no matrix units in full precision
        return Tiles(tile=32 if dim_pad <= 128 else 16, warps=4, stages=1, queries=32)
    if max_queries <= MEDIUM or dim_pad > 128:
        return Tiles(tile=64 if dim_pad <= 128 else 32, warps=4, stages=3 if capability >= 90 else 2, queries=64)
    return Tiles(tile=64, warps=4 if capability >= 90 else 8, stages=2, queries=128)


class Layout:
    """The launchers for one layout of queries and pages (strides are constants of the kernels)."""

    def __init__(self, args: AttentionArgs, on: Target, q_stride: int, page: int, strides: tuple[int, ...], *, tensor_copies: bool) -> None:
        self.args, self.on, self.page, self.strides = args, on, page, strides
        self.group = args.heads // args.kv_heads
        self.dim_pad = max(16, pow2(args.head_dim))
        self.precision = "ieee" if args.dtype == torch.float32 else "tf32"
        self.shared = {
            "Q_STRIDE": q_stride, "PAGE": page, "BLOCK_STRIDE": strides[0], "TOKEN_STRIDE": strides[1], "HEAD_STRIDE": strides[2],
            "SCALE": args.scale, "SOFTCAP": args.softcap or 0.0,
        }  # fmt: skip
        kv_bytes = args.kv_dtype.itemsize
        self.decode_tiles = decode_tiles(self.dim_pad, max(kv_bytes, args.dtype.itemsize), on.capability)
        self.copies = tensor_copies and all(stride * kv_bytes % 16 == 0 for stride in strides[:3])
        self.wanted = triton.cdiv(WANTED_PROGRAMS * on.multiprocessors, args.kv_heads)
        self._prefill: dict[bool, tuple[Tiles, Launcher]] = {}
        self._plan: dict[tuple[int, bool], Launcher] = {}
        self._descriptors: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._decode: dict[bool, Launcher] = {}
        self.hopper = self._hopper_launcher()
        self._combine: dict[tuple[bool, bool], Launcher] = {}
        self.prefix = SharedPrefix(self)
        self.set_combine(64)

    def set_combine(self, parts: int) -> None:
        """Merge partial results `parts` at a time where rows are few, and have many."""
        self.combine_parts = parts
        self._combine.clear()

    def combine_launcher(self, rows: int, *, shared: bool) -> tuple[int, Launcher]:
        """Programs a row, and what merges partial results of `rows` rows and those of a shared prefix."""
        many = rows >= MANY_ROWS
        together = min(HEADS_TOGETHER, pow2(self.args.heads)) if many else 1
        if (many, shared) not in self._combine:
            args = self.args
            constants = {
                "HEADS": args.heads, "DIM": args.head_dim, "DIM_PAD": self.dim_pad, "TOGETHER": together,
                "PARTS": 2 if many else self.combine_parts, "MAX_SPLITS": MAX_SHARED_SPLITS if shared else 0, "PDL": self.on.tensor_copies,
            }  # fmt: skip
            self._combine[many, shared] = Launcher(combine_kernel, constants, num_warps=4, pdl=self.on.tensor_copies)
        return triton.cdiv(self.args.heads, together), self._combine[many, shared]

    def decode_launcher(self, *, shared: bool) -> Launcher:
        """Attention over each row's own keys: all, or those after a shared prefix."""
        if shared not in self._decode:
            args, tiles, pdl = self.args, self.decode_tiles, self.on.tensor_copies
            constants = {
                "HEADS": args.heads, "GROUP": self.group, "GROUP_PAD": max(16, pow2(self.group)), "DIM": args.head_dim,
                "DIM_PAD": self.dim_pad, **self.shared, "TILE": tiles.tile, "STAGES": tiles.stages, "PRECISION": self.precision,
                "LINES": max(1, self.dim_pad * args.kv_dtype.itemsize // 128), "SHARED": shared, "PDL": pdl,
            }  # fmt: skip
            self._decode[shared] = Launcher(decode_kernel, constants, num_warps=tiles.warps, num_stages=tiles.stages, pdl=pdl)
        return self._decode[shared]

    def copied(self, tile: int) -> bool:
        return self.copies and self.page % tile == 0

    def prefill_launcher(self, *, short: bool) -> tuple[Tiles, Launcher]:
        if short not in self._prefill:
            args = self.args
            tiles = prefill_tiles(self.dim_pad, args.dtype.itemsize, self.on.capability, MEDIUM if short else MEDIUM + 1)
            constants = {
                "HEADS": args.heads, "GROUP": self.group, "DIM": args.head_dim, "DIM_PAD": self.dim_pad, **self.shared,
                "WINDOW": args.window or 0, "QUERIES": tiles.queries, "TILE": tiles.tile, "STAGES": tiles.stages,
                "TENSOR_COPY": self.copied(tiles.tile), "PRECISION": self.precision, "PDL": self.on.tensor_copies,
            }  # fmt: skip
            launcher = Launcher(prefill_kernel, constants, num_warps=tiles.warps, num_stages=tiles.stages, pdl=self.on.tensor_copies)
            self._prefill[short] = (tiles, launcher)
        return self._prefill[short]

    def _hopper_launcher(self) -> Launcher | None:
        """The warp-specialised kernel, where card, page and head layouts and attention kind allow it."""
        args, strides = self.args, self.strides
        contiguous = strides[:3] == (self.page * args.kv_heads * args.head_dim, args.kv_heads * args.head_dim, args.head_dim)
        plain = args.window is None and not args.softcap and args.head_dim in (64, 128)
        halves = args.dtype.itemsize == 2 and args.kv_dtype == args.dtype
        if not (self.copies and self.on.capability == 90 and contiguous and plain and halves and self.page % PIECE == 0):
            return None
        constants = {
            "HEADS": args.heads, "GROUP": self.group, "DIM": args.head_dim, "Q_STRIDE": self.shared["Q_STRIDE"], "PAGE": self.page,
            "SCALE": args.scale, "STAGES": STAGES,
        }  # fmt: skip
        return Launcher(prefill_hopper_kernel, constants, num_warps=4, pdl=True)

    def _flat_descriptors(self, kv: KVPages) -> tuple[Any, Any]:
        """Tensor maps of K and V as [blocks * page, heads * dim] with boxes of one piece of one head."""
        key = (kv.k.data_ptr(), 0)
        made = self._descriptors.get(key)
        if made is None:
            blocks, page, heads, dim = kv.k.shape
            shape, strides, box = [blocks * page, heads * dim], [heads * dim, 1], [PIECE, dim]
            shared = page_layout(dim, kv.k.dtype)
            made = tuple(SharedTensorDescriptor(pages, shape, strides, box, shared) for pages in (kv.k, kv.v))
            self._descriptors[key] = made
        return made

    def plan_launcher(self, rows: int, *, shared: bool = False) -> Launcher:
        padded = next(size for size in (64, 256, 1024, MAX_ROWS) if size >= rows)
        if (padded, shared) not in self._plan:
            constants = {
                "ROWS": padded, "TILE": self.decode_tiles.tile, "WINDOW": self.args.window or 0, "SHARED": shared,
                "ITEMS": PLAN_ITEMS, "PDL": self.on.tensor_copies,
            }  # fmt: skip
            self._plan[padded, shared] = Launcher(plan_kernel, constants, num_warps=8, pdl=self.on.tensor_copies)
        return self._plan[padded, shared]

    def descriptors(self, kv: KVPages, tile: int) -> tuple[Any, Any]:
        """Tensor maps of K and V as [blocks, heads, page, dim], or (None, None) where tiles are read through pointers."""
        if not self.copied(tile):
            return None, None
        key = (kv.k.data_ptr(), tile)
        made = self._descriptors.get(key)
        if made is None:
            blocks, page, heads, dim = kv.k.shape
            shape = [blocks, heads, page, dim]
            strides = [self.strides[0], self.strides[2], self.strides[1], 1]
            box = [1, 1, tile, self.dim_pad]
            made = TensorDescriptor(kv.k, shape, strides, box), TensorDescriptor(kv.v, shape, strides, box)
            self._descriptors[key] = made
        return made

    def split(self, batch: AttentionBatch, rows: int) -> tuple[Split, bool]:
        """Items, first items of rows, and room for partial results, made once a step and kept in `batch.scratch`; and whether they are new.

        While a graph is captured the plan must be part of it, so one made before does not serve.
        """
        device = batch.seq_lens.device
        captured = capturing(device)
        tile, window = self.decode_tiles.tile, self.args.window
        splits: dict[tuple, Split] = batch.scratch.setdefault("triton.splits", {})
        shared = self.cascades(batch)
        key = (captured, rows, tile, window, self.wanted, self.args.heads, self.dim_pad, shared)
        made = splits.get(key)
        new = made is None
        if made is None:
            wanted = max(self.wanted, rows)
            capacity = 2 * wanted + rows
            items = torch.empty((capacity, ITEM_FIELDS), dtype=torch.int32, device=device)
            starts = torch.empty(rows + 1, dtype=torch.int32, device=device)
            partial = torch.empty((capacity, self.args.heads, self.dim_pad), dtype=torch.float32, device=device)
            stats = torch.empty((capacity, self.args.heads, 2), dtype=torch.float32, device=device)
            grid = (triton.cdiv(capacity, PLAN_ITEMS), 1, 1)
            length = batch.shared_len if shared else batch.seq_lens
            self.plan_launcher(rows, shared=shared)(grid, batch.seq_lens, items, starts, length, rows, wanted, capacity)
            made = splits[key] = (items, starts, partial, stats, capacity)
        return made, new

    def cascades(self, batch: AttentionBatch) -> bool:
        """The rows share a prefix whose keys are read once for all of them; a window has no use for it."""
        return batch.shared_len is not None and self.args.window is None

    def decode(self, q: torch.Tensor, kv: KVPages, batch: AttentionBatch, rows: int, out: torch.Tensor) -> None:
        (items, starts, partial, stats, capacity), new = self.split(batch, rows)
        splits, shared_partial, shared_stats = 0, partial, stats
        shared = self.cascades(batch)
        if shared:
            splits, shared_partial, shared_stats = self.prefix.attend(q, kv, batch, rows, serial=new)
        self.decode_launcher(shared=shared)(
            (self.args.kv_heads, capacity, 1),
            q, kv.k, kv.v, batch.block_table, items, partial, stats, shared_partial, shared_stats, out,
            batch.block_table.stride(0), rows, splits, serial=new and not shared,
        )  # fmt: skip
        programs, merge = self.combine_launcher(rows, shared=shared)
        merge((rows, programs, 1), partial, stats, starts, shared_partial, shared_stats, out, rows, splits)

    def specialises(self, batch: AttentionBatch, tokens: int) -> bool:
        """The warp-specialised kernel pays for long prompts, and for shorter ones behind long prefixes where they fill the card."""
        fills = tokens // QUERIES * self.args.heads >= 4 * self.on.multiprocessors
        return batch.max_query_len > MEDIUM or (fills and batch.max_query_len >= QUERIES and batch.max_seq_len >= LONG_KEYS)

    def prompt_grid(self, batch: AttentionBatch, queries: int, rows: int) -> tuple[tuple[int, int, int], int]:
        """Programs of `queries` queries each for `rows` rows, and how many heads of a row are computed abreast."""
        keys, crowded = batch.prompt_keys, rows * self.args.heads > MOST_DEEP
        abreast = self.args.heads if keys <= ABREAST_KEYS or crowded else 1
        return (abreast, triton.cdiv(batch.max_query_len, queries), rows * self.args.heads // abreast), abreast

    def prefill(self, q: torch.Tensor, kv: KVPages, batch: AttentionBatch, first_row: int, out: torch.Tensor) -> None:
        rows = batch.seq_lens.shape[0] - first_row
        if self.hopper is not None and self.specialises(batch, q.shape[0]):
            k_desc, v_desc = self._flat_descriptors(kv)
            grid, abreast = self.prompt_grid(batch, QUERIES, rows)
            self.hopper(
                grid, q, k_desc, v_desc, batch.block_table, batch.query_start, batch.seq_lens, out, batch.block_table.stride(0), first_row,
                abreast,
            )  # fmt: skip
            return
        tiles, launch = self.prefill_launcher(short=batch.max_query_len <= MEDIUM)
        k_desc, v_desc = self.descriptors(kv, tiles.tile)
        grid, abreast = self.prompt_grid(batch, tiles.queries, rows)
        launch(
            grid, q, kv.k, kv.v, k_desc, v_desc, batch.block_table, batch.query_start, batch.seq_lens, out,
            batch.block_table.stride(0), first_row, abreast,
        )  # fmt: skip


def attention_reasons(args: AttentionArgs) -> list[str]:
    """Why these kernels cannot serve `args`."""
    reasons = []
    if args.heads % args.kv_heads:
        reasons.append(f"{args.heads} heads are not a multiple of {args.kv_heads} key heads")
    if args.head_dim > 256:
        reasons.append(f"head size {args.head_dim} is over 256")
    if args.block_size not in PAGES:
        reasons.append(f"block size {args.block_size} is not one of {', '.join(map(str, PAGES))}")
    if args.scale <= 0:
        reasons.append(f"scale {args.scale} is not positive")
    return reasons


def bind_paged_attention(args: AttentionArgs, *, tensor_copies: bool | None = None) -> Kernel:
    """`tensor_copies` False keeps Hopper's copy engine out; None uses it where the card has it."""
    on = target()
    copies = on.tensor_copies if tensor_copies is None else tensor_copies
    layouts: dict[tuple[int, ...], Layout] = {}

    def paged_attention(q: torch.Tensor, kv: KVPages, batch: AttentionBatch) -> torch.Tensor:
        strides = kv.k.stride()
        key = (q.stride(0), kv.k.shape[1], *strides)
        layout = layouts.get(key)
        if layout is None:
            assert kv.v.stride() == strides and strides[3] == 1, "keys and values must have the same strides and contiguous heads"
            assert q.stride(2) == 1 and (q.stride(1) == args.head_dim or args.heads == 1), "query heads must be contiguous"
            layout = layouts[key] = Layout(args, on, q.stride(0), kv.k.shape[1], strides, tensor_copies=copies)
        out = torch.empty((q.shape[0], args.heads * args.head_dim), dtype=q.dtype, device=q.device)
        rows, decodes = batch.seq_lens.shape[0], batch.num_decodes
        if decodes:
            layout.decode(q, kv, batch, decodes, out)
        if decodes < rows:
            layout.prefill(q, kv, batch, decodes, out)
        return out

    return paged_attention
