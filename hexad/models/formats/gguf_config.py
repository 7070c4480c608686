"""GGUF metadata -> ModelSpec. No torch."""

from __future__ import annotations

import math
import struct
from collections import Counter
from typing import Any

import msgspec

from hexad.common.errors import ModelError
from hexad.models.formats.fields import Fields
from hexad.models.formats.gguf import GGUFFile
from hexad.models.formats.stored import FORMATS
from hexad.models.spec import AttentionSpec, MLPSpec, ModelSpec, RopeSpec

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}
GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_PATTERN = 6  # each sixth layer is full
_GEMMA_27B = (5376, 32)  # hidden, heads: the one size whose attention scale is not head_dim ** -0.5
_PLAIN_DTYPES = ("float32", "float16", "bfloat16")
# Control tokens that end a turn, should the file name only the end of the text.
_END_OF_TURN = frozenset({"<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eom_id|>"})
_CONTROL = 3


def spec_of_gguf(file: GGUFFile, name: str) -> ModelSpec:
    """The spec of an opened GGUF file.

    Raises:
        ModelError: an architecture that is not supported (lists those that are), or metadata that are missing or out of range.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(f"{file.path}: GGUF architecture {arch!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    prefix = f"{arch}."
    fields = Fields({k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}, file.path, prefix)
    hidden, layers = fields.count("embedding_length"), fields.count("block_count")
    kinds = _layer_kinds(fields, arch, layers)
    attention = _attention(file, fields, arch, hidden, kinds)
    rope, max_len = _rope(file, fields, attention.head_dim)
    formats = _formats(file)
    extra: dict[str, Any] = {}
    if arch == "gemma3":
        local = RopeSpec(theta=fields.number("rope.freq_base_swa", GEMMA_LOCAL_THETA), dim=rope.dim)
        extra["sliding_rope"] = msgspec.to_builtins(local)
    return ModelSpec(
        name=name,
        family=ARCHITECTURES[arch],
        vocab_size=_vocab_size(file, hidden),
        hidden=hidden,
        num_layers=layers,
        max_len=max_len,
        attention=attention,
        mlp=MLPSpec(intermediate=fields.count("feed_forward_length"), activation="gelu_tanh" if arch == "gemma3" else "silu"),
        rope=rope,
        layer_kinds=kinds,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-5),
        tied="output.weight" not in file.tensors,
        dtype=_dtype(formats),
        weight_format="gguf",
        bos_token_id=_token_id(file, "bos"),
        eos_token_ids=_eos_ids(file),
        embedding_scale=float(hidden) ** 0.5 if arch == "gemma3" else 1.0,
        quantization={"quant_method": "gguf", "formats": formats},
        extra=extra,
    )


def _vocab_size(file: GGUFFile, hidden: int) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2 or table.shape[1] != hidden:
        shown = "missing" if table is None else f"of shape {list(table.shape)}"
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is {shown}, but should be [vocabulary, {hidden}]")
    return table.shape[0]


def _uniform(fields: Fields, key: str, default: int | None = None) -> int:
    """A count that newer files may give per layer; only equal ones are supported."""
    value = fields.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ModelError(f"{fields.path}: {key} differs between layers ({sorted(set(value))[:6]}), which is not supported")
        return Fields({key: value[0]}, fields.path).count(key)
    return fields.count(key, default)


def _attention(file: GGUFFile, fields: Fields, arch: str, hidden: int, kinds: tuple[str, ...]) -> AttentionSpec:
    heads = _uniform(fields, "attention.head_count")
    kv_heads = _uniform(fields, "attention.head_count_kv", heads)
    if heads % kv_heads:
        raise ModelError(f"{fields.path}: {heads} attention heads do not divide over {kv_heads} key/value heads")
    head_dim = fields.count("attention.key_length", hidden // heads if hidden % heads == 0 else None)
    if head_dim % 2 or fields.count("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{fields.path}: keys of {head_dim} features: an even number is needed, and values of as many")
    scale_dim = hidden / heads if arch == "gemma3" and (hidden, heads) == _GEMMA_27B else head_dim
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale_dim**-0.5,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        window=fields.count("attention.sliding_window") if "sliding" in kinds else None,
    )


def _layer_kinds(fields: Fields, arch: str, layers: int) -> tuple[str, ...]:
    """Only Gemma windows some layers; other architectures are run without a window by what writes these files."""
    if arch != "gemma3" or not fields.get("attention.sliding_window"):
        return ("full",) * layers
    pattern = fields.get("attention.sliding_window_pattern", _GEMMA_PATTERN)
    if isinstance(pattern, list):  # one flag a layer
        if len(pattern) != layers:
            raise ModelError(f"{fields.path}: attention.sliding_window_pattern has {len(pattern)} entries for {layers} layers")
        return tuple("sliding" if windowed else "full" for windowed in pattern)
    every = fields.count("attention.sliding_window_pattern", _GEMMA_PATTERN)
    return tuple("full" if (i + 1) % every == 0 else "sliding" for i in range(layers))


def _rope(file: GGUFFile, fields: Fields, head_dim: int) -> tuple[RopeSpec, int]:
    """(rule, context after scaling)."""
    length = fields.count("context_length")
    dim = fields.count("rope.dimension_count", head_dim)
    if dim > head_dim or dim % 2:
        raise ModelError(f"{fields.path}: rope.dimension_count is {dim}; an even number up to {head_dim} is needed")
    plain = RopeSpec(theta=fields.number("rope.freq_base", 10_000.0), dim=dim)
    factors = _frequency_factors(file, dim)
    if factors is not None:
        return _from_factors(plain, factors, length), length
    kind = str(fields.get("rope.scaling.type", "linear" if fields.get("rope.scale_linear") else "none"))
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return plain, length
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{fields.path}: RoPE scaling {kind!r} is not supported in GGUF; supported: none, linear, yarn, rope_freqs.weight")
    original = fields.count("rope.scaling.original_context_length", length)
    extra = {
        ours: fields.number(f"rope.scaling.{theirs}", 0.0)
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow"), ("attention_factor", "attn_factor"))
        if fields.get(f"rope.scaling.{theirs}") is not None
    }
    rule = msgspec.structs.replace(plain, scaling=kind, factor=factor, original_max_len=original, extra=extra)
    return rule, max(length, int(original * factor)) if kind == "yarn" else length


def _frequency_factors(file: GGUFFile, dim: int) -> tuple[float, ...] | None:
    """What each rotary frequency is divided by, if the file stores it."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.format != "float32" or tensor.shape != (dim // 2,):
        raise ModelError(f"{file.path}: rope_freqs.weight is {tensor.format} {list(tensor.shape)}, but float32 [{dim // 2}] is needed")
    with tensor.path.open("rb") as stream:
        stream.seek(tensor.offset)
        factors = struct.unpack(f"<{dim // 2}f", stream.read(tensor.nbytes))
    if not all(math.isfinite(f) and f > 0 for f in factors):
        raise ModelError(f"{file.path}: rope_freqs.weight holds numbers that are not positive: corrupt file, fetch it again")
    return factors


