"""config.json of a Hugging Face folder -> ModelSpec. No torch.

The file is input like any other: types and ranges are checked, and what changes results but is not understood is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hexad.common.errors import ModelError
from hexad.models.formats.fields import Fields
from hexad.models.spec import AttentionSpec, MLPSpec, ModelSpec, RopeSpec

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "relu": "relu",
}  # fmt: skip
_LAYER_KINDS = {"full_attention": "full", "sliding_attention": "sliding"}
_DTYPES = {"float32", "bfloat16", "float16"}
_ROPE_EXTRA = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate", "short_factor", "long_factor")


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What a `model_type` implies beyond its config.json."""

    family: str
    tied: bool = False  # when the file does not say
    norm_eps: float = 1e-6
    qkv_bias: bool | None = None  # None: `attention_bias`
    out_bias: bool | None = None
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    adjust: Callable[[Fields, dict[str, Any]], None] = lambda fields, values: None


def _gemma3(fields: Fields, values: dict[str, Any]) -> None:
    """Gemma 3: embeddings scaled, its own attention scale, another RoPE base in the sliding layers."""
    values["embedding_scale"] = float(values["hidden"]) ** 0.5
    scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    values["attention"] = msgspec.structs.replace(values["attention"], scale=scale)
    local = msgspec.structs.replace(values["rope"], theta=_local_theta(fields), scaling="none", factor=1.0)
    values["extra"] = {"sliding_rope": msgspec.to_builtins(local)}


def _local_theta(fields: Fields) -> float:
    nested = fields.sub("rope_parameters").sub("sliding_attention")
    return nested.number("rope_theta", fields.number("rope_local_base_freq", 10_000.0))


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama"),
    "mistral": Architecture("mistral", qkv_bias=False, out_bias=False),
    "qwen2": Architecture("qwen2", qkv_bias=True, out_bias=False),
    "qwen3": Architecture("qwen3", qk_norm=True),
    "gemma3_text": Architecture("gemma3", tied=True, qk_norm=True, rope_theta=1_000_000.0, adjust=_gemma3),
}
_NESTED = {"gemma3": "gemma3_text", "mistral3": "mistral", "llava": "llama"}  # multimodal wrappers whose text part is one of these


def spec_of_config(config: Mapping[str, Any], name: str, path: Path, generation: Mapping[str, Any]) -> ModelSpec:
    """The spec of a parsed config.json.

    Args:
        generation: the parsed generation_config.json, or {}.

    Raises:
        ModelError: an architecture that is not supported (lists those that are), or a field that is missing or out of range.
    """
    top = Fields(config, path)
    fields = top.sub("text_config") if isinstance(config.get("text_config"), Mapping) else top
    arch = _architecture(top, fields)
    hidden, layers = fields.count("hidden_size"), fields.count("num_hidden_layers")
    kinds = _layer_kinds(fields, arch.family, layers)
    rope, max_len = _rope(fields, arch, hidden)
    values: dict[str, Any] = {
        "name": name,
        "family": arch.family,
        "vocab_size": fields.count("vocab_size"),
        "hidden": hidden,
        "num_layers": layers,
        "max_len": max_len,
        "attention": _attention(fields, arch, hidden, kinds),
        "mlp": _mlp(fields),
        "rope": rope,
        "layer_kinds": kinds,
        "norm_eps": fields.number("rms_norm_eps", arch.norm_eps),
        "tied": fields.flag("tie_word_embeddings", top.flag("tie_word_embeddings", arch.tied)),
        "dtype": _dtype(top, fields),
        "final_softcap": fields.optional_number("final_logit_softcapping"),
        "bos_token_id": fields.optional_id("bos_token_id", top.optional_id("bos_token_id")),
        "eos_token_ids": _eos_ids(top, fields, Fields(generation, path)),
        **_quantization(top, fields),
    }
    arch.adjust(fields, values)
    return ModelSpec(**values)


def _architecture(top: Fields, fields: Fields) -> Architecture:
    kind = str(fields.get("model_type", top.get("model_type", "")))
    arch = ARCHITECTURES.get(_NESTED.get(kind, kind))
    if arch is None:
        classes = top.get("architectures")
        shown = f" ({', '.join(map(str, classes))})" if isinstance(classes, list) and classes else ""
        raise ModelError(
            f"{top.path}: architecture {kind!r}{shown} is not supported; supported: {', '.join(ARCHITECTURES)} "
            "and, as GGUF, llama, qwen2, qwen3, gemma3"
        )
    return arch


def _head_dim(fields: Fields, hidden: int) -> int:
    heads = fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", hidden // heads if hidden % heads == 0 else None)
    if head_dim % 2:
        raise ModelError(f"{fields.path}: head_dim is {head_dim}, but rotary embeddings need an even one")
    return head_dim


