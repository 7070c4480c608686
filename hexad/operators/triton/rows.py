"""Row operators: RMSNorm, residual addition with RMSNorm, and gated activations. One pass over memory each."""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hexad.operators.args import ActArgs, NormArgs
from hexad.operators.registry import Kernel
from hexad.operators.triton.launch import Launcher, pow2, target


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The named activation of float32 values."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-2.0 * inner))  # 0.5 (1 + tanh z) = sigmoid(2 z)
    else:
        y = tl.maximum(x, 0.0)
    return y


@triton.jit
def wait_predecessor(EARLY: tl.constexpr):
    """Wait for the kernel before and let the one after start: with EARLY at once, so that products read their weights meanwhile."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    else:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    X_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row a program. With ADD the row is residual + x, which also becomes the residual."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)  # a parameter: may be read before the predecessor is done
    if PDL:
        wait_predecessor(EARLY)
    x = tl.load(x_ptr + row * X_STRIDE + column, mask=inside, other=0.0)
    if ADD:
        total = tl.load(residual_ptr + row * HIDDEN + column, mask=inside, other=0.0).to(tl.float32) + x.to(tl.float32)
        x = total.to(x_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * HIDDEN + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + EPS)
    normed = (wide * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HIDDEN + column, normed * weight, mask=inside)


@triton.jit
def gated_act_kernel(
    gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr
):
    """act(gate) * up over BLOCK features of one row; gate is the first half of the row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    if PDL:
        wait_predecessor(EARLY)
    base = gate_up_ptr + row * 2 * WIDTH + column
    gate = tl.load(base, mask=inside, other=0.0)
    up = tl.load(base + WIDTH, mask=inside, other=0.0)
    active = activate(gate.to(tl.float32), ACTIVATION).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + column, active * up, mask=inside)


def _norm_warps(block: int) -> int:
    return max(1, min(16, block // 512))


EARLY_ROWS = 16  # up to here a row operator is a fraction of a wave, and what follows may start beside it


class _RowNorm:
    """Launchers of one norm by the row stride of its input and by whether there are few rows."""

    def __init__(self, args: NormArgs, *, add: bool, pdl: bool) -> None:
        self.args, self.add, self.pdl = args, add, pdl
        self.block = pow2(args.hidden)
        self.launchers: dict[tuple[int, bool], Launcher] = {}

    def get(self, stride: int, rows: int) -> Launcher:
        key = stride, rows <= EARLY_ROWS
        launcher = self.launchers.get(key)
        if launcher is None:
            constants = {
                "X_STRIDE": stride, "HIDDEN": self.args.hidden, "BLOCK": self.block,
                "EPS": self.args.eps, "ADD": self.add, "EARLY": key[1], "PDL": self.pdl,
            }  # fmt: skip
            launcher = Launcher(rms_norm_kernel, constants, num_warps=_norm_warps(self.block), pdl=self.pdl)
            self.launchers[key] = launcher
        return launcher


def bind_rms_norm(args: NormArgs) -> Kernel:
    norms = _RowNorm(args, add=False, pdl=target().tensor_copies)

    def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.shape[0]:
            norms.get(x.stride(0), x.shape[0])((x.shape[0], 1, 1), x, x, weight, out)
        return out

    return rms_norm


def bind_add_rms_norm(args: NormArgs) -> Kernel:
    norms = _RowNorm(args, add=True, pdl=target().tensor_copies)

    def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.shape[0]:
            norms.get(x.stride(0), x.shape[0])((x.shape[0], 1, 1), x, residual, weight, out)
        return out, residual

    return add_rms_norm


def bind_gated_act(args: ActArgs) -> Kernel:
    width = args.intermediate
    block = min(1024, pow2(width))
    pdl = target().tensor_copies

    def launcher(early: bool) -> Launcher:
        constants = {"WIDTH": width, "BLOCK": block, "ACTIVATION": args.activation, "EARLY": early, "PDL": pdl}
        return Launcher(gated_act_kernel, constants, num_warps=4, pdl=pdl)

    few, many = launcher(True), launcher(False)
    blocks = triton.cdiv(width, block)

    def gated_act(gate_up: torch.Tensor) -> torch.Tensor:
        rows = gate_up.shape[0]
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
        if rows:
            (few if rows <= EARLY_ROWS else many)((rows, blocks, 1), gate_up, out)
        return out

    return gated_act
