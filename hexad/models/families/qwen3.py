"""Qwen3 (dense): no biases, RMSNorm over each head of q and k (`AttentionSpec.qk_norm`)."""

from hexad.models.families.family import DecoderFamily

FAMILY = DecoderFamily("qwen3")
