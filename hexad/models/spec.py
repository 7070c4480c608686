"""What a model is, as data: read from config.json or GGUF metadata by `models/catalog.py`. No torch.

Everything that sizes memory or chooses operators is decided from a `ModelSpec` alone, before any weight is read.
"""

from __future__ import annotations

from typing import Any

import msgspec

DTYPE_BYTES: dict[str, float] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "float8_e5m2": 1, "int8": 1, "int4": 0.5,
}  # fmt: skip


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al. 2021) and its scaling rule."""

    theta: float = 10_000.0
    dim: int = 0  # rotated features a head (<= head_dim)
    interleaved: bool = False  # False: halves are paired (NeoX order, what checkpoints of Hugging Face use)
    scaling: str = "none"  # none | linear | llama3 | yarn | dynamic | longrope
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_len: int = 0  # llama3, yarn, dynamic, longrope
    extra: dict[str, Any] = {}  # what else a rule needs (beta_fast, short_factor, ...)


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Self-attention of one layer kind."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # multiplies q.k
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k before RoPE
    window: int | None = None  # keys visible to a query of a "sliding" layer, itself included
    logit_softcap: float | None = None


class MLPSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Feed-forward block of a layer."""

    intermediate: int
    activation: str = "silu"  # silu | gelu | gelu_tanh | relu
    gated: bool = True
    bias: bool = False


class MoESpec(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture of experts in place of the MLP."""

    experts: int
    experts_per_token: int
    intermediate: int  # of one expert
    shared_intermediate: int = 0
    norm_topk: bool = True


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `layer_kinds[i]` is "full" or "sliding" for layer i."""

    name: str  # what users call it, e.g. the folder's name
    family: str  # registry key of models/families, e.g. "llama"
    stack: str = "decoder"  # decoder | encoder | encoder_decoder
    vocab_size: int  # rows of the embedding, padding included
    hidden: int
    num_layers: int
    max_len: int  # trained context, after RoPE scaling
    attention: AttentionSpec
    mlp: MLPSpec
    rope: RopeSpec | None
    layer_kinds: tuple[str, ...]
    norm_eps: float = 1e-5
    tied: bool = False  # the output head is the embedding
    moe: MoESpec | None = None
    dtype: str = "bfloat16"  # as stored
    weight_format: str = "plain"  # plain | gguf | fp8 | awq | gptq | ...
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    embedding_scale: float = 1.0  # multiplies embeddings (Gemma)
    final_softcap: float | None = None
    quantization: dict[str, Any] = {}  # the checkpoint's own quantization_config
    extra: dict[str, Any] = {}  # family-specific differences

    @property
    def kv_layer_groups(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(kind, layer indices) of each KV group; groups have equal numbers of layers, so that one page size serves all.

        With a mixed model (say 20 sliding and 4 full layers) the group size is the greatest common divisor, here 4: five sliding
        groups and one full one.
        """
        import math

        if self.stack == "encoder":
            return ()
        by_kind: dict[str, list[int]] = {}
        for index, kind in enumerate(self.layer_kinds):
            by_kind.setdefault(kind, []).append(index)
        size = math.gcd(*(len(layers) for layers in by_kind.values()))
        return tuple((kind, tuple(layers[i : i + size])) for kind, layers in sorted(by_kind.items()) for i in range(0, len(layers), size))

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of keys and values of one token over all layers (no window taken into account)."""
        scale = 4 if kv_dtype == "int8" else 0  # of each head
        per_layer = 2 * self.attention.kv_heads * (self.attention.head_dim * DTYPE_BYTES[kv_dtype] + scale)
        return int(self.num_layers * per_layer)
