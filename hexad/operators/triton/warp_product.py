"""Products of up to 16 rows with a weight matrix, in Gluon: weights go from memory straight into the matrix units' registers.

The warps of a program share the inputs between them and add their sums at the end, so that many small programs keep many reads in flight
and none passes weights through shared memory. A thread reads eight consecutive weights at once; the matrix units see the inputs in an
order that fits this, the same for both operands.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


@gluon.jit
def activated(x, ACTIVATION: gl.constexpr):
    """The named activation of float32 values."""
    if ACTIVATION == "silu":
        y = x / (1.0 + gl.exp(-x))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + gl.exp(-2.0 * inner))
    else:
        y = gl.maximum(x, 0.0)
    return y


@gluon.jit(do_not_specialize=["rows"])
def warp_product_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    OUT: gl.constexpr,  # outputs: half the rows of the weight when gated
    IN: gl.constexpr,
    X_STRIDE: gl.constexpr,
    BLOCK_M: gl.constexpr,  # rows of x: 8 or 16
    BLOCK_N: gl.constexpr,  # outputs of a program: a multiple of 16
    STEP: gl.constexpr,  # inputs a warp takes at once: a multiple of 32
    WARPS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    RESIDUAL: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """BLOCK_N outputs of all rows a program. WARPS * STEP divides IN and BLOCK_N divides OUT."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUM, k_width=8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=SUM, k_width=8)
    GATED: gl.constexpr = ACTIVATION != ""
    first = gl.program_id(0) * BLOCK_N
    warp_l = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None, None]
    n_l = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))[None, :, None]
    k_l = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))[None, None, :]
    w_address = w_ptr + n_l.to(gl.int64) * IN + (warp_l * STEP + k_l)
    warp_r = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))[:, None, None]
    k_r = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))[None, :, None]
    m_r = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))[None, None, :]
    x_address = x_ptr + m_r * X_STRIDE + (warp_r * STEP + k_r)
    x_mask = (m_r < rows) & (k_r < STEP) & (warp_r < WARPS)
    w = gl.load(w_address, eviction_policy="evict_first")
    if GATED:
        up = gl.load(w_address + OUT * IN, eviction_policy="evict_first")
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
    x = gl.load(x_address, mask=x_mask, other=0.0)
    acc = gl.zeros([WARPS, BLOCK_N, BLOCK_M], gl.float32, SUM)
    if GATED:
        up_acc = gl.zeros([WARPS, BLOCK_N, BLOCK_M], gl.float32, SUM)
    for start in range(WARPS * STEP, IN, WARPS * STEP):
        next_w = gl.load(w_address + start, eviction_policy="evict_first")
        if GATED:
            next_up = gl.load(w_address + (OUT * IN + start), eviction_policy="evict_first")
        next_x = gl.load(x_address + start, mask=x_mask, other=0.0)
        acc = mma_v2(w, x, acc)
        if GATED:
            up_acc = mma_v2(up, x, up_acc)
            up = next_up
        w = next_w
        x = next_x
    acc = mma_v2(w, x, acc)
    y = gl.sum(acc, 0)
    FLAT: gl.constexpr = gl.SliceLayout(0, SUM)
    n = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, FLAT))
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, FLAT))
    if BIAS:
        y += gl.load(bias_ptr + n).to(gl.float32)[:, None]
    if GATED:
        up_acc = mma_v2(up, x, up_acc)
        z = gl.sum(up_acc, 0)
        if BIAS:
            z += gl.load(bias_ptr + OUT + n).to(gl.float32)[:, None]
        y = activated(y, ACTIVATION) * z
    place = m[None, :] * OUT + n[:, None]
    mask = (m < rows)[None, :] & (n < OUT)[:, None]
    if RESIDUAL:
        y += gl.load(residual_ptr + place, mask=mask, other=0.0).to(gl.float32)
    gl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=mask)
