"""Weights as lazy handles: name, shape, format, `slice()`; a rank reads only what it keeps.

    store = open_weights(path, spec, "auto")
    q = store.get("model.layers.0.self_attn.q_proj.weight")   # marks the tensor as used
    q.slice(0, 0, 128).load(torch.bfloat16, device)           # reads 128 rows
    store.finish()                                            # anything left over is an error that names it

Names are those of Hugging Face checkpoints, whatever the file calls them. Files are memory-mapped: a handle costs nothing until loaded,
and a tensor that needs no conversion is a view of the file (private: writing to it changes memory, never the file).
"""

from __future__ import annotations

import difflib
import logging
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from hexad.common.errors import ModelError, WeightsError
from hexad.models.formats import gguf_names
from hexad.models.formats.dummy import dummy_handles
from hexad.models.formats.gguf import GGUFFile, find_gguf
from hexad.models.formats.handles import TORCH_DTYPES, stored_handle
from hexad.models.formats.safetensors import read_folder, read_header
from hexad.models.formats.stored import StoredTensor
from hexad.models.spec import ModelSpec

__all__ = ["TORCH_DTYPES", "WeightHandle", "WeightStore", "open_weights"]

log = logging.getLogger(__name__)

# Buffers that networks compute for themselves.
_COMPUTED = re.compile(r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.masked_bias|\.attn\.bias|embeddings\.position_ids)$")
# Parts of multimodal checkpoints that a text model does not have.
_OTHER_MODALITIES = re.compile(
    r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision|embed_audio)\."
)


