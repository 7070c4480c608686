"""The command `hexad`. Sub-commands are imported when they run: `hexad --help` loads neither torch nor the server."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Annotated, NamedTuple

import typer

from hexad import __version__
from hexad.cli.streams import open_standard_streams
from hexad.common.errors import HexadError, StartupError

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


class Lazy(NamedTuple):
    """A sub-command that is somewhere else."""

    target: str  # "module:typer application"
    help: str


COMMANDS: dict[str, Lazy] = {
    "serve": Lazy("hexad.cli.serve:app", "Serve a model over the OpenAI-compatible API."),
    "chat": Lazy("hexad.cli.chat:app", "Talk to a model in the terminal: a server's, or one of its own."),
    "run": Lazy("hexad.cli.run:app", "Answer one prompt and print figures."),
    "pull": Lazy("hexad.cli.pull:app", "Fetch a model into the local cache."),
    "models": Lazy("hexad.cli.models:app", "List the models in the local cache."),
    "config": Lazy("hexad.cli.config:app", "Show the resolved configuration and where each value comes from."),
    "plan": Lazy("hexad.cli.plan:app", "Say whether a model fits a machine, and how fast it can be at best."),
    "warm": Lazy("hexad.cli.warm:app", "Compile kernels ahead of the first start, with or without the GPU."),
    "bench": Lazy("hexad.bench.cli:app", "Measure a server or an engine."),
    "doctor": Lazy("hexad.cli.doctor:app", "Check this machine: devices, libraries, limits."),
    "version": Lazy("hexad.cli.version:app", "Print the version and what it runs on."),
}

app = typer.Typer(
    name="hexad",
    help="A complete LLM inference system.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _exists(target: str) -> bool:
    return importlib.util.find_spec(target.partition(":")[0]) is not None


def _register(name: str, lazy: Lazy) -> None:
    """Show `name` with its help; when it is called, import the target and pass the arguments on, `--help` included."""

    def call(ctx: typer.Context) -> None:
        module, _, attribute = lazy.target.partition(":")
        command = typer.main.get_command(getattr(importlib.import_module(module), attribute))
        command(args=ctx.args, prog_name=f"hexad {name}")

    app.command(name, help=lazy.help, context_settings=PASS_ON)(call)


for _name, _lazy in COMMANDS.items():
    if _exists(_lazy.target):
        _register(_name, _lazy)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hexad {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)] = False,
) -> None:
    pass


def main() -> None:
    """Entry point. A mistake of the operator is one message on stderr and exit code 2, never a traceback."""
    open_standard_streams()
    try:
        app()
    except StartupError as error:
        print(f"hexad: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)
    except HexadError as error:
        print(f"hexad: {error.message}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone: nobody to tell
        sys.exit(0)
