"""Qwen2 and 2.5: Llama with biases on q, k and v (`AttentionSpec.qkv_bias`)."""

from hexad.models.families.family import DecoderFamily

FAMILY = DecoderFamily("qwen2")
