"""Products of a few rows with a weight matrix [out, in]: as fast as the weights can be read.

`gemv_kernel` serves one row on the plain units, `skinny_kernel` up to 64 rows on the matrix units. Both can take RMSNorm before the
product (the row is scaled after it, so that one pass over the row gives both sums), and a gated activation or a residual addition after
it. The first weight tile is read before the predecessor is done: weights do not depend on it.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hexad.operators.triton.rows import activate


@triton.jit
def gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    OUT: tl.constexpr,  # outputs: half the rows of the weight when GATED
    IN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "": not gated
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs a program."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    GATED: tl.constexpr = ACTIVATION != ""
    inside = n < OUT
    address = w_ptr + n.to(tl.int64)[:, None] * IN + k[None, :]
    row_mask = inside[:, None] & (k < IN)[None, :]
    w = tl.load(address, mask=row_mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        up_address = address + OUT * IN
        up = tl.load(up_address, mask=row_mask, other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    square = tl.zeros([BLOCK_K], tl.float32)
    if GATED:
        up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, IN, BLOCK_K):
        column_mask = start + k < IN
        x = tl.load(x_ptr + start + k, mask=column_mask, other=0.0).to(tl.float32)
        if NORM:
            square += x * x
            x = x * tl.load(norm_ptr + start + k, mask=column_mask, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            up_acc += up.to(tl.float32) * x[None, :]
        ahead = inside[:, None] & (start + BLOCK_K + k < IN)[None, :]
        w = tl.load(address + start + BLOCK_K, mask=ahead, other=0.0, eviction_policy="evict_first")
        if GATED:
            up = tl.load(up_address + start + BLOCK_K, mask=ahead, other=0.0, eviction_policy="evict_first")
    y = tl.sum(acc, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(square, 0) / IN + EPS)
        y = y * scale
    if BIAS:
        y += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        z = tl.sum(up_acc, 1) * scale
        if BIAS:
            z += tl.load(bias_ptr + OUT + n, mask=inside, other=0.0).to(tl.float32)
        y = activate(y, ACTIVATION) * z
    if RESIDUAL:
        y += tl.load(residual_ptr + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def skinny_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of all rows a program."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    GATED: tl.constexpr = ACTIVATION != ""
    inside = n < OUT
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x_address = x_ptr + m[:, None] * X_STRIDE + k[None, :]
    w_address = w_ptr + n.to(tl.int64)[:, None] * IN + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    if GATED:
        up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
        if IN % BLOCK_K == 0:
            w_mask = inside[:, None]
            x_mask = (m < rows)[:, None]
        else:
            w_mask = inside[:, None] & (start + k < IN)[None, :]
            x_mask = (m < rows)[:, None] & (start + k < IN)[None, :]
        w = tl.load(w_address + start, mask=w_mask, other=0.0, eviction_policy="evict_first")
        if GATED:
            up = tl.load(w_address + OUT * IN + start, mask=w_mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_address + start, mask=x_mask, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            gain = tl.load(norm_ptr + start + k, mask=start + k < IN, other=0.0).to(tl.float32)
            x = (wide * gain[None, :]).to(x.dtype)
        acc = tl.dot(x, w.T, acc)
        if GATED:
            up_acc = tl.dot(x, up.T, up_acc)
    if NORM:
        scale = tl.rsqrt(square / IN + EPS)[:, None]
        acc = acc * scale
        if GATED:
            up_acc = up_acc * scale
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_acc += tl.load(bias_ptr + OUT + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = activate(acc, ACTIVATION) * up_acc
    mask = (m < rows)[:, None] & inside[None, :]
    target = m[:, None] * OUT + n[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=mask)
