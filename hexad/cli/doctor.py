"""`hexad doctor`: what this machine is, what it can do, what is missing and the command that mends it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from hexad.hardware.checks import FAIL, Finding, run_checks
from hexad.hardware.machine import Machine, read_machine

app = typer.Typer(add_completion=False, help="Check this machine, and with --measure find its ceilings.")

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@app.command()
def doctor(
    measure: Annotated[bool, typer.Option("--measure", help="measure memory bandwidth and matrix products (some seconds)")] = False,
    device: Annotated[str, typer.Option(help="with --measure: auto, cpu, cuda")] = "auto",
    seconds: Annotated[float, typer.Option(min=0.01, help="with --measure: seconds a figure")] = 0.6,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Exit code 1 when something will not work."""
    machine = read_machine()
    findings = run_checks(machine)
    ceilings = measure_ceilings(device, seconds) if measure else {}
    if as_json:
        typer.echo(json.dumps({"machine": machine.as_dict(), "checks": [asdict(f) for f in findings], "measured": ceilings}, indent=1))
    else:
        _print(machine, findings, ceilings)
    if any(finding.status == FAIL for finding in findings):
        raise typer.Exit(1)


def measure_ceilings(device: str, seconds: float) -> dict[str, Any]:
    """Calibration of the processors and, when there is one, of the GPU; by device."""
    import torch

    from hexad.hardware.devices import resolve_device
    from hexad.hardware.measure import calibrate, cpu_read_bytes_s

    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])] if device == "auto" else [str(resolve_device(device))]
    found = {kind: calibrate(kind, seconds) for kind in kinds}
    if "cpu" in found:
        cores = read_machine().processor.cores
        steps = sorted({1, cores, *(2**i for i in range(1, 8) if 2**i < cores)})
        found["cpu"]["read_bytes_s_by_threads"] = {str(n): cpu_read_bytes_s(n, seconds) for n in steps}
    return found


def _print(machine: Machine, findings: list[Finding], ceilings: dict[str, Any]) -> None:
    from rich.text import Text

    from hexad.cli.columns import Column, print_table
    from hexad.cli.columns import console as make_console

    console = make_console()
    processor = machine.processor
    console.print(f"{machine.operating_system}, Python {machine.python}")
    console.print(f"{processor.name}: {processor.cores} cores, {processor.memory_bytes / 2**30:.1f} GiB")
    for gpu in machine.gpus:
        console.print(f"GPU {gpu.index}: {gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB, {gpu.sm_clock_mhz} of {gpu.sm_clock_max_mhz} MHz")
    names = ["check", "status", "detail", *(["to mend it"] if any(f.fix for f in findings) else [])]
    rows = [[f.name, Text(f.status, style=_COLOURS[f.status]), f.detail, f.fix or ""][: len(names)] for f in findings]
    print_table([Column(name, text=True) for name in names], rows, console)
    if ceilings:
        from hexad.hardware.measure import describe_rates

        for kind, measured in ceilings.items():
            console.print(f"[bold]{kind}[/] ({measured['device']})")
            for line in describe_rates(measured):
                console.print(f"  {line}")
