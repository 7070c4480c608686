"""The commands of `hexad bench` that look inside: startup, kernels, accuracy, profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hexad.bench import results
from hexad.bench.command import CalibrationOption, EngineOption, JsonOption, ModelOption, QuietOption, chosen_model, engine_options, guarded
from hexad.common.errors import ConfigError
from hexad.hardware.machine import read_processor

KERNEL_DTYPES = ("float32", "bfloat16", "float16")
BatchesOption = Annotated[list[int] | None, typer.Option("--batch", min=1, help="batch sizes; may be repeated")]
# field of a row -> heading
_KERNELS = {
    "op": "operator", "label": "shape", "provider": "provider", "chosen": "chosen", "us": "us", "gb_s": "GB/s", "tflop_s": "TFLOP/s",
    "share": "of bound",
}  # fmt: skip
_PROFILE = {
    "op": "operator", "provider": "provider", "calls_per_step": "calls/step", "ms_per_step": "ms/step", "share_of_step": "of step",
    "mb_per_step": "MB/step", "share_of_bound": "of bound", "binds": "binds",
}  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the commands to `hexad bench`."""
    for command in (startup, kernels, accuracy, profile):
        app.command()(command)


def startup(
    model: ModelOption = None,
    json_path: JsonOption = None,
    option: EngineOption = None,
    warm_runs: Annotated[int, typer.Option(min=0, help="starts with warm caches; the median counts")] = 2,
    calibration_s: CalibrationOption = 0.3,
    quiet: QuietOption = False,
) -> None:
    """Process start to first token, caches of compiled kernels empty and warm (W6); for real files also the disk's own read rate."""

    def body() -> None:
        name = chosen_model(model, quiet)
        from hexad.bench.ceilings import calibrated_now, note
        from hexad.bench.facts import locate, read_facts
        from hexad.bench.loads import find_load
        from hexad.bench.shapes import is_shape
        from hexad.bench.startup import check_phases, disk_read_bytes_s, load_rates, measure_startup, weight_files

        options = engine_options(option)
        if is_shape(name):
            options.setdefault("load_format", "dummy")
        spec, stored = read_facts(name)
        path = locate(name)
        result = results.new_result("startup", find_load("W6"), spec.name, stored.name)
        results.begin(result, json_path)
        files = [] if options.get("load_format") == "dummy" else weight_files(path)
        if files:
            note("reading the files once", quiet)
        disk = disk_read_bytes_s(files)
        note(f"starting {1 + warm_runs} times", quiet)

        def keep(metrics: dict[str, Any]) -> None:
            result["metrics"] = metrics
            results.save(result, json_path)

        metrics = measure_startup(path, options, warm_runs=warm_runs, keep=keep)
        if disk is not None:
            metrics |= load_rates(metrics, sum(file.stat().st_size for file in files), disk)
        result["flags"] += check_phases(metrics)
        if calibration_s:  # last: a calibration holds memory that a start would miss
            result["calibration"] = calibrated_now(device_of(options), calibration_s)
            result["device"] = {"name": result["calibration"]["device"]}
        result["settings"] = {"warm_runs": warm_runs, "options": results.shown_options(options)}
        finish(result, metrics, json_path)
        for flag in result["flags"]:
            typer.echo(f"  ! {flag}")

    guarded(body)


