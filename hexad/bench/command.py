"""What the commands of `hexad bench` share: options, and how a mistake or an interrupt ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from hexad.common.config import DEFAULT_MODEL
from hexad.common.errors import ConfigError, HexadError
from hexad.common.presets import find_preset

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help=f"folder, .gguf file, source, or shape such as llama-3.1-8b (dummy weights); default, as of `hexad serve`: {DEFAULT_MODEL}",
        show_default=False,
    ),
]
LoadOption = Annotated[list[str] | None, typer.Option("--load", help="W1 to W9; may be repeated")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="write the result here (with several loads: FILE-W1.json, ...)")]
DurationOption = Annotated[float | None, typer.Option("--duration-s", min=0.1, help="steady state for so long, instead of the whole load")]
RequestsOption = Annotated[int | None, typer.Option("--requests", "--num-prompts", min=1, help="in place of the load's number")]
InputOption = Annotated[list[int] | None, typer.Option("--input-len", min=1, help="prompt tokens; repeat it where the load sweeps them")]
OutputOption = Annotated[int | None, typer.Option("--output-len", min=1, help="output tokens")]
PrefixOption = Annotated[int | None, typer.Option("--prefix-len", min=0, help="shared prefix tokens")]
BatchOption = Annotated[list[int] | None, typer.Option("--batch", min=1, help="batch sizes of a decode sweep")]
ConcurrencyOption = Annotated[list[int] | None, typer.Option("--concurrency", "--max-concurrency", min=1, help="streams at once")]
UrlOption = Annotated[str | None, typer.Option("--base-url", help="an OpenAI-compatible address instead of an engine in this process")]
NameOption = Annotated[str | None, typer.Option("--served-model-name", help="the model's name at the address")]
KeyOption = Annotated[str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="key for the address")]
EngineOption = Annotated[list[str] | None, typer.Option("-o", "--option", help="engine option as key=value, such as max_num_seqs=256")]
ProfileOption = Annotated[str | None, typer.Option("--profile", help="chat, batch or agent: scheduler settings for it (printed)")]
SeedOption = Annotated[int, typer.Option("--seed", help="of the random prompts")]
CalibrationOption = Annotated[float, typer.Option("--calibration-s", min=0, help="seconds for each ceiling measured first; 0: none")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="no progress")]
RepeatsOption = Annotated[int, typer.Option("--repeats", min=1, help="runs of a single stream; the median counts")]


def guarded(action: Callable[[], Any]) -> Any:
    """Run a command's body: mistakes end with their message and code, an interrupt with 130."""
    from hexad.bench import results

    results.forget_begun()
    try:
        return action()
    except KeyboardInterrupt:
        files = ", ".join(str(path) for path in results.keep_begun())
        typer.echo(f"interrupted: {f'{files}: what was measured until now, marked partial' if files else 'nothing was kept'}", err=True)
        raise typer.Exit(130) from None
    except HexadError as error:
        typer.echo(error.message, err=True)
        raise typer.Exit(getattr(error, "exit_code", 1)) from None
    except OSError as error:  # a file or folder that somebody named
        if error.filename is None:
            raise
        typer.echo(f"{error.filename}: {error.strerror}", err=True)
        raise typer.Exit(2) from None


def chosen_model(model: str | None, quiet: bool = False) -> str:
    """`model`, or the one that `hexad serve` takes without a name, which is said."""
    if model is None and not quiet:
        print(f"no --model: {DEFAULT_MODEL}, as `hexad serve` takes without one", file=sys.stderr)
    return DEFAULT_MODEL if model is None else model


def engine_options(items: list[str] | None, profile: str | None = None) -> dict[str, Any]:
    """["max_num_seqs=256", "dtype=bfloat16"] as a dict, over the values of a profile; values are read as JSON where they are JSON.

    Raises:
        ConfigError: not key=value, or no such profile.
    """
    found: dict[str, Any] = {}
    if profile is not None:
        preset = find_preset(profile)
        for path, value in preset.values.items():
            found[path.partition(".")[2]] = value
            print(f"profile {profile}: {path} = {value}: {preset.reasons[path]}", file=sys.stderr)
    for item in items or []:
        key, separator, value = item.partition("=")
        if not separator:
            raise ConfigError(f"-o has {item!r}: write key=value, for instance max_num_seqs=256")
        try:
            found[key.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[key.replace("-", "_")] = value
    return found
