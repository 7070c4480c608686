"""Llama 1 to 3 and the many models that kept its shape (SmolLM2, TinyLlama, Yi ...): the stack's own defaults."""

from hexad.models.families.family import DecoderFamily

FAMILY = DecoderFamily("llama")
