"""From a path to a ModelSpec: config.json of a Hugging Face folder, or GGUF metadata. Reads headers, hardly any weights. No torch."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from hexad.common.errors import ModelError, WeightsError
from hexad.models.formats import gguf_config, hf_config
from hexad.models.formats.files import read_json
from hexad.models.formats.gguf import GGUFFile, find_gguf
from hexad.models.formats.safetensors import read_folder
from hexad.models.formats.stored import StoredTensor
from hexad.models.spec import ModelSpec

log = logging.getLogger(__name__)

_SAMPLES, _SAMPLE_BYTES = 64, 4096


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
    spec = hf_config.spec_of_config(config, name or folder.resolve().name, folder / "config.json", generation)
    if spec.tied and _has_own_head(folder):
        log.warning(
            "%s: tie_word_embeddings is true, but the weights have an output head that differs from the embedding: that head is used. "
            "Set tie_word_embeddings to false in config.json to silence this.",
            folder,
        )
        return msgspec.structs.replace(spec, tied=False)
    return spec


def _has_own_head(folder: Path) -> bool:
    """Whether an output head is stored that is not a copy of the embedding (some bytes of both are compared)."""
    try:
        tensors = read_folder(folder)
    except WeightsError:
        return False  # no weights, or damaged ones: the loader says so, if it is asked to load them
    head = next((t for n, t in tensors.items() if n.endswith("lm_head.weight")), None)
    table = next((t for n, t in tensors.items() if n.endswith("embed_tokens.weight")), None)
    if head is None or table is None:
        return False
    if (head.shape, head.format) != (table.shape, table.format):
        return True
    step = max(_SAMPLE_BYTES, head.nbytes // _SAMPLES)
    return any(_bytes_at(head, at) != _bytes_at(table, at) for at in range(0, head.nbytes, step))


def _bytes_at(tensor: StoredTensor, at: int) -> bytes:
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset + at)
        return file.read(min(_SAMPLE_BYTES, tensor.nbytes - at))


def is_gguf(path: Path) -> bool:
    """Whether the model at `path` is read as GGUF: the file itself, or a folder that has no other weights."""
    if path.is_file():
        return path.suffix == ".gguf"
    return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
