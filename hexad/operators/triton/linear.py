"""`linear` and its composites on NVIDIA GPUs: own kernels for a few rows, the library's GEMM for more, chosen per number of rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton

from hexad.operators.args import ActArgs, LinearArgs, NormArgs
from hexad.operators.fused import FusedLinearArgs, Prepared
from hexad.operators.registry import Kernel
from hexad.operators.triton.gemv import gemv_kernel, skinny_kernel
from hexad.operators.triton.launch import Launcher, target
from hexad.operators.triton.rows import bind_gated_act, bind_rms_norm
from hexad.operators.triton.tuning import BUCKETS, LIBRARY, Choice, bucket, choose


class Product:
    """One layer's product for any number of rows; None from `few` means that the library should do it."""

    def __init__(self, args: FusedLinearArgs, op: str, forced: Choice | None = None) -> None:
        self.args, self.op = args, op
        self.gated = args.activation != ""
        self.out = args.out_features // 2 if self.gated else args.out_features
        self.on = target()
        device = self.on.name
        self.choices = {rows: forced or choose(device, op, args.out_features, args.in_features, rows) for rows in BUCKETS}
        self.launchers: dict[tuple[int, int], tuple[tuple[int, int, int], Launcher]] = {}

    def few(self, x: torch.Tensor, prepared: Prepared, norm: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor | None:
        """The product by an own kernel, or None."""
        rows = x.shape[0]
        size = bucket(rows)
        if size is None or rows == 0 or self.choices[size] is LIBRARY or self.choices[size].kind == "library":
            return None
        choice, stride = self.choices[size], x.stride(0)
        found = self.launchers.get((size, stride))
        if found is None:
            found = self.launchers[size, stride] = self._make(choice, stride, norm is not None, residual is not None)
        grid, launch = found
        weight, bias = prepared
        out = residual if residual is not None else torch.empty((rows, self.out), dtype=x.dtype, device=x.device)
        bound = (x, weight, x if bias is None else bias, x if norm is None else norm, x if residual is None else residual, out)
        if choice.kind == "gemv":
            launch(grid, *bound)
        else:
            launch(grid, *bound, rows)
        return out

    def _make(self, choice: Choice, stride: int, norm: bool, residual: bool) -> tuple[tuple[int, int, int], Launcher]:
        constants: dict[str, Any] = {"OUT": self.out, "IN": self.args.in_features}
        if choice.kind == "skinny":
            constants |= {"X_STRIDE": stride, "BLOCK_M": choice.block_m}
        constants |= {"BLOCK_N": choice.block_n, "BLOCK_K": choice.block_k}
        if choice.kind == "skinny":
            constants |= {"STAGES": choice.stages}
        constants |= {
            "NORM": norm, "EPS": self.args.eps, "ACTIVATION": self.args.activation, "RESIDUAL": residual,
            "BIAS": self.args.bias, "PDL": self.on.tensor_copies,
        }  # fmt: skip
        kernel = gemv_kernel if choice.kind == "gemv" else skinny_kernel
        launcher = Launcher(kernel, constants, num_warps=choice.warps, num_stages=choice.stages, pdl=self.on.tensor_copies)
        return (triton.cdiv(self.out, choice.block_n), 1, 1), launcher


def bind_linear(args: LinearArgs) -> Kernel:
    product = Product(FusedLinearArgs(args.in_features, args.out_features, args.bias, args.dtype, args.device_type), "linear")

    def linear(x: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        out = product.few(x, prepared, None, None)
        return F.linear(x, prepared[0], prepared[1]) if out is None else out

    return linear


def bind_norm_linear(args: FusedLinearArgs) -> Kernel:
    product = Product(args, "norm_linear")
    norm = bind_rms_norm(NormArgs(args.in_features, args.eps, args.dtype, args.device_type))

    def norm_linear(h: torch.Tensor, norm_weight: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        out = product.few(h, prepared, norm_weight, None)
        return F.linear(norm(h, norm_weight), prepared[0], prepared[1]) if out is None else out

    return norm_linear


def bind_norm_gated_linear(args: FusedLinearArgs) -> Kernel:
    product = Product(args, "norm_gated_linear")
    norm = bind_rms_norm(NormArgs(args.in_features, args.eps, args.dtype, args.device_type))
    act = bind_gated_act(ActArgs(args.out_features // 2, args.activation, args.dtype, args.device_type))

    def norm_gated_linear(h: torch.Tensor, norm_weight: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        out = product.few(h, prepared, norm_weight, None)
        if out is None:
            out = act(F.linear(norm(h, norm_weight), prepared[0], prepared[1]))
        return out

    return norm_gated_linear


def bind_linear_add(args: FusedLinearArgs) -> Kernel:
    product = Product(args, "linear_add")

    def linear_add(x: torch.Tensor, residual: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        if product.few(x, prepared, None, residual) is None:
            weight, bias = prepared
            residual.addmm_(x, weight.t())
            if bias is not None:
                residual.add_(bias)
        return residual

    return linear_add
