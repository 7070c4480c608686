"""Compiling kernels ahead of their use, for a card that need not be here: Triton's cache is filled with what the card would look up.

Operators are bound for the assumed card and called on tensors without memory (device "meta"); every launch is noted instead of made, and
each distinct one is then compiled through the same path as at run time, so that the cache keys are the same.
"""

from __future__ import annotations

import hashlib
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.build import _build, platform_key
from triton.runtime.cache import get_cache_manager

from hexad.common.errors import HexadError
from hexad.operators.registry import registry
from hexad.operators.triton.assumed import AssumedDriver
from hexad.operators.triton.launch import Grid, Launcher, Target, assuming

STUB_VERSION = ["3", "6"]  # what a launch stub is, is not a public interface: build them only where it is known


@dataclass(frozen=True)
class Job:
    """One kernel variant to compile."""

    launcher: Launcher
    grid: Grid
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Done:
    """What became of a job. `cached`: it was in the cache already."""

    name: str
    cached: bool
    seconds: float


@contextmanager
def gathering(on: Target) -> Iterator[dict[tuple[Any, ...], Job]]:
    """While this lasts, operators on "meta" tensors are those of card `on`; the jobs that their calls need are in the result."""
    jobs: dict[tuple[Any, ...], Job] = {}

    def gather(launcher: Launcher, grid: Grid, args: tuple[Any, ...]) -> None:
        jobs.setdefault((launcher.variant, *map(_kind, args)), Job(launcher, grid, args))

    bind, explain = _on_card(registry.bind), _on_card(registry.explain)  # composites are explained before they are bound
    with assuming(on, gather), patch.object(registry, "bind", bind), patch.object(registry, "explain", explain):
        yield jobs


def _on_card(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain(op, args, prefer)` of the registry, for tensors on "meta" as if they were on the card."""

    def ask(op: str, args: Any, prefer: Any = None) -> Any:
        on_card = replace(args, device_type="cuda") if getattr(args, "device_type", "") == "meta" else args
        return plain(op, on_card, prefer)

    return ask


def _kind(argument: Any) -> Any:
    """What a runtime argument is specialised on."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, int):
        return "int"
    if argument is None:
        return None
    return argument.base.dtype, tuple(argument.block_shape), repr(getattr(argument, "layout", ""))  # a tensor map


def compile_jobs(jobs: list[Job], capability: int, heard: Callable[[int, Done], None]) -> list[Done]:
    """Compile what the cache lacks; `heard(index, done)` after each."""
    made = []
    hits: list[bool] = []
    with (
        patch.object(driver, "_active", AssumedDriver(capability)),
        _listening(lambda **news: hits.append(bool(news["cache_hit"]))),
        _Stubs() as stubs,
    ):
        for index, job in enumerate(jobs):
            hits.clear()
            begin = time.perf_counter()
            try:
                compiled = job.launcher.compile_for(job.grid, job.args)
                stubs.add(compiled)
            except Exception as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise HexadError(f"kernel {job.launcher.name} does not compile for sm_{capability}: {reason}") from error
            done = Done(job.launcher.name, all(hits), time.perf_counter() - begin)
            made.append(done)
            heard(index, done)
    return made


def cache_folder() -> str:
    """Where Triton keeps what it compiled."""
    return str(knobs.cache.dir)


@contextmanager
def _listening(listener: Callable[..., None]) -> Iterator[None]:
    before, knobs.compilation.listener = knobs.compilation.listener, listener
    try:
        yield
    finally:
        knobs.compilation.listener = before


class _Stubs:
    """Builds the C function that launches a kernel with its signature, which Triton otherwise builds at the first launch.

    It is linked against an empty library with the driver's name: at run time the driver's own is loaded. Some compilers leave out libraries
    that give nothing (Ubuntu's, for one), so they are told not to.
    """

    def __enter__(self) -> _Stubs:
        self._folder = tempfile.TemporaryDirectory(prefix="hexad-stubs-")
        self._usable = triton.__version__.split(".")[:2] == STUB_VERSION and self._empty_driver()
        if self._usable:
            source = Path(nvidia.dirname, "driver.c").read_text()
            self._keep(source, "cuda_utils", [], nvidia.include_dirs, nvidia.libraries)
        return self

    def __exit__(self, *_error: object) -> None:
        self._folder.cleanup()

    def add(self, compiled: CompiledKernel) -> None:
        if not self._usable:
            return
        with patch.object(nvidia, "compile_module_from_src", self._keep), patch.object(nvidia, "library_dirs", list):
            nvidia.CudaLauncher(compiled.src, compiled.metadata)

    def _empty_driver(self) -> bool:
        """False without a C compiler: then the stubs wait for the first launch."""
        library = Path(self._folder.name, "libcuda.so.1")
        command = ["cc", "-shared", "-o", str(library), "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null"]
        try:
            return subprocess.run(command, capture_output=True).returncode == 0
        except OSError:
            return False

    def _keep(self, src: str, name: str, library_dirs: list[str], include_dirs: list[str], libraries: list[str]) -> SimpleNamespace:
        """As Triton's own, without loading the result: there may be no driver to load it with."""
        cache = get_cache_manager(hashlib.sha256((src + platform_key()).encode()).hexdigest())
        file = f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        if cache.get_file(file) is None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, f"{name}.c")
                path.write_text(src)
                flags = ["-Wl,--no-as-needed", f"-L{self._folder.name}", *(f"-l:{library}" for library in libraries)]
                built = _build(name, str(path), folder, library_dirs, include_dirs, [], flags)
                cache.put(Path(built).read_bytes(), file, binary=True)
        return SimpleNamespace(launch=None)
