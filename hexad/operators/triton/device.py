"""Small device functions that several kernels share."""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(address):
    """Ask for the lines that hold `address` in the L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
