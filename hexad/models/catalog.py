"""From a path to a ModelSpec: config.json of a Hugging Face folder, or GGUF metadata. Reads no weights. No torch."""

from __future__ import annotations

from pathlib import Path

from hexad.common.errors import ModelError
from hexad.models.formats import gguf_config, hf_config
from hexad.models.formats.files import read_json
from hexad.models.formats.gguf import GGUFFile, find_gguf
from hexad.models.spec import ModelSpec


def read_spec(path: Path, *, name: str | None = None) -> ModelSpec:
    """The spec of the model at `path`: a folder, or a .gguf file.

    Args:
        name: what users call it; default: the name of the folder or file.

    Raises:
        ModelError: nothing readable there, or an architecture that is not supported (the message lists those that are).
    """
    path = Path(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder: check the path, or fetch the model first")
    if is_gguf(path):
        file = GGUFFile.open(find_gguf(path))
        return gguf_config.spec_of_gguf(file, name or file.path.stem)
    folder = path if path.is_dir() else path.parent
    config = read_json(folder / "config.json")
    if config is None:
        raise ModelError(f"{folder}: no config.json and no *.gguf file here: not a model folder")
    generation = read_json(folder / "generation_config.json") or {}
    return hf_config.spec_of_config(config, name or folder.resolve().name, folder / "config.json", generation)


def is_gguf(path: Path) -> bool:
    """Whether the model at `path` is read as GGUF: the file itself, or a folder that has no other weights."""
    if path.is_file():
        return path.suffix == ".gguf"
    return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
