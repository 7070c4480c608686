"""Compiling as if another card were here, and running an older card's code on a newer one."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver


class AssumedDriver:
    """Triton's view of a card that need not be here."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return -self.capability  # no real device: what is compiled here is not taken for its kernels

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compile_for_older(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], arch: int, capability: int) -> CompiledKernel:
    """`kernel` as compiled for compute capability `arch`, its PTX assembled for the newer card here: to test the code of older cards."""
    with patch.object(driver, "_active", AssumedDriver(arch)):
        compiled: CompiledKernel = kernel.warmup(*args, grid=(1, 1, 1), **options)
    compiled.kernel = assemble(compiled.asm["ptx"], capability)
    return compiled


def assemble(ptx: str, capability: int) -> bytes:
    """Machine code of a card that is at least as new as the PTX's target."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        suffix = "a" if capability >= 90 else ""
        command = [knobs.nvidia.ptxas.path, f"--gpu-name=sm_{capability}{suffix}", str(source), "-o", str(target)]
        subprocess.run(command, check=True, capture_output=True)
        return target.read_bytes()
