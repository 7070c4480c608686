"""`hexad config show`."""

from __future__ import annotations

from typing import Annotated

import typer

from hexad.cli.flags import Settings, with_config

app = typer.Typer(
    help="The configuration.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.callback()
def _group() -> None:
    """The configuration."""


def _show(
    *,
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    changed: Annotated[bool, typer.Option("--changed", help="Only values that are not defaults.")] = False,
) -> None:
    """Show the resolved configuration and where each value comes from.

    Takes the flags of `hexad serve`. `null` is "auto": decided when the engine starts, and printed then with its reason.
    """
    rows = [row for row in settings.rows() if not changed or row[2] != "default"]
    if as_json:
        import json

        print(json.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, indent=2, ensure_ascii=False))
        return
    width_key = max((len(key) for key, _, _ in rows), default=0)
    width_value = max((len(value) for _, value, _ in rows), default=0)
    for key, value, origin in rows:
        print(f"{key:<{width_key}}  {value:<{width_value}}  {origin}".rstrip())


app.command("show")(with_config(_show))
