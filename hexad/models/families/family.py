"""What a decoder family is: the names of its tensors, and what a `ModelSpec` cannot say. A family's file holds its differences alone."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass

from hexad.common.errors import ModelError
from hexad.models import families


@dataclass(frozen=True)
class DecoderFamily:
    """Tensor names of a decoder-only family. Names of a layer come after `layer`, with the layer's index put in.

    Tuples are concatenated along the output dimension: a checkpoint that merged q, k and v has one name there.
    """

    name: str
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{index}."
    input_norm: str = "input_layernorm.weight"
    post_attention_norm: str = "post_attention_layernorm.weight"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attention_out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # of an MLP without a gate: its one input projection
    down: str = "mlp.down_proj"
    attention_out_norm: str = ""  # of what attention (and `down_norm`: the MLP) adds to the hidden state; "": none
    down_norm: str = ""
    norm_offset: float = 0.0  # norms multiply by the stored weight plus this


def find_family(name: str) -> DecoderFamily:
    """The family called `name`: the constant FAMILY of `hexad/models/families/<name>.py`.

    Raises:
        ModelError: there is none; the message lists the known ones.
    """
    known = known_families()
    if name not in known:
        raise ModelError(f"model family {name!r} is not supported; known: {', '.join(known)}")
    family = importlib.import_module(f"hexad.models.families.{name}").FAMILY
    assert isinstance(family, DecoderFamily), f"FAMILY of {name} is not a DecoderFamily"
    return family


def known_families() -> list[str]:
    """Names of all families, sorted. Imports none of them."""
    return sorted(module.name for module in pkgutil.iter_modules(families.__path__) if module.name != "family")