def kernels(
    model: ModelOption = None,
    json_path: JsonOption = None,
    batch: BatchesOption = None,
    context: Annotated[list[int] | None, typer.Option(min=1, help="context lengths of attention; may be repeated")] = None,
    op: Annotated[list[str] | None, typer.Option(help="only these operators")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; default: the model's")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads")] = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="time spent on each case and provider")] = 0.2,
    calibration_s: CalibrationOption = 0.3,
    quiet: QuietOption = False,
) -> None:
    """Each operator's providers at the model's shapes: microseconds, bandwidth, and the share of the bound."""

    def body() -> None:
        name = chosen_model(model, quiet)
        import torch

        from hexad.bench.ceilings import calibrated_now, note
        from hexad.bench.facts import locate, read_facts
        from hexad.bench.kernels import measure_kernels
        from hexad.bench.session import calibrated_device
        from hexad.hardware.devices import resolve_device
        from hexad.operators.load import load_operators

        if threads:
            torch.set_num_threads(threads)
        spec, stored = read_facts(name)
        chosen = resolve_device(device)
        if dtype not in (None, *KERNEL_DTYPES):
            raise ConfigError(f"--dtype is {dtype!r}: use {', '.join(KERNEL_DTYPES)}")
        result = results.new_result("kernels", None, spec.name, stored.name)
        results.begin(result, json_path)
        note("calibrating", quiet)
        result["calibration"] = calibrated_now(str(chosen), max(calibration_s, 0.05))
        result["device"] = {"name": result["calibration"]["device"], "cores": read_processor().cores}
        batches, contexts = batch or [1, 8, 64, 256], context or [512, 2048]
        used = torch.get_num_threads() if chosen.type == "cpu" else None
        result["settings"] = {"dtype": dtype or spec.dtype, "threads": used, "batch": batches, "context": contexts}

        def keep(rows: list[dict[str, Any]]) -> None:
            row = rows[-1]
            note(f"{row['op']} {row['label']} {row['provider']}: {row['us']:.1f} us, {row['share']:.0%} of the bound", quiet)
            result["metrics"] = {"rows": rows}
            results.save(result, json_path)

        path = locate(name)
        for wanted in op or ():
            if wanted not in load_operators().ops():
                raise ConfigError(f"there is no operator {wanted!r}: known are {', '.join(load_operators().ops())}")
        rows = measure_kernels(
            spec, getattr(torch, dtype or spec.dtype), chosen, calibrated_device(result["calibration"]),
            batches=batches, contexts=contexts, ops=op or (), seconds=seconds, save=keep,
            packed=path if path.suffix == ".gguf" else None,
        )  # fmt: skip
        result["partial"] = False
        result["metrics"] = {"rows": rows, "us": {f"{r['op']} {r['label']} {r['provider']}": r["us"] for r in rows}}
        results.save(result, json_path)
        _table(_KERNELS, rows)

    guarded(body)


def accuracy(
    model: ModelOption = None,
    json_path: JsonOption = None,
    reference: Annotated[str, typer.Option(help="transformers, none, or a file written by --save")] = "transformers",
    text: Annotated[Path | None, typer.Option(help="a text file (default: a small public-domain text in the package)")] = None,
    window: Annotated[int, typer.Option(help="tokens a window")] = 512,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="tokens in all")] = None,
    save: Annotated[Path | None, typer.Option(help="keep this run's log-probabilities for later comparisons")] = None,
    option: EngineOption = None,
) -> None:
    """Perplexity, KL and top-1 agreement against a reference."""

    def body() -> None:
        name = chosen_model(model)
        from hexad.bench import accuracy as scoring
        from hexad.bench.facts import locate, read_facts
        from hexad.llm import LLM

        spec, stored = read_facts(name)
        path = locate(name)
        result = results.new_result("accuracy", None, spec.name, stored.name)
        results.begin(result, json_path)
        earlier = None if reference in ("transformers", "none") else scoring.load_run(Path(reference))
        with LLM(str(path), **engine_options(option)) as llm:
            ids = llm.get_tokenizer().encode(scoring.corpus_text(text), add_special_tokens=False)
            windows = scoring.cut(ids, window, max_tokens)
            ours = scoring.EngineScorer(llm).score(windows)
            result["engine"] = {"config": llm.config.model_dump(mode="json", exclude={"server"})}
        result["device"] = {"name": result["engine"]["config"]["device"]["device"]}
        corpus = text.name if text else None
        result["settings"] = {
            "window": window,
            "max_tokens": max_tokens,
            "text": corpus,
            "options": results.shown_options(engine_options(option)),
        }
        metrics: dict[str, Any] = {"perplexity": scoring.perplexity(ours), "tokens": sum(len(w) for w in ours)}
        if save is not None:
            scoring.save_run(save, scoring.Saved(spec.name, stored.name, windows, ours))
        if reference != "none":
            theirs = earlier.positions if earlier else scoring.TransformersScorer(path).score(windows)
            result["reference"] = f"{earlier.model} {earlier.format}" if earlier else "transformers, float32"
            metrics["reference_perplexity"] = scoring.perplexity(theirs)
            metrics |= scoring.compare_positions(theirs, ours)
        finish(result, metrics, json_path)

    guarded(body)


