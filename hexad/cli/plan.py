"""`hexad plan`: what fits on a device and how fast it could be, from config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hexad.bench import planning
from hexad.bench.facts import read_facts
from hexad.bench.loads import find_load
from hexad.common.errors import ConfigError, StartupError
from hexad.hardware.registry import Device, find_device
from hexad.models.served import MAX_DEVICES
from hexad.orchestration.decide import CPU_KV_CAP_BYTES, CPU_KV_SHARE

app = typer.Typer(add_completion=False, help="Capacity and speed limits of a model on a device, from its config.json alone.")


def resolve_device(name: str) -> Device:
    """A registered device, or this machine, measured."""
    if name.lower() != "here":
        return find_device(name)
    from hexad.hardware.measure import measure_device

    return measure_device()


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="a folder, a .gguf file, a source (hf:, pypi:) or a shape such as llama-3.1-8b")],
    device: Annotated[str, typer.Option(help="H200, A100, L40S, RTX-4090, ..., or 'here' to measure this machine")] = "here",
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", "-tp", help="devices that share the model")] = 1,
    context: Annotated[int, typer.Option(help="tokens of a sequence")] = 4096,
    concurrency: Annotated[int | None, typer.Option(min=1, help="sequences at once (default: as many as fit, at most 256)")] = None,
    quantization: Annotated[str | None, typer.Option(help="weight format (default: the checkpoint's own)")] = None,
    dtype: Annotated[str | None, typer.Option(help="as --quantization, for unquantised formats")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, bfloat16, fp8, int8, ...")] = "auto",
    gpu_memory_utilization: Annotated[float, typer.Option(min=0.01, max=1, help="share of the device's memory that may be used")] = 0.9,
    target_load: Annotated[str | None, typer.Option(help="requests/s:input tokens:output tokens; says how many replicas it takes")] = None,
    efficiency: Annotated[
        float, typer.Option(min=0.01, max=1, help="--target-load: share of the floor that is reached")
    ] = planning.DEFAULT_EFFICIENCY,
    load: Annotated[list[str] | None, typer.Option(help="print the floors of these standard loads (W1 to W9)")] = None,
    against: Annotated[Path | None, typer.Option(help="a result of `hexad bench`: compare it with its floors")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Weights, KV, sequences that fit, the roofline of prefill and decode, replicas, and which formats would fit."""
    try:
        result = json.loads(against.read_text()) if against else None
        names = list(load or []) + ([result["load"]["name"]] if result and not load else [])
        spec, stored = read_facts(model)
        made = planning.make_plan(
            planning.PlanRequest(
                spec=spec,
                stored_format=stored,
                device=resolve_device(device),
                tp=tensor_parallel_size,
                context=context,
                concurrency=concurrency,
                weight_format=quantization or dtype,
                kv_dtype=kv_cache_dtype,
                utilization=gpu_memory_utilization,
                target=planning.Target.parse(target_load) if target_load else None,
                efficiency=efficiency,
                loads=tuple(_load_of(name, result) for name in names),
            )
        )
        if result is not None:
            made["against"] = planning.compare_with_result(result, made.get("loads", {}).get(result["load"]["name"], {}))
    except (OSError, KeyError, json.JSONDecodeError) as error:
        typer.echo(f"{against} is not a result of `hexad bench`: {error}", err=True)
        raise typer.Exit(2) from None
    except StartupError as error:
        typer.echo(error.message, err=True)
        raise typer.Exit(error.exit_code) from None
    if as_json:
        typer.echo(json.dumps(made, indent=1))
    else:
        _print(made)


def _load_of(name: str, result: dict[str, Any] | None) -> Any:
    load = find_load(name)
    if result is None or result["load"]["name"] != load.name:
        return load
    numbers = {key: value for key, value in result["load"].items() if key != "name"}
    if not isinstance(numbers.get("input_tokens", []), list):
        raise ConfigError("the result's load has no list of input_tokens")
    return load.scaled(**numbers)


