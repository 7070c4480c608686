"""Model shapes that come with the package: config.json files for dummy weights and for planning, by name."""

from __future__ import annotations

from pathlib import Path

_SHAPES = Path(__file__).parent / "data" / "shapes"


def shape_names() -> list[str]:
    """Names of the shapes in the package."""
    return sorted(folder.name for folder in _SHAPES.iterdir() if (folder / "config.json").is_file())


def resolve_model(model: str) -> str:
    """The folder of a packaged shape when `model` names one, else `model` itself (a path or a source)."""
    return str(_SHAPES / model) if model in shape_names() else model


def is_shape(model: str) -> bool:
    """True when `model` names a packaged shape: it has no weights of its own."""
    return model in shape_names()