def profile(
    model: ModelOption = None,
    json_path: JsonOption = None,
    batch: BatchesOption = None,
    prompt: Annotated[int, typer.Option("--input-len", min=1, help="prompt tokens")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="decode steps recorded")] = 32,
    by_layer: Annotated[bool, typer.Option("--by-layer", help="do without whole-network operators, to see inside them")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="a GPU's idle time instead, with graphs, from the profiler's trace")] = False,
    mixed: Annotated[bool, typer.Option("--mixed", help="with --trace: streams that go on, so that prompts join the steps")] = False,
    trace_file: Annotated[Path | None, typer.Option("--trace-file", help="with --trace: keep the trace here (.json or .json.gz)")] = None,
    option: EngineOption = None,
    calibration_s: CalibrationOption = 0.3,
    quiet: QuietOption = False,
) -> None:
    """Where a decode step's time goes, by operator, and in words what to work on."""

    def body() -> None:
        name = chosen_model(model, quiet)
        import torch

        from hexad.bench import profile as profiling
        from hexad.bench.ceilings import calibrated_now, note
        from hexad.bench.facts import read_facts
        from hexad.bench.inprocess import InProcess
        from hexad.bench.session import calibrated_device, costs_of
        from hexad.bench.shapes import is_shape, resolve_model
        from hexad.bench.verdict import verdict
        from hexad.operators.load import load_operators

        if trace:
            traced(name, batch or [256], prompt, steps, engine_options(option), json_path, trace_file, mixed=mixed)
            return
        options = {"enable_prefix_caching": False} | engine_options(option)
        if is_shape(name):
            options.setdefault("load_format", "dummy")
        if by_layer:
            options["operators"] = {**dict.fromkeys(profiling.WHOLE, "torch"), **options.get("operators", {})}
        on_gpu = device_of(options) == "cuda"
        spec, stored = read_facts(name)
        result = results.new_result("profile", None, spec.name, stored.name)
        results.begin(result, json_path)
        note("calibrating", quiet)
        result["calibration"] = calibrated_now(device_of(options), max(calibration_s, 0.05))
        calibrated = calibrated_device(result["calibration"])
        result["device"] = {"name": calibrated.name, "cores": read_processor().cores}
        result["settings"] = {"input_len": prompt, "steps": steps, "by_layer": by_layer, "options": results.shown_options(options)}
        costs = costs_of(spec, stored, options)
        sizes = batch or [1, 16]
        in_graphs: dict[int, float] = {}
        if on_gpu and not options.get("enforce_eager"):  # operators are seen without graphs, users run with them: their step counts
            in_graphs = profiling.plain_steps(resolve_model(name), options, sizes, prompt, steps)
        options["enforce_eager"] = True
        for size in sizes:
            recorder = profiling.Recorder(on_gpu, costs)
            with profiling.recording(load_operators(), recorder):
                face = InProcess(resolve_model(name), options)
            try:
                measured = profiling.profile_decode(face, recorder, size, prompt, steps)
            finally:
                face.close()
            if size in in_graphs:
                measured |= {"step_s": in_graphs[size], "step_s_without_graphs": measured["step_s"]}
            rows = profiling.operator_table(recorder, measured, calibrated, getattr(torch, face.info()["dtype"]))
            words = verdict(rows, measured, costs, calibrated)
            result["metrics"][str(size)] = measured | {"operators": rows, "verdict": words}
            results.save(result, json_path)
            typer.echo(f"batch {size}, context {measured['context']:.0f}: {measured['step_s'] * 1e3:.3f} ms a step")
            _table(_PROFILE, rows)
            for line in words:
                typer.echo(f"  {line}")
        finish(result, result["metrics"], json_path, quiet=True)

    guarded(body)


