"""Products of a few rows with a weight matrix [out, in]: as fast as the weights can be read.

`gemv_kernel` serves one row on the plain units, `skinny_kernel` up to 16 rows on the matrix units; both can take RMSNorm before the
product (the row is scaled after it, so that one pass over the row gives both sums), and a gated activation or a residual addition after
it. The first weight tile is read before the predecessor is done: weights do not depend on it.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hexad.operators.triton.device import prefetch
from hexad.operators.triton.rows import activate


@triton.jit
def prefetch_rows(w_ptr, n, first, OUT: tl.constexpr, IN: tl.constexpr, COLUMNS: tl.constexpr):
    """Ask for COLUMNS columns of rows `n`, from column `first` on, in the L2 (two bytes a number, lines of 128 bytes)."""
    row = tl.minimum(n, OUT - 1).to(tl.int64)
    column = tl.minimum(first + tl.arange(0, COLUMNS // 64) * 64, IN - 1)
    prefetch(w_ptr + row[:, None] * IN + column[None, :])


@triton.jit
def gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    OUT: tl.constexpr,  # outputs: half the rows of the weight when GATED
    IN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "": not gated
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    PREFETCH: tl.constexpr,  # columns after the first tile to ask for before the predecessor is done
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
        if PREFETCH > 0:
            prefetch_rows(w_ptr, n, BLOCK_K, OUT, IN, PREFETCH)
            if GATED:
                prefetch_rows(w_ptr + OUT * IN, n, BLOCK_K, OUT, IN, PREFETCH)
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if GATED:
        up_acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, IN, BLOCK_K):
        column_mask = start + k < IN
        x = tl.load(x_ptr + start + k, mask=column_mask, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            up_acc += up.to(tl.float32) * x[None, :]
        ahead = inside[:, None] & (start + BLOCK_K + k < IN)[None, :]
        w = tl.load(address + start + BLOCK_K, mask=ahead, other=0.0, eviction_policy="evict_first")
        if GATED:
            up = tl.load(up_address + start + BLOCK_K, mask=ahead, other=0.0, eviction_policy="evict_first")
    y = tl.sum(acc, 1)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        z = tl.sum(up_acc, 1)
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
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    PREFETCH: tl.constexpr,  # columns to ask for before the predecessor is done
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of all rows a program."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    GATED: tl.constexpr = ACTIVATION != ""
    inside = n < OUT
    if PDL:
        if PREFETCH > 0:
            prefetch_rows(w_ptr, n, 0, OUT, IN, PREFETCH)
            if GATED:
                prefetch_rows(w_ptr + OUT * IN, n, 0, OUT, IN, PREFETCH)
        gdc_wait()
        gdc_launch_dependents()
    x_address = x_ptr + m[:, None] * X_STRIDE + k[None, :]
    w_address = w_ptr + n.to(tl.int64)[:, None] * IN + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
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
        acc = tl.dot(x, w.T, acc)
        if GATED:
            up_acc = tl.dot(x, up.T, up_acc)
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


@triton.jit(do_not_specialize=["rows"])
def stream_kernel(
    x_ptr,
    w_ptr,
    w_desc,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    OUT: tl.constexpr,  # outputs: half the rows of the weight when GATED
    IN: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,  # programs that share the inputs of one block of outputs; over 1: float32 partial sums [SPLIT, rows, OUT]
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    TENSOR_COPY: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of all rows, over IN / SPLIT inputs, a program. BLOCK_K divides IN / SPLIT and BLOCK_N divides OUT."""
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    SHARE: tl.constexpr = IN // SPLIT
    GATED: tl.constexpr = ACTIVATION != ""
    low = tl.program_id(1) * SHARE
    if PDL:
        if PREFETCH > 0:
            prefetch_rows(w_ptr, n, low, OUT, IN, PREFETCH)
            if GATED:
                prefetch_rows(w_ptr + OUT * IN, n, low, OUT, IN, PREFETCH)
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if GATED:
        up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_address = x_ptr + m[:, None] * X_STRIDE + k[None, :]
    w_address = w_ptr + n.to(tl.int64)[:, None] * IN + k[None, :]
    for start in tl.range(low, low + SHARE, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_address + start, mask=(m < rows)[:, None], other=0.0)
        if TENSOR_COPY:
            w = w_desc.load([first, start])
        else:
            w = tl.load(w_address + start)
        acc = tl.dot(w, x.T, acc)
        if GATED:
            if TENSOR_COPY:
                up = w_desc.load([OUT + first, start])
            else:
                up = tl.load(w_address + OUT * IN + start)
            up_acc = tl.dot(up, x.T, up_acc)
    mask = (m < rows)[:, None]
    if SPLIT > 1:  # bias and residual are added by `finish_kernel`
        line = (tl.program_id(1) * rows + m) * OUT
        tl.store(out_ptr + line[:, None] + n[None, :], acc.T, mask=mask)
    else:
        if BIAS:
            acc += tl.load(bias_ptr + n).to(tl.float32)[:, None]
            if GATED:
                up_acc += tl.load(bias_ptr + OUT + n).to(tl.float32)[:, None]
        if GATED:
            acc = activate(acc, ACTIVATION) * up_acc
        y = acc.T
        place = (m * OUT)[:, None] + n[None, :]
        if RESIDUAL:
            y += tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def finish_kernel(
    partial_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    OUT: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum of the partial products of one row, BLOCK outputs a program."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < OUT
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(partial_ptr + (part * rows + row) * OUT + n, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual_ptr + row * OUT + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * OUT + n, total.to(out_ptr.dtype.element_ty), mask=inside)
