"""Importing this module defines every operator and registers every provider that this machine may use.

Providers import their libraries inside `supports` or `bind`, so that a missing one only removes a candidate.
"""

from __future__ import annotations

import importlib
import importlib.util

from hexad.operators.registry import Registry, registry

_REFERENCES = ("norm", "rope", "attention", "activation", "linear", "embedding", "best_token", "draw", "token_ranks", "packed", "stack")
_PROVIDERS = ("onednn", "native", "triton", "libraries")  # packages of hexad.operators with a module `provider` that registers on import


def load_operators() -> Registry:
    """Define operators and register providers (idempotent); returns the registry."""
    for name in _REFERENCES:
        importlib.import_module(f"hexad.operators.{name}")
    for package in _PROVIDERS:
        if importlib.util.find_spec(f"hexad.operators.{package}.provider") is not None:
            importlib.import_module(f"hexad.operators.{package}.provider")
    return registry