def device_of(options: dict[str, Any]) -> str:
    """ "cuda" or "cpu": what an engine with these options runs on."""
    import torch

    return "cuda" if str(options.get("device") or "auto") != "cpu" and torch.cuda.is_available() else "cpu"


def traced(
    model: str, sizes: list[int], prompt: int, steps: int, options: dict[str, Any], path: Path | None, keep: Path | None, *, mixed: bool
) -> None:
    """The body of `profile --trace`.

    Raises:
        ConfigError: there is no GPU.
    """
    from hexad.bench import trace
    from hexad.bench.ceilings import calibrated_now
    from hexad.bench.facts import read_facts
    from hexad.bench.inprocess import InProcess
    from hexad.bench.shapes import is_shape, resolve_model

    if device_of(options) != "cuda":
        raise ConfigError("--trace looks at what a GPU does, and the engine would run on the CPU: leave it out, or use device=cuda")
    if is_shape(model):
        options.setdefault("load_format", "dummy")
    options = {"enable_prefix_caching": False, "max_num_seqs": max(sizes)} | options
    spec, stored = read_facts(model)
    result = results.new_result("trace-mixed" if mixed else "trace", None, spec.name, stored.name)
    results.begin(result, path)
    result["settings"] = {"input_len": prompt, "steps": steps, "mixed": mixed, "options": results.shown_options(options)}
    face = InProcess(resolve_model(model), options)
    found: dict[str, dict[str, Any]] = {}
    try:
        for size in sizes:
            measured = trace.trace_decode(face, size, prompt, steps, keep, mixed=mixed)
            result["flags"] += trace.flags(measured)
            for name, value in measured.items():
                found.setdefault(name, {})[str(size)] = value
            result["metrics"] = found
            results.save(result, path)
    finally:
        face.close()
    result["calibration"] = calibrated_now("cuda", 0.3)
    result["device"] = {"name": result["calibration"]["device"]}
    shown = ("step_ms", "step_ms_traced", "idle_share", "idle_between_launches_share", "longest_gap_us", "launches")
    finish(result, found, path, quiet=True)
    for name in shown:
        for point, value in found[name].items():
            typer.echo(f"{name + ' [' + point + ']':<36} {value:>18,.6g}")
    for flag in result["flags"]:
        typer.echo(f"  ! {flag}")


def finish(result: dict[str, Any], metrics: dict[str, Any], path: Path | None, *, quiet: bool = False) -> None:
    """Complete a result, write it, print its numbers."""
    from hexad.bench.compare import flatten
    from hexad.cli.columns import number

    result["metrics"], result["partial"] = metrics, False
    results.save(result, path)
    for name, value in {} if quiet else flatten(metrics).items():
        typer.echo(f"{name:<36} {number(value):>18}")


def _table(columns: dict[str, str], rows: list[dict[str, Any]]) -> None:
    from hexad.cli.columns import Column, print_table

    texts = [bool(rows) and isinstance(rows[0][c], str) for c in columns]
    cells = [[_cell(row[c]) for c in columns] for row in rows]
    print_table([Column(name, text) for name, text in zip(columns.values(), texts, strict=True)], cells, keys=texts.index(False))


def _cell(value: Any) -> str:
    """Three figures that count, and never an exponent."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{2 if abs(value) >= 1 else 3}f}"