class WeightHandle(Protocol):
    """One tensor, or a part of one, not read yet."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def format(self) -> str:
        """How it is stored: "float32", "bfloat16", "q4_1", ... (models/formats/stored.py)."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What `load()` yields when no dtype is given."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        ...

    def load(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor:
        """The numbers, dequantised, contiguous, in `dtype` on `device`. Without both it may be a view of the file."""
        ...

    def slice(self, dim: int, start: int, stop: int) -> WeightHandle:
        """Part of the tensor along one dimension; reads nothing."""
        ...

    def raw(self) -> tuple[torch.Tensor, str]:
        """What is stored, and its format: packed blocks [..., bytes a row] uint8 for a block format, else the plain tensor.

        Raises:
            WeightsError: a slice cuts through blocks, or the values need arithmetic first.
        """
        ...


class WeightStore:
    """All tensors of a checkpoint; remembers which were asked for."""

    def __init__(self, path: Path, handles: Mapping[str, WeightHandle], spec: ModelSpec) -> None:
        self.path = path
        self._handles = dict(handles)
        self._spec = spec
        self._used: set[str] = set()

    def names(self) -> list[str]:
        return list(self._handles)

    def has(self, name: str) -> bool:
        return name in self._handles

    def get(self, name: str) -> WeightHandle:
        """The handle, which then counts as used.

        Raises:
            WeightsError: there is no such tensor; the message has the nearest names.
        """
        handle = self._handles.get(name)
        if handle is None:
            near = difflib.get_close_matches(name, self._handles, n=3, cutoff=0.6)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise WeightsError(f"{self.path}: tensor {name!r} is missing{hint}: the checkpoint is incomplete or of another architecture")
        self._used.add(name)
        return handle

    def unused(self) -> list[str]:
        """Tensors that nobody asked for, without those that are known to be redundant."""
        return [name for name in self._handles if name not in self._used and not self._redundant(name)]

    def finish(self) -> None:
        """Call once the network is built.

        Raises:
            WeightsError: tensors were left over; names the first ones.
        """
        left = self.unused()
        if left:
            more = f" and {len(left) - 8} more" if len(left) > 8 else ""
            raise WeightsError(
                f"{self.path}: {len(left)} tensors have no place in a {self._spec.family} model: {', '.join(left[:8])}{more}; "
                "the checkpoint is of another architecture, or needs a feature that is not supported"
            )

    def _redundant(self, name: str) -> bool:
        if _COMPUTED.search(name) or _OTHER_MODALITIES.match(name):
            return True
        return name == "lm_head.weight" and self._spec.tied


def open_weights(path: Path, spec: ModelSpec, load_format: str = "auto") -> WeightStore:
    """Open the checkpoint at `path` (a folder or a file) and map its names; reads headers only.

    `load_format`: auto | safetensors | gguf | dummy (random numbers in the shapes that `spec` asks for; `path` is not read).

    Raises:
        WeightsError: a file is missing, corrupt or contradicts `spec`'s tie flag.
        ModelError: no weights in a known format at `path`.
    """
    path = Path(path)
    if load_format == "dummy":
        return WeightStore(path, dummy_handles(spec), spec)
    kind = load_format if load_format != "auto" else _detect(path)
    if kind == "gguf":
        handles = _gguf_handles(find_gguf(path), spec)
    elif kind == "safetensors":
        handles = _safetensors_handles(path)
    else:
        raise ModelError(f"load format {load_format!r} is not known; known: auto, safetensors, gguf, dummy")
    store = WeightStore(path, handles, spec)
    _check_head(store, spec)
    return store


def _detect(path: Path) -> str:
    if path.suffix == ".gguf":
        return "gguf"
    if path.suffix == ".safetensors" or any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return "safetensors"
    if path.is_dir() and any(path.glob("*.gguf")):
        return "gguf"
    what = "this folder has neither *.safetensors nor *.gguf files" if path.is_dir() else "no such model file or folder"
    raise ModelError(f"{path}: {what}: check the path, or fetch the model first")


def _check_head(store: WeightStore, spec: ModelSpec) -> None:
    """An output head that is neither stored nor tied would be random numbers."""
    if spec.tied or spec.stack == "encoder" or not store.has("model.embed_tokens.weight"):
        return
    if not any(store.has(f"lm_head.{part}") for part in ("weight", "qweight", "weight_packed")):
        raise WeightsError(
            f"{store.path}: tensor 'lm_head.weight' is missing, and the configuration says that the output head is not "
            "tied to the embedding (tie_word_embeddings = false): the checkpoint is incomplete"
        )


def _map_file(path: Path) -> torch.Tensor:
    """The file's bytes as one tensor, private and lazy."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8)


class _Files:
    """Maps each file once."""

    def __init__(self) -> None:
        self._maps: dict[Path, torch.Tensor] = {}

    def bytes_of(self, tensor: StoredTensor) -> torch.Tensor:
        if tensor.path not in self._maps:
            self._maps[tensor.path] = _map_file(tensor.path)
        return self._maps[tensor.path][tensor.offset : tensor.offset + tensor.nbytes]


def _safetensors_handles(path: Path) -> dict[str, WeightHandle]:
    tensors = read_header(path) if path.is_file() else read_folder(path)
    files = _Files()
    bare = "embed_tokens.weight" in tensors  # saved without the head: no "model." in front
    named = {_causal_name(name, bare): tensor for name, tensor in tensors.items()}
    return {name: stored_handle(name, files.bytes_of(tensor), tensor) for name, tensor in named.items()}


def _causal_name(name: str, bare: bool) -> str:
    """A checkpoint's name -> that of a plain causal language model."""
    for prefix in ("model.language_model.", "language_model.model.", "model.text_model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    return "model." + name if bare and not name.startswith("lm_head.") else name


def _gguf_handles(path: Path, spec: ModelSpec) -> dict[str, WeightHandle]:
    file = GGUFFile.open(path)
    arch = str(file.metadata.get("general.architecture", ""))
    files = _Files()
    handles: dict[str, WeightHandle] = {}
    for tensor in file.tensors.values():
        if tensor.name in gguf_names.HANDLED:
            continue
        name = gguf_names.hf_name(tensor.name, arch)
        if name in handles:
            raise WeightsError(f"{path}: two tensors are {name!r} (one is {tensor.name!r}): corrupt file")
        heads = gguf_names.rotary_heads(name, arch, spec.attention.heads, spec.attention.kv_heads)
        handles[name] = stored_handle(name, files.bytes_of(tensor), tensor, heads, gguf_names.added_constant(name, arch))
    return handles
