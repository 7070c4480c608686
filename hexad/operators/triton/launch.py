"""Launching Triton kernels: what the current card can do, and a launcher that skips Triton's Python binder after the first call.

Triton's own `kernel[grid](...)` binds and specialises every argument on each call, which costs 20 µs and more of host time; an eager
prefill of a small prompt is bound by that. A `Launcher` has all specialising arguments fixed as constants, so from its second call on
it hands raw pointers to the compiled kernel.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

INTERPRETED = bool(knobs.runtime.interpret)  # kernels run in Triton's interpreter, on CPU tensors

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Target:
    """What kernels are compiled for. `capability` is 80, 89, 90 ...; 0 in the interpreter."""

    capability: int
    multiprocessors: int
    name: str

    @property
    def tensor_copies(self) -> bool:
        """The bulk tensor copy engine (TMA) and programmatic dependent launch exist."""
        return self.capability >= 90


@cache
def target() -> Target:
    """The current card. HEXAD_TRITON_ARCH=80 keeps kernels off newer instructions, to test the paths of older cards."""
    if INTERPRETED or not torch.cuda.is_available():
        return Target(0, 132, "interpreter")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = properties.major * 10 + properties.minor
    forced = os.environ.get("HEXAD_TRITON_ARCH")
    return Target(min(capability, int(forced)) if forced else capability, properties.multi_processor_count, properties.name)


def pow2(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


class Launcher:
    """One kernel with fixed constants.

    Runtime arguments come first in the kernel's signature, constants (tl.constexpr) after them, in the order of `constants`. Integer
    arguments must be declared with `do_not_specialize` and stay below 2^31; tensors keep the dtype of the first call. The current
    device must be the tensors' device, and `pdl` kernels must wait for their predecessors before they touch what those write or read.
    """

    __slots__ = ("_constants", "_kernel", "_options", "_ready", "_values")

    def __init__(self, kernel: Any, constants: dict[str, Any], *, num_warps: int = 4, num_stages: int = 1, pdl: bool = False) -> None:
        self._kernel = kernel
        self._constants = constants
        self._values = tuple(constants.values())
        self._options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": pdl}
        self._ready: dict[int, CompiledKernel] = {}  # by device

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        raw, bits = [], 0
        for argument in args:
            if isinstance(argument, torch.Tensor):
                argument = argument.data_ptr()
                bits |= argument
            raw.append(argument)
        if INTERPRETED:
            self._kernel[grid](*args, **self._constants)
            return
        device = torch.cuda.current_device()
        compiled = self._ready.get(device)
        if compiled is None or bits & 15 or knobs.runtime.launch_enter_hook is not None:
            compiled = self._kernel[grid](*args, **self._constants, **self._options)
            if not bits & 15:
                self._ready[device] = compiled
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled.run(
            grid[0], grid[1], grid[2], stream, compiled.function, compiled.packed_metadata, None, None, None, *raw, *self._values
        )  # fmt: skip

    def compile(self, types: list[str], capability: int) -> CompiledKernel:
        """Compile for a card that need not be here. `types` are Triton's names for the runtime arguments ("*bf16", "i32",
        "tensordesc<bf16[64, 128]>", "constexpr" for None); pointers are taken to be aligned."""
        names = list(self._kernel.arg_names)
        signature = dict(zip(names, types + ["constexpr"] * len(self._constants), strict=True))
        absent = {name: None for name, kind in zip(names, types, strict=False) if kind == "constexpr"}
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")}
        source = ASTSource(self._kernel, signature, constexprs=absent | self._constants, attrs=aligned)
        options = self._options | {"launch_pdl": self._options["launch_pdl"] and capability >= 90}
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
