"""Hexad: a complete LLM inference system, from the hardware's limits to a production API.

`import hexad` loads nothing heavy: the names below are resolved on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hexad.common.version import __version__

__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from hexad.common.params import SamplingParams
    from hexad.llm import LLM


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from hexad.llm import LLM

        return LLM
    if name == "SamplingParams":
        from hexad.common.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'hexad' has no attribute {name!r}")
