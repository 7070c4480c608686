"""GGUF tensor names -> Hugging Face names, and what the conversion to GGUF did to the values. No torch."""

from __future__ import annotations

import re

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma has norms on both sides of each block.
_LAYER_GEMMA = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)\.(weight|bias)$")

# Read by the catalogue into the RoPE rule, or buffers that are computed.
HANDLED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})


def hf_name(gguf_name: str, arch: str) -> str:
    """The Hugging Face name of a GGUF tensor; unknown ones keep their own name (and are reported as left over)."""
    if gguf_name in _TOP:
        return _TOP[gguf_name]
    match = _BLOCK.match(gguf_name)
    table = _LAYER_GEMMA if arch.startswith("gemma") else _LAYER
    if match is None or match[2] not in table:
        return gguf_name
    return f"model.layers.{match[1]}.{table[match[2]]}.{match[3]}"


def rotary_heads(hf: str, arch: str, heads: int, kv_heads: int) -> int:
    """Heads whose rows the conversion interleaved (Llama's q and k), 0 when it left them alone."""
    if arch != "llama":
        return 0
    if ".self_attn.q_proj." in hf:
        return heads
    return kv_heads if ".self_attn.k_proj." in hf else 0


def added_constant(hf: str, arch: str) -> float:
    """What the conversion added to each value: Gemma's norms are stored as 1 + w."""
    return 1.0 if arch.startswith("gemma") and hf.endswith("norm.weight") else 0.0
