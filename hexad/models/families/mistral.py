"""Mistral: Llama with a sliding window in every layer where the checkpoint sets one (`AttentionSpec.window`, kind "sliding")."""

from hexad.models.families.family import DecoderFamily

FAMILY = DecoderFamily("mistral")