def _from_factors(plain: RopeSpec, factors: tuple[float, ...], length: int) -> RopeSpec:
    """Llama 3's rule if its published constants give these factors; else the factors themselves, at every length."""
    for original in (8192, length):
        rule = msgspec.structs.replace(plain, scaling="llama3", factor=round(max(factors), 3), original_max_len=original)
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(_llama3_factors(rule), factors, strict=True)):
            return rule
    extra = {"short_factor": list(factors), "long_factor": list(factors), "attention_factor": 1.0}
    return msgspec.structs.replace(plain, scaling="longrope", original_max_len=length, extra=extra)


def _llama3_factors(rule: RopeSpec) -> list[float]:
    """What Llama 3's rule divides each frequency by."""
    out = []
    for index in range(rule.dim // 2):
        wavelength = 2 * math.pi * rule.theta ** (2 * index / rule.dim)
        turns = rule.original_max_len / wavelength
        if turns > rule.high_freq_factor:
            out.append(1.0)
        elif turns < rule.low_freq_factor:
            out.append(rule.factor)
        else:
            smooth = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
            out.append(1 / ((1 - smooth) / rule.factor + smooth))
    return out


def _formats(file: GGUFFile) -> dict[str, int]:
    """Bytes of tensors in each format, largest first."""
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.format] += tensor.nbytes
    return dict(sizes.most_common())


def _dtype(formats: dict[str, int]) -> str:
    """The plain type that holds the model without loss; bfloat16 for packed blocks."""
    main = next(iter(formats), "float32")
    return main if main in _PLAIN_DTYPES and FORMATS[main][0] == 1 else "bfloat16"


def _token_id(file: GGUFFile, which: str) -> int | None:
    return Fields(file.metadata, file.path).optional_id(f"tokenizer.ggml.{which}_token_id")


def _eos_ids(file: GGUFFile) -> tuple[int, ...]:
    ids = [i for which in ("eos", "eot", "eom") if (i := _token_id(file, which)) is not None]
    tokens, types = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        ids += [i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL and token in _END_OF_TURN]
    return tuple(dict.fromkeys(ids))
