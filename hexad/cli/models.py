"""`hexad models`."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def models(as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False) -> None:
    """List the models in the local cache: name, format, size, path."""
    from hexad.cli.sizes import show_bytes
    from hexad.models.sources import list_local

    found = [(model.source, _format(str(model.path)), model.nbytes, str(model.path)) for model in list_local()]
    if as_json:
        import json

        for name, kind, nbytes, path in found:
            print(json.dumps({"name": name, "format": kind, "bytes": nbytes, "path": path}))
        return
    if not found:
        print("no models in the cache yet: hexad pull")
        return
    rows = [("NAME", "FORMAT", "SIZE", "PATH"), *((name, kind, show_bytes(nbytes), path) for name, kind, nbytes, path in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + f"  {row[3]}")


def _format(path: str) -> str:
    return "gguf" if path.endswith(".gguf") else "safetensors"
