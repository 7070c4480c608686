"""`linear` and its composites on NVIDIA GPUs: own kernels for a few rows, the library's GEMM for more, chosen per number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from hexad.operators.args import ActArgs, LinearArgs
from hexad.operators.fused import FusedLinearArgs, Prepared
from hexad.operators.registry import Kernel
from hexad.operators.triton.blaslt import Multiply, chosen
from hexad.operators.triton.gemv import finish_kernel, gemv_kernel, skinny_kernel, stream_kernel
from hexad.operators.triton.launch import INTERPRETED, Launcher, target
from hexad.operators.triton.rows import bind_gated_act
from hexad.operators.triton.tuning import BUCKETS, Choice, bucket, choose
from hexad.operators.triton.warp_product import warp_product_kernel

Few = Callable[[torch.Tensor, Prepared, torch.Tensor | None], torch.Tensor]
FINISH_BLOCK = 1024


class Product:
    """One layer's product for any number of rows; None from `few` means that the library should do it."""

    def __init__(self, args: FusedLinearArgs, op: str, forced: Choice | None = None) -> None:
        self.args, self.op = args, op
        self.gated = args.activation != ""
        self.out = args.out_features // 2 if self.gated else args.out_features
        self.on = target()
        shape = args.out_features, args.in_features
        self.choices = {rows: forced or choose(self.on.name, op, *shape, rows, copies=self.on.tensor_copies) for rows in BUCKETS}
        self._made: dict[tuple[int, int], Few] = {}
        self._descriptors: dict[tuple[int, int, int], TensorDescriptor] = {}

    def few(self, x: torch.Tensor, prepared: Prepared, residual: torch.Tensor | None) -> torch.Tensor | None:
        """The product by an own kernel, or None."""
        size = bucket(x.shape[0])
        if size is None or self.choices[size].kind == "library" or not x.shape[0]:
            return None
        key = (size, x.stride(0))
        made = self._made.get(key)
        if made is None:
            choice = self.choices[size]
            make = {"gemv": self._gemv, "skinny": self._skinny, "warp": self._skinny, "stream": self._stream}[choice.kind]
            made = self._made[key] = make(choice, x.stride(0), residual is not None)
        return made(x, prepared, residual)

    def set_choice(self, size: int, choice: Choice) -> None:
        """Serve bucket `size` with `choice` from now on."""
        self.choices[size] = choice
        for key in [key for key in self._made if key[0] == size]:
            del self._made[key]
        self._descriptors.clear()

    def launcher(self, choice: Choice, stride: int, residual: bool) -> Launcher:
        """The kernel of `choice` for rows of `x` that are `stride` apart."""
        shape = {"OUT": self.out, "IN": self.args.in_features}
        tiles = {"BLOCK_N": choice.block_n, "BLOCK_K": choice.block_k}
        around = {"ACTIVATION": self.args.activation, "RESIDUAL": residual, "BIAS": self.args.bias}
        last = {"PREFETCH": choice.prefetch, "PDL": self.on.tensor_copies}
        many = {"X_STRIDE": stride, "BLOCK_M": choice.block_m}
        kernel: Any
        if choice.kind == "gemv":
            kernel, constants = gemv_kernel, shape | tiles | around | last
        elif choice.kind == "warp":
            assert self.out % choice.block_n == 0 and self.args.in_features % (choice.warps * choice.block_k) == 0, choice
            steps = {"BLOCK_N": choice.block_n, "STEP": choice.block_k, "WARPS": choice.warps}
            kernel, constants = warp_product_kernel, shape | many | steps | around | {"PDL": self.on.tensor_copies}
        elif choice.kind == "skinny":
            kernel, constants = skinny_kernel, shape | many | tiles | {"STAGES": choice.stages} | around | last
        else:
            middle = {"SPLIT": choice.split, "STAGES": choice.stages}
            copies = {"TENSOR_COPY": self.on.tensor_copies}
            kernel, constants = stream_kernel, shape | many | tiles | middle | around | copies | last
        return Launcher(kernel, constants, num_warps=choice.warps, num_stages=choice.stages, pdl=self.on.tensor_copies)

    def _new(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return residual if residual is not None else torch.empty((x.shape[0], self.out), dtype=x.dtype, device=x.device)

    def _gemv(self, choice: Choice, stride: int, residual: bool) -> Few:
        launch, grid = self.launcher(choice, stride, residual), (triton.cdiv(self.out, choice.block_n), 1, 1)

        def product(x: torch.Tensor, prepared: Prepared, added: torch.Tensor | None) -> torch.Tensor:
            out = self._new(x, added)
            launch(grid, x, prepared[0], _or(prepared[1], x), out, out)
            return out

        return product

    def _skinny(self, choice: Choice, stride: int, residual: bool) -> Few:
        launch, grid = self.launcher(choice, stride, residual), (triton.cdiv(self.out, choice.block_n), 1, 1)

        def product(x: torch.Tensor, prepared: Prepared, added: torch.Tensor | None) -> torch.Tensor:
            out = self._new(x, added)
            launch(grid, x, prepared[0], _or(prepared[1], x), out, out, x.shape[0])
            return out

        return product

    def _stream(self, choice: Choice, stride: int, residual: bool) -> Few:
        assert self.out % choice.block_n == 0 and self.args.in_features % (choice.split * choice.block_k) == 0, choice
        assert not (self.gated and choice.split > 1), "a gated product is not split"
        launch = self.launcher(choice, stride, residual)
        grid = (self.out // choice.block_n, choice.split, 1)
        around = {"BIAS": self.args.bias, "RESIDUAL": residual, "PDL": self.on.tensor_copies}
        constants = {"OUT": self.out, "SPLIT": choice.split, "BLOCK": FINISH_BLOCK, **around}
        finish = Launcher(finish_kernel, constants, pdl=self.on.tensor_copies)
        blocks = triton.cdiv(self.out, FINISH_BLOCK)

        def product(x: torch.Tensor, prepared: Prepared, added: torch.Tensor | None) -> torch.Tensor:
            out, rows, bias = self._new(x, added), x.shape[0], _or(prepared[1], x)
            whole = choice.split == 1
            parts = out if whole else torch.empty((choice.split, rows, self.out), dtype=torch.float32, device=x.device)
            launch(grid, x, prepared[0], self._descriptor(prepared[0], choice), bias, out, parts, rows)
            if not whole:
                finish((rows, blocks, 1), parts, bias, out, out, rows)
            return out

        return product

    def _descriptor(self, weight: torch.Tensor, choice: Choice) -> TensorDescriptor | None:
        if not self.on.tensor_copies or INTERPRETED:
            return None
        key = (weight.data_ptr(), choice.block_n, choice.block_k)  # a layer's choice differs between numbers of rows
        made = self._descriptors.get(key)
        if made is None:
            made = TensorDescriptor(weight, list(weight.shape), [weight.stride(0), 1], [choice.block_n, choice.block_k])
            self._descriptors[key] = made
        return made


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A pointer must be passed even where the kernel does not read it."""
    return other if tensor is None else tensor


def _many(args: LinearArgs | FusedLinearArgs, *, add: bool = False) -> Multiply | None:
    """The library's algorithm for many rows, where the table names one."""
    if args.bias or args.dtype != torch.bfloat16:
        return None
    return chosen(target().name, args.out_features, args.in_features, add=add)


def bind_linear(args: LinearArgs) -> Kernel:
    product = Product(FusedLinearArgs(args.in_features, args.out_features, args.bias, args.dtype, args.device_type), "linear")
    many = _many(args)

    def linear(x: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        out = product.few(x, prepared, None)
        if out is None and many is not None:
            out = many(x, prepared[0], None)
        return F.linear(x, prepared[0], prepared[1]) if out is None else out

    linear.product = product  # type: ignore[attr-defined]  # what tuning changes
    return linear


def bind_gated_linear(args: FusedLinearArgs) -> Kernel:
    product = Product(args, "gated_linear")
    linear = bind_linear(args.linear)
    act = bind_gated_act(ActArgs(args.out_features // 2, args.activation, args.dtype, args.device_type))

    def gated_linear(x: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        out = product.few(x, prepared, None)
        if out is None:
            out = act(linear(x, prepared))
        return out

    gated_linear.product = product  # type: ignore[attr-defined]  # what tuning changes
    return gated_linear


def bind_linear_add(args: FusedLinearArgs) -> Kernel:
    product = Product(args, "linear_add")
    many = _many(args, add=True)

    def linear_add(x: torch.Tensor, residual: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        if product.few(x, prepared, residual) is None:
            weight, bias = prepared
            if many is not None and many(x, weight, residual) is not None:
                return residual
            residual.addmm_(x, weight.t())
            if bias is not None:
                residual.add_(bias)
        return residual

    linear_add.product = product  # type: ignore[attr-defined]  # what tuning changes
    return linear_add
