"""`hexad warm`: fill the caches of compiled kernels before the first start, for instance while an image is built."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hexad.cli.flags import Settings, with_config
from hexad.common.config import HexadConfig
from hexad.common.errors import ConfigError, HexadError

if TYPE_CHECKING:
    from hexad.compose import OpenedModel
    from hexad.hardware.machine import Machine
    from hexad.operators.triton.ahead import Done
    from hexad.operators.triton.launch import Target

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

OLDEST_ARCH = 80


def _warm(
    *,
    settings: Settings,
    arch: Annotated[str | None, typer.Option("--arch", metavar="sm_NN", help="A card that is not here: sm_80, sm_89, sm_90, ...")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Compile every kernel that an engine with these options uses on this device, or on the one that --arch names.

    Kernels that are in the caches already are left alone. No weights are read and no GPU memory is taken. Give the options of the later
    `hexad serve`: the number format and the block size change what is compiled.
    """
    from hexad import compose
    from hexad.bench.shapes import resolve_model
    from hexad.hardware.machine import read_machine
    from hexad.orchestration.decide import resolve

    capability = parse_arch(arch) if arch is not None else None
    config = settings.config.with_values({"model.model": resolve_model(settings.config.model.model)})
    opened = compose.open_model(config)
    machine = read_machine() if capability is None else _assumed(read_machine(), capability)
    config, _decisions = resolve(config, opened.spec, machine)
    if config.device.device == "cpu":
        if capability is not None:
            raise ConfigError("--arch names a card, but --device is cpu: leave one of them out")
        _native(quiet)
    else:
        _kernels(config, opened, capability, quiet)


def parse_arch(text: str) -> int:
    """ "sm_90", "sm90", "9.0" or "90" -> 90.

    Raises:
        ConfigError: not a compute capability, or one that the kernels do not support.
    """
    digits = text.lower().removeprefix("sm").removeprefix("_").removesuffix("a").replace(".", "")
    if not digits.isdigit() or len(digits) not in (2, 3):
        raise ConfigError(f"--arch is {text!r}: write sm_80, sm_89 or sm_90")
    if int(digits) < OLDEST_ARCH:
        raise ConfigError(f"--arch is {text!r}: the kernels need sm_{OLDEST_ARCH} or newer")
    return int(digits)


def _assumed(machine: Machine, capability: int) -> Machine:
    """This machine, as if it had a card of that kind."""
    from hexad.hardware.machine import Gpu

    return replace(machine, gpus=(Gpu(0, f"sm_{capability}", 0, 0, None, None, None, None, None),))


def _native(quiet: bool) -> None:
    """Build the CPU's library.

    Raises:
        HexadError: it cannot be built.
    """
    from hexad.operators.native.library import probe

    if os.environ.get("HEXAD_NATIVE_ISA") == "off":
        print("nothing to compile: HEXAD_NATIVE_ISA is off, so torch's own operators serve")
        return
    if not quiet:
        print("native operators for this CPU ...", file=sys.stderr, flush=True)
    started = time.time()
    library, reason = probe()
    if library is None:
        raise HexadError(f"{reason}; install g++ or clang++ (or name one in CXX), then try again: without them torch's own operators serve")
    path = Path(library.handle._name)
    what = f"built in {time.time() - started:.1f} s" if path.stat().st_mtime >= started else "in the cache already"
    print(f"native operators ({library.isa}): {what}; {path}")


def _kernels(config: HexadConfig, opened: OpenedModel, capability: int | None, quiet: bool) -> None:
    """Compile the GPU's kernels, for each card that they were tuned on."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("Triton is not installed, so there are no kernels to compile: pip install triton")
    from hexad.engine.warm import run_steps
    from hexad.operators.triton import ahead

    started = time.perf_counter()
    assert opened.path is not None
    jobs: dict[tuple[object, ...], ahead.Job] = {}
    targets = _targets(capability)
    for on in targets:
        with ahead.gathering(on) as found:
            run_steps(config, opened.spec, opened.path)
        jobs |= found
    arch = targets[0].capability
    made = ahead.compile_jobs(list(jobs.values()), arch, lambda index, done: None if quiet else _tell(index, len(jobs), done))
    compiled = [done for done in made if not done.cached]
    print(
        f"{len(made)} kernels for sm_{arch} ({', '.join(on.name for on in targets)}): {len(compiled)} compiled, "
        f"{len(made) - len(compiled)} in the cache already; {time.perf_counter() - started:.1f} s; {ahead.cache_folder()}"
    )


def _targets(capability: int | None) -> list[Target]:
    """The card here, or any card of `capability` and those of that kind that have a tuning table of their own."""
    from hexad.operators.triton import launch, tuning

    if capability is None:
        here = launch.target()
        if not here.capability:
            raise ConfigError("torch sees no CUDA device here, though the driver has one: name the card with --arch, for instance sm_90")
        return [here]
    return [launch.Target(capability, 132, name) for name in ("any card", *tuning.tuned_cards(capability))]


def _tell(index: int, count: int, done: Done) -> None:
    state = "in the cache" if done.cached else f"{done.seconds:.1f} s"
    print(f"[{index + 1}/{count}] {done.name}: {state}", file=sys.stderr, flush=True)


app.command("warm")(with_config(_warm))
