"""`hexad run`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hexad.cli.flags import Settings, with_config

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _run(
    *,
    settings: Settings,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to ask; - reads it from standard input.")],
    url: Annotated[str | None, typer.Option("--url", help="Ask the server there instead of an engine of its own.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is: no chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Longest answer in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No figures.")] = False,
) -> None:
    """Answer one prompt: the text goes to standard output, the figures to standard error."""
    from hexad.cli.session import talker

    text = sys.stdin.read() if prompt == "-" else prompt
    model = settings.config.model.model if "model.model" in settings.origins else None
    with talker(settings, url, model) as someone:
        fields = {"max_tokens": max_tokens, "temperature": temperature}
        messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]
        pieces = someone.complete(text, **fields) if raw else someone.chat(messages, **fields)
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
        if not quiet:
            print(someone.figures, file=sys.stderr)


app.command("run")(with_config(_run, model_argument=False))
