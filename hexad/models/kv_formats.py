"""Which number formats a model's keys and values may have on a device: those that the operators that write and read them support."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hexad.common.errors import ConfigError
from hexad.models.layers.attention import attention_args, rope_args
from hexad.models.spec import ModelSpec
from hexad.operators.kv_int8 import PAGE_DTYPES
from hexad.operators.load import load_operators
from hexad.operators.registry import registry


@dataclass(frozen=True)
class _Pages:
    """A `KVContext`."""

    spec: ModelSpec
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    block_size: int


def find_kv_dtype(name: str, spec: ModelSpec, dtype: torch.dtype, device: torch.device, block_size: int) -> torch.dtype:
    """What `--kv-cache-dtype` means for a model that computes in `dtype`.

    Raises:
        ConfigError: there is no such format, or no provider of the operators serves it on `device`.
    """
    if name == "auto":
        return dtype
    load_operators()
    refused = {known: _reasons(_Pages(spec, dtype, kv_dtype, device, block_size)) for known, kv_dtype in PAGE_DTYPES.items()}
    if name in refused and not refused[name]:
        return PAGE_DTYPES[name]
    why = f": {'; '.join(refused[name])}" if name in refused else ""
    served = ", ".join(["auto", *(known for known, reasons in refused.items() if not reasons)])
    raise ConfigError(f"kv_cache_dtype is {name!r} on {device}{why}; keys and values can be kept there as {served}")


def _reasons(pages: _Pages) -> list[str]:
    """Why the operators cannot write and read such pages."""
    kinds = {kind: index for index, kind in enumerate(pages.spec.layer_kinds)}
    found = registry.unserved("rope_kv_write", rope_args(pages))
    for index in kinds.values():
        found += registry.unserved("paged_attention", attention_args(pages, index))
    return list(dict.fromkeys(found))
