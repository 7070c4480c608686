"""`hexad version`."""

from __future__ import annotations

import importlib.metadata
import platform

import typer

import hexad

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
LIBRARIES = ("torch", "triton", "tokenizers", "fastapi", "uvicorn", "pyzmq", "msgspec")


@app.command()
def version() -> None:
    """Print the version and what it runs on."""
    print(f"hexad {hexad.__version__}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in LIBRARIES:
        try:
            print(f"{name} {importlib.metadata.version(name)}")  # reads the installed metadata, imports nothing
        except importlib.metadata.PackageNotFoundError:
            print(f"{name} not installed")
