"""Gemma 3 (text): norms behind attention and MLP as well as before them, stored less one; q and k normed per head."""

from hexad.models.families.family import DecoderFamily

FAMILY = DecoderFamily(
    "gemma3",
    attention_out_norm="post_attention_layernorm.weight",
    post_attention_norm="pre_feedforward_layernorm.weight",
    down_norm="post_feedforward_layernorm.weight",
    norm_offset=1.0,
)
