"""`hexad bench`: measure an engine in this process or behind an address, compare, and draw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hexad.bench import analysis
from hexad.bench.command import (
    BatchOption,
    CalibrationOption,
    ConcurrencyOption,
    DurationOption,
    EngineOption,
    InputOption,
    JsonOption,
    KeyOption,
    LoadOption,
    ModelOption,
    NameOption,
    OutputOption,
    PrefixOption,
    ProfileOption,
    QuietOption,
    RepeatsOption,
    RequestsOption,
    SeedOption,
    UrlOption,
    chosen_model,
    engine_options,
    guarded,
)
from hexad.common.errors import ConfigError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure speed, memory and accuracy; compare and draw results.")


def run_loads(
    kind: str,
    default_loads: list[str],
    model: str | None,
    loads: list[str] | None,
    path: Path | None,
    *,
    scaling: dict[str, Any],
    target: dict[str, Any],
    options: dict[str, Any],
    calibration_s: float,
    quiet: bool,
) -> None:
    """The body of every command that runs loads."""
    from hexad.bench.ceilings import note
    from hexad.bench.loads import find_load
    from hexad.bench.runs import Options
    from hexad.bench.session import Session, Target, served_default

    def body() -> None:
        if model is None and target["base_url"] is not None:
            name = served_default(target["base_url"], target["served_model_name"], target["api_key"], quiet=quiet)
        else:
            name = chosen_model(model, quiet)
        if "W6" in [wanted.upper() for wanted in loads or ()]:
            raise ConfigError("W6 is the start of an engine: `hexad bench startup` measures it, these loads are run: W1 to W5, W7 to W9")
        chosen = [find_load(wanted).scaled(**scaling) for wanted in loads or default_loads]
        for load in chosen:
            for key, why in load.fixed.items():
                if scaling.get(key) is not None:
                    note(f"{load.name} {why}: --{'requests' if key == 'requests' else 'output-len'} leaves it as it is", quiet)
        ignored = sorted(set(target["options"]) - {"device", "dtype", "quantization", "kv_cache_dtype"})
        if target["base_url"] is not None and ignored:
            note(f"the server at --base-url has options of its own: {', '.join(ignored)} change nothing there", quiet)
        session = Session(Target(name, **target), Options(**options), calibration_s, quiet, kind)
        made = session.run(chosen, path)
        for result in made:
            show(result)

    guarded(body)


def show(result: dict[str, Any]) -> None:
    """The result for people, on stdout."""
    from hexad.bench.compare import flatten
    from hexad.cli.columns import number

    typer.echo(f"{result['load']['name']} {result['model']} {result['format']} on {result['device'].get('name')}")
    shares = {row["metric"].replace("[", ".").rstrip("]"): row["share_of_floor"] for row in result.get("against_floors", [])}
    for name, value in flatten(result["metrics"]).items():
        if name.startswith("serving.") or name.split(".")[-1] in ("std", "p90", "p95"):
            continue
        share = f"   at {shares[name]:.0%} of the floor" if name in shares else ""
        typer.echo(f"  {name:<36} {number(value):>16}{share}")
    for flag in result["flags"]:
        typer.echo(f"  ! {flag}")


@app.command()
def offline(
    model: ModelOption = None,
    load: LoadOption = None,
    json_path: JsonOption = None,
    duration_s: DurationOption = None,
    requests: RequestsOption = None,
    input_len: InputOption = None,
    output_len: OutputOption = None,
    prefix_len: PrefixOption = None,
    base_url: UrlOption = None,
    served_model_name: NameOption = None,
    api_key: KeyOption = None,
    option: EngineOption = None,
    profile: ProfileOption = None,
    seed: SeedOption = 0,
    calibration_s: CalibrationOption = 0.3,
    quiet: QuietOption = False,
) -> None:
    """Throughput with every request submitted at once (W1, W4, W5, W8; default W1)."""
    scaling = {"requests": requests, "input_tokens": input_len, "output_tokens": output_len, "shared_prefix_tokens": prefix_len}
    run_loads(
        "offline", ["W1"], model, load, json_path, scaling=scaling,
        target=_target(option, profile, base_url, served_model_name, api_key),
        options={"duration_s": duration_s, "seed": seed}, calibration_s=calibration_s, quiet=quiet,
    )  # fmt: skip


@app.command()
def latency(
    model: ModelOption = None,
    load: LoadOption = None,
    json_path: JsonOption = None,
    duration_s: DurationOption = None,
    requests: RequestsOption = None,
    input_len: InputOption = None,
    output_len: OutputOption = None,
    batch: BatchOption = None,
    repeats: RepeatsOption = 3,
    base_url: UrlOption = None,
    served_model_name: NameOption = None,
    api_key: KeyOption = None,
    option: EngineOption = None,
    profile: ProfileOption = None,
    seed: SeedOption = 0,
    calibration_s: CalibrationOption = 0.3,
    quiet: QuietOption = False,
) -> None:
    """Prefill and decode apart: a single stream (W2), prefill (W3), decode steps by batch (W7); default W2."""
    scaling = {"requests": requests, "input_tokens": input_len, "output_tokens": output_len, "batch": batch}
    run_loads(
        "latency", ["W2"], model, load, json_path, scaling=scaling,
        target=_target(option, profile, base_url, served_model_name, api_key),
        options={"duration_s": duration_s, "seed": seed, "repeats": repeats}, calibration_s=calibration_s, quiet=quiet,
    )  # fmt: skip


@app.command()
def serve(
    model: ModelOption = None,
    load: LoadOption = None,
    json_path: JsonOption = None,
    duration_s: DurationOption = None,
    requests: RequestsOption = None,
    input_len: InputOption = None,
    output_len: OutputOption = None,
    concurrency: ConcurrencyOption = None,
    request_rate: Annotated[float | None, typer.Option(min=0.001, help="requests a second at random (Poisson), no closed loop")] = None,
    goodput: Annotated[list[str] | None, typer.Option(help="A limit of good requests, ms (repeatable): ttft:1000, tpot:50 ...")] = None,
    base_url: UrlOption = None,
    served_model_name: NameOption = None,
    api_key: KeyOption = None,
    spawn: Annotated[bool, typer.Option("--spawn", help="start `hexad serve` here, measure it, then the engine in this process")] = False,
    clients: Annotated[int | None, typer.Option(min=1, help="client processes (default: one for 128 streams)")] = None,
    extra_body: Annotated[str | None, typer.Option(help="JSON object merged into every request")] = None,
    option: EngineOption = None,
    profile: ProfileOption = None,
    seed: SeedOption = 0,
    calibration_s: CalibrationOption = 0.3,
    quiet: QuietOption = False,
) -> None:
    """A closed loop of streams (W9) against --base-url, against a server of its own (--spawn), or in this process (neither)."""
    scaling = {"requests": requests, "input_tokens": input_len, "output_tokens": output_len, "concurrency": concurrency}

    def options() -> dict[str, Any]:
        from hexad.bench.records import parse_slo

        return {"duration_s": duration_s, "seed": seed, "request_rate": request_rate, "slo": parse_slo(goodput or [])}

    target = _target(option, profile, base_url, served_model_name, api_key) | {
        "clients": clients,
        "extra_body": _json_object(extra_body),
        "spawn": spawn,
    }
    run_loads(
        "serve", ["W9"], model, load, json_path, scaling=scaling, target=target, options=guarded(options),
        calibration_s=calibration_s, quiet=quiet,
    )  # fmt: skip


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="a result file")],
    second: Annotated[Path, typer.Argument(help="a result file of the same load, model, format and device")],
    force: Annotated[bool, typer.Option(help="compare runs that differ, all the same")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Ratios of two results; refuses runs that are not alike."""
    from hexad.bench import compare as comparing
    from hexad.bench.results import load_result

    a, b = guarded(lambda: load_result(first)), guarded(lambda: load_result(second))
    unlike = comparing.differences(a, b)
    if unlike and not force:
        typer.echo("unlike runs: their ratios would not say which is faster (--force prints them all the same)", err=True)
        for line in unlike:
            typer.echo(f"  {line}", err=True)
        raise typer.Exit(2)
    rows = comparing.ratios(a, b)
    if as_json:
        typer.echo(json.dumps({"unlike": unlike, "rows": rows}, indent=1))
        return
    from hexad.cli.columns import Column, number, print_table

    words = {True: "better", False: "worse", None: ""}
    shown = [row for row in rows if not row["metric"].startswith("serving.")]
    cells = [[row["metric"], number(row["first"]), number(row["second"]), f"{row['ratio']:.3f}x{words[row['better']]:>7}"] for row in shown]
    print_table([Column("metric", text=True), *(Column(name) for name in ("first", "second", "ratio"))], cells)
    if not shown:
        typer.echo("no number is in both")


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="result files")],
    out: Annotated[Path, typer.Option(help="folder for the PNGs")] = Path("."),
) -> None:
    """Draw throughput and latency against concurrency or batch, and before/after bars, as PNG."""
    from hexad.bench.report import draw
    from hexad.bench.results import load_results

    def body() -> None:
        for path in draw(load_results(files), out):
            typer.echo(str(path))

    guarded(body)


@app.command()
def table(
    files: Annotated[list[Path], typer.Argument(help="result files")],
    update: Annotated[Path | None, typer.Option(help="a Markdown file: put the table between its results marks")] = None,
) -> None:
    """Print a Markdown table: measured, floor, and how near it comes."""
    from hexad.bench.results import load_results
    from hexad.bench.tables import insert, markdown

    def body() -> None:
        made = markdown(load_results(files))
        if update is None:
            typer.echo(made)
        else:
            update.write_text(insert(update.read_text(), made))

    guarded(body)


def _target(option: list[str] | None, profile: str | None, base_url: str | None, name: str | None, key: str | None) -> dict[str, Any]:
    return {"options": guarded(lambda: engine_options(option, profile)), "base_url": base_url, "served_model_name": name, "api_key": key}


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        typer.echo(f"--extra-body is {text!r}: give a JSON object", err=True)
        raise typer.Exit(2)
    return value


analysis.register(app)
