"""Launching Triton kernels: what the current card can do, and a launcher that skips Triton's Python binder after the first call.

Triton's own `kernel[grid](...)` binds and specialises every argument on each call, which costs 20 µs and more of host time; an eager
prefill of a small prompt is bound by that. A `Launcher` has all specialising arguments fixed as constants, so from its second call on
it hands raw pointers to the compiled kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource

from hexad.operators.triton.assumed import compile_for_older

INTERPRETED = bool(knobs.runtime.interpret)  # kernels run in Triton's interpreter, on CPU tensors

# the launch function of a compiled kernel is not a public interface: use it only where it is known
_DIRECT = not INTERPRETED and triton.__version__.split(".")[:2] == ["3", "6"]


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


Grid = tuple[int, int, int]
Gather = Callable[["Launcher", Grid, tuple[Any, ...]], None]
_assumed: tuple[Target, Gather] | None = None


def target() -> Target:
    """The current card, or the one that is assumed."""
    return _current() if _assumed is None else _assumed[0]


@contextmanager
def assuming(on: Target, gather: Gather) -> Iterator[None]:
    """While this lasts kernels are bound for `on`, and `gather` gets what would be launched. For the whole process."""
    global _assumed, _DIRECT
    assert _assumed is None, "one card at a time"
    before, _assumed, _DIRECT = _DIRECT, (on, gather), False
    try:
        yield
    finally:
        _assumed, _DIRECT = None, before


def capturing(device: torch.device) -> bool:
    """The current stream is being captured into a graph."""
    return device.type == "cuda" and _assumed is None and torch.cuda.is_current_stream_capturing()


@cache
def _current() -> Target:
    """HEXAD_TRITON_ARCH=80 runs the code of that older card, to test it."""
    if INTERPRETED or not torch.cuda.is_available():
        return Target(0, 4, "interpreter")  # few programs: they run one after another
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = properties.major * 10 + properties.minor
    return Target(_forced() or capability, properties.multi_processor_count, properties.name)


def _forced() -> int | None:
    """The older card whose code is asked for."""
    return int(os.environ.get("HEXAD_TRITON_ARCH", "0")) or None


def pow2(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


class Launcher:
    """One kernel with fixed constants.

    Runtime arguments come first in the kernel's signature, constants (tl.constexpr) after them, in the order of `constants`. Integer
    arguments must be declared with `do_not_specialize` and stay below 2^31; tensors keep the dtype of the first call. The current
    device must be the tensors' device. `max_registers` bounds a thread's registers, so that several programs share a multiprocessor.

    With `pdl` (programmatic dependent launch) programs may start before the kernel before them is done: until `gdc_wait` they may touch
    only what no kernel still running can write. Kernels here wait in every program, so waiting is transitive.
    """

    __slots__ = ("_constants", "_kernel", "_options", "_ready", "_values", "pdl")

    @property
    def name(self) -> str:
        return str(self._kernel.__name__)

    @property
    def variant(self) -> tuple[Any, ...]:
        """What tells its compiled code from that of other launchers, runtime arguments aside."""
        return id(self._kernel), tuple(self._constants.items()), tuple(self._options.items())

    def __init__(
        self,
        kernel: Any,
        constants: dict[str, Any],
        *,
        num_warps: int = 4,
        num_stages: int = 1,
        pdl: bool = False,
        max_registers: int | None = None,
    ) -> None:
        self._kernel = kernel
        self._constants = constants
        self._values = tuple(constants.values())
        self._options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": pdl}
        if max_registers is not None:
            self._options["maxnreg"] = max_registers
        self.pdl = pdl
        self._ready: dict[Any, tuple[Any, Any, Any]] = {}  # (device, misaligned arguments) -> launch, function, metadata

    def __call__(self, grid: Grid, *args: Any, serial: bool = False) -> None:
        """Launch on the current stream. `serial` keeps this launch from starting before its predecessor is done."""
        if not _DIRECT:
            if _assumed is not None:
                _assumed[1](self, grid, args)
                return
            options = self._options | {"launch_pdl": self.pdl and not serial}
            self._kernel[grid](*args, **self._constants, **({} if INTERPRETED else options))
            return
        raw, bits = [], 0
        for argument in args:
            if argument.__class__ is torch.Tensor:
                argument = argument.data_ptr()
                bits |= argument
            raw.append(argument)
        device = torch._C._cuda_getDevice()
        key = device if not bits & 15 else (device, _misaligned(args))
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = self._load(grid, args)
        launch, function, metadata = ready
        stream = torch._C._cuda_getCurrentRawStream(device)
        pdl = self.pdl and not serial
        launch(*grid, stream, function, False, pdl, None, None, metadata, None, None, None, *raw, *self._values)

    def _load(self, grid: Grid, args: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """Compile (or find in Triton's cache) the variant for these arguments and load it on the current device."""
        forced = _forced()
        if forced is None:
            compiled = self.compile_for(grid, args)
        else:
            major, minor = torch.cuda.get_device_capability()
            compiled = compile_for_older(self._kernel, args, self._constants | self._options, forced, 10 * major + minor)
        launcher = compiled.run  # loads the module
        assert not launcher.global_scratch_size and not launcher.profile_scratch_size, "kernels here need no scratch memory"
        return launcher.launch, compiled.function, compiled.packed_metadata

    def compile_for(self, grid: Grid, args: tuple[Any, ...]) -> CompiledKernel:
        """The variant for these arguments, from Triton's cache or compiled."""
        made: CompiledKernel = self._kernel.warmup(*args, grid=grid, **self._constants, **self._options)
        return made

    def compile(self, types: list[str], capability: int) -> CompiledKernel:
        """Compile for a card that need not be here. `types` are Triton's names for the runtime arguments ("*bf16", "i32",
        "tensordesc<bf16[64, 128]>", "constexpr" for None); pointers are taken to be aligned."""
        names = list(self._kernel.arg_names)
        signature = dict(zip(names, types + ["constexpr"] * len(self._constants), strict=True))
        absent = {name: None for name, kind in zip(names, types, strict=False) if kind == "constexpr"}
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")}
        make = GluonASTSource if self._kernel.is_gluon() else ASTSource
        source = make(self._kernel, signature, constexprs=absent | self._constants, attrs=aligned)
        options = self._options | {"launch_pdl": self._options["launch_pdl"] and capability >= 90}
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _misaligned(args: tuple[Any, ...]) -> tuple[bool, ...]:
    """Which tensors do not start at a multiple of 16 bytes: Triton compiles a variant for them."""
    return tuple(isinstance(argument, torch.Tensor) and bool(argument.data_ptr() & 15) for argument in args)