def _print(made: dict[str, Any]) -> None:
    from rich.markup import escape

    from hexad.cli.columns import Column, print_table
    from hexad.cli.columns import console as make_console

    console = make_console()
    weights, kv, memory = made["weights"], made["kv"], made["memory"]
    size = planning.format_bytes
    device = made["device"]
    what = f"[bold]{escape(made['model'])}[/] on {made['tp']} x [bold]{escape(device['name'])}[/]"
    console.print(f"{what}: {made['parameters'] / 1e9:.2f} B parameters")
    for label in ("memory_bytes", "read_bytes_s"):
        figure = device[label]
        console.print(f"  {label} {figure['value'] / 1e9:,.0f} GB{'/s' if label.endswith('_s') else ''}  [dim]{figure['source']}[/]")
    unserved = "" if weights["served"] else f" [red](this version does not serve it there: {weights['served_note']})[/]"
    console.print(f"  weights {size(weights['bytes_per_rank'])} a rank as {weights['format']}{unserved}")
    console.print(f"  KV {size(kv['bytes_per_token_per_rank'])} a token and rank as {kv['dtype']}, {size(memory['kv_bytes'])} of room")
    if device["kind"] == "cpu":
        console.print(
            f"  (`hexad serve` takes {CPU_KV_SHARE:.0%} of free memory for KV, at most {CPU_KV_CAP_BYTES // 2**30} GiB, "
            "unless --kv-cache-memory-bytes says more)"
        )
    fit = made["sequences"]
    console.print(f"  {fit['fit']:,} sequences of {made['context']:,} tokens fit ({fit['tokens']:,} tokens)")
    if not made["fits"]:
        later = " (not served yet)"
        formats = [row["format"] + ("" if row["served"] else later) for row in made["formats"] if row["fits"]]
        split = made["tp_that_fits"]
        devices = f"{split}{later if split > MAX_DEVICES else ''}" if split else "none"
        wanted = made["concurrency"]
        lack = f"{wanted:,} sequences of {made['context']:,} tokens do not fit" if wanted and fit["fit"] else "does not fit"
        console.print(f"  [red]{lack}[/]; formats that would: {', '.join(formats) or 'none'}; devices that would: {devices}")
    if "prefill" in made:
        names = ("step", "ms", "tok/s", "bound by", "weights", "compute", "KV", "attention", "link")
        rows = []
        for row in [{"what": f"prefill {made['prefill']['tokens']}", **made["prefill"]}] + [
            {"what": f"decode x{row['batch']}", **row} for row in made["decode"]
        ]:
            parts = [f"{row[f'{part}_ms']:.3f}" for part in ("weights", "compute", "kv", "attention", "link")]
            rows.append([row["what"], f"{row['ms']:.3f}", f"{row['tok_s']:,.0f}", row["binds"], *parts])
        print_table([Column(name, text=name in ("step", "bound by")) for name in names], rows, console)
    _print_formats(console, made["formats"])
    for name, floors in made.get("loads", {}).items():
        console.print(f"  floor of {name}: {_flat(floors)}")
    for row in made.get("against", []):
        console.print(f"  {row['metric']}: measured {row['measured']:,.3f}, floor {row['floor']:,.3f}: at {row['share_of_floor']:.0%}")
    if "replicas" in made:
        _print_replicas(console, made["replicas"])


def _print_formats(console: Any, rows: list[dict[str, Any]]) -> None:
    from hexad.cli.columns import Column, print_table

    headings = ("format", "a rank", "fits", "sequences", "decode x1, ms", "served")
    cells = []
    reasons: dict[str, list[str]] = {}
    for row in rows:
        fits, served = ("yes" if row[key] else "no" for key in ("fits", "served"))
        size = planning.format_bytes(row["bytes_per_rank"])
        cells.append([row["format"], size, fits, f"{row['sequences']:,}", f"{row['decode_ms']:.2f}", served])
        if not row["served"]:
            reasons.setdefault(row["served_note"], []).append(row["format"])
    print_table([Column(name, text=name in ("format", "fits", "served")) for name in headings], cells, console)
    for reason, names in reasons.items():
        console.print(f"  not served there by this version: {', '.join(names)}: {reason}")


def _print_replicas(console: Any, r: dict[str, Any]) -> None:
    if r["needed"] is None:
        console.print(f"  replicas: {r['reason']}")
        return
    console.print(
        f"  replicas: {r['needed']} ({r['devices']} devices) at {r['efficiency']:.0%} of the floor, "
        f"{r['requests_s_per_replica']:.2f} requests/s each at batch {r['batch']}; {r['needed_at_floor']} at the floor itself"
    )


def _flat(floors: dict[str, Any]) -> str:
    parts = []
    for name, value in floors.items():
        text = ", ".join(f"{k}: {v:,.2f}" for k, v in value.items()) if isinstance(value, dict) else f"{value:,.2f}"
        parts.append(f"{name} {text}")
    return "; ".join(parts)
