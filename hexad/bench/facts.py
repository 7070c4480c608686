"""What planning and measuring must know of a model before it is loaded: its spec and the format that its weights are in. No torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hexad.bench.shapes import resolve_model
from hexad.common.errors import ModelError
from hexad.models.catalog import is_gguf, read_spec
from hexad.models.costs import WeightFormat, format_of
from hexad.models.formats import hf_config
from hexad.models.formats.fields import Fields
from hexad.models.formats.files import read_json
from hexad.models.formats.gguf import GGUFFile, find_gguf
from hexad.models.spec import ModelSpec, MoESpec

_MIXTURES = {"qwen3_moe": "qwen3", "qwen2_moe": "qwen2", "mixtral": "mistral"}  # model_type -> the family its attention follows
_TABLES = ("token_embd.weight", "output.weight")


def locate(model: str) -> Path:
    """The local folder or file of a packaged shape, a path, or a source (fetched when it is not in the cache).

    Raises:
        ModelError: it cannot be found or fetched.
    """
    from hexad.models.sources import fetch

    return fetch(resolve_model(model)).path


def read_facts(model: str) -> tuple[ModelSpec, WeightFormat]:
    """Spec and weight format of `model`; a GGUF file's format is the mean over its tensors, exact in sum.

    Raises:
        ModelError: it cannot be found or read.
    """
    path = locate(model)
    spec = _mixture_spec(path) or read_spec(path)
    return (spec, stored_format(path)) if is_gguf(path) else (spec, format_of(spec))


def _mixture_spec(path: Path) -> ModelSpec | None:
    """A mixture of experts whose layers are otherwise those of a supported family; None for anything else.

    Planning needs only the shape, so it goes further than what can be served.
    """
    config = read_json(path / "config.json") if path.is_dir() else None
    kind = str((config or {}).get("model_type", ""))
    base = _MIXTURES.get(kind)
    if config is None or base is None or kind in hf_config.ARCHITECTURES:
        return None
    spec = hf_config.spec_of_config({**config, "model_type": base}, path.resolve().name, path / "config.json", {})
    fields = Fields(config, path / "config.json")
    moe = MoESpec(
        experts=fields.count("num_local_experts" if "num_local_experts" in config else "num_experts"),
        experts_per_token=fields.count("num_experts_per_tok"),
        intermediate=fields.count("moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"),
        shared_intermediate=int(config.get("shared_expert_intermediate_size") or 0),
    )
    return msgspec.structs.replace(spec, family=kind, moe=moe)


def stored_format(path: Path) -> WeightFormat:
    """Mean bytes a weight of a GGUF file's matrices and, apart from them, of its embedding and output head."""
    tensors = GGUFFile.open(find_gguf(path)).tensors
    sums = {True: [0, 0], False: [0, 0]}
    formats: set[str] = set()
    for name, tensor in tensors.items():
        if len(tensor.shape) < 2:
            continue
        count = 1
        for size in tensor.shape:
            count *= size
        table = name in _TABLES
        sums[table][0] += tensor.nbytes
        sums[table][1] += count
        if not table:
            formats.add(tensor.format)
    if not sums[False][1] or not sums[True][1]:
        raise ModelError(f"{path} has no weight matrices or no token embedding: not a language model")
    weight_bytes, table_bytes = (sums[kind][0] / sums[kind][1] for kind in (False, True))
    return WeightFormat("+".join(sorted(formats)), weight_bytes, table_bytes=table_bytes)
