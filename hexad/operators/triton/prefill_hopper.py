"""Prefill attention for Hopper in Gluon, after FlashAttention-3 (Shah et al. 2024).

One producer warp brings keys and values through the bulk tensor copy engine; two consumer warpgroups of 64 queries each share them. A
consumer issues the scores of tile i + 1 before the weighted sum of tile i, so that its softmax runs beside the matrix units. Tiles of 128
keys are two pieces of 64 rows, each within one page; they are walked from the newest to the oldest, so that masked ones come first.

Pages must be multiples of 64 tokens and contiguous over heads and tokens; no window and no soft-cap (the general kernel has both).
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

PIECE = 64  # keys of one copy
QUERIES = 128
CONSUMER_WARPS = 4