def _attention(fields: Fields, arch: Architecture, hidden: int, kinds: tuple[str, ...]) -> AttentionSpec:
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"{fields.path}: {heads} attention heads do not divide over {kv_heads} key/value heads")
    head_dim = _head_dim(fields, hidden)
    bias = fields.flag("attention_bias", False)
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=bias if arch.qkv_bias is None else arch.qkv_bias,
        out_bias=bias if arch.out_bias is None else arch.out_bias,
        qk_norm=arch.qk_norm,
        window=fields.count("sliding_window") if "sliding" in kinds else None,
        logit_softcap=fields.optional_number("attn_logit_softcapping"),
    )


def _mlp(fields: Fields) -> MLPSpec:
    name = str(fields.get("hidden_activation", None) or fields.get("hidden_act", "silu"))
    if name not in ACTIVATIONS:
        raise ModelError(f"{fields.path}: activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return MLPSpec(intermediate=fields.count("intermediate_size"), activation=ACTIVATIONS[name], bias=fields.flag("mlp_bias", False))


def _layer_kinds(fields: Fields, family: str, layers: int) -> tuple[str, ...]:
    """Which layers see a window only: `layer_types` if given, else each family's older convention."""
    types = fields.get("layer_types", None)
    if isinstance(types, list) and types:
        unknown = sorted({str(t) for t in types} - set(_LAYER_KINDS))
        if unknown or len(types) != layers:
            raise ModelError(f"{fields.path}: layer_types has {len(types)} entries for {layers} layers, unknown kinds: {unknown}")
        kinds = tuple(_LAYER_KINDS[t] for t in types)
        return kinds if fields.get("sliding_window", None) else ("full",) * layers
    if not fields.get("sliding_window", None):
        return ("full",) * layers
    if family == "mistral":
        return ("sliding",) * layers
    if family in ("qwen2", "qwen3"):
        first = fields.count("max_window_layers", 28, least=0) if fields.flag("use_sliding_window", False) else layers
        return tuple("sliding" if i >= first else "full" for i in range(layers))
    if family == "gemma3":
        pattern = fields.count("sliding_window_pattern", 6)
        return tuple("full" if (i + 1) % pattern == 0 else "sliding" for i in range(layers))
    return ("full",) * layers


def _rope(fields: Fields, arch: Architecture, hidden: int) -> tuple[RopeSpec, int]:
    """(rule, context after scaling). Newer files have `rope_parameters`, older ones `rope_theta` and `rope_scaling`."""
    length = fields.count("max_position_embeddings", 2048)
    rule = fields.sub("rope_parameters") or fields.sub("rope_scaling")
    rule = rule.sub("full_attention") or rule
    kind = str(rule.get("rope_type", rule.get("type", "default")))
    share = rule.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    dim = int(_head_dim(fields, hidden) * share) // 2 * 2
    theta = rule.number("rope_theta", fields.number("rope_theta", arch.rope_theta))
    if kind == "default":
        return RopeSpec(theta=theta, dim=dim), length
    kind = {"su": "longrope"}.get(kind, kind)
    if kind not in ("linear", "dynamic", "llama3", "yarn", "longrope"):
        raise ModelError(f"{fields.path}: RoPE scaling {kind!r} is not supported; supported: linear, dynamic, llama3, yarn, longrope")
    factor = rule.number("factor", None if kind != "longrope" else 0.0)
    original = rule.count("original_max_position_embeddings", fields.count("original_max_position_embeddings", length))
    spec = RopeSpec(
        theta=theta,
        dim=dim,
        scaling=kind,
        factor=factor or length / original,
        low_freq_factor=rule.number("low_freq_factor", 1.0),
        high_freq_factor=rule.number("high_freq_factor", 4.0),
        original_max_len=original,
        extra={key: rule.get(key) for key in _ROPE_EXTRA if rule.get(key, None) is not None},
    )
    if kind == "longrope" and not {"short_factor", "long_factor"} <= set(spec.extra):
        raise ModelError(f"{fields.path}: RoPE scaling 'longrope' needs short_factor and long_factor")
    return spec, _scaled_length(arch.family, kind, length, original, factor)


def _scaled_length(family: str, kind: str, length: int, original: int, factor: float) -> int:
    """`max_position_embeddings` includes the scaling for llama3, longrope and Gemma; elsewhere it is the length before scaling."""
    if kind in ("llama3", "longrope") or family == "gemma3":
        return length
    return max(length, int((original if kind == "yarn" else length) * factor))


def _dtype(top: Fields, fields: Fields) -> str:
    for source in (fields, top):
        for key in ("dtype", "torch_dtype"):
            value = str(source.get(key, "")).removeprefix("torch.")
            if value in _DTYPES:
                return value
    return "bfloat16"


def _eos_ids(*sources: Fields) -> tuple[int, ...]:
    """Every end-of-sequence id that any of the files names, in order."""
    return tuple(dict.fromkeys(i for source in sources for i in source.ids("eos_token_id")))


def _quantization(top: Fields, fields: Fields) -> dict[str, Any]:
    given = top.get("quantization_config", None) or fields.get("quantization_config", None)
    if not isinstance(given, Mapping):
        return {}
    return {"weight_format": str(given.get("quant_method", "unknown")), "quantization": dict(given)}
