"""Registers attention of installed libraries: FlashAttention 4 (package flash-attn-4) and FlashInfer (flashinfer-python). Both optional.

They stand behind the package's own kernels, which are chosen unless someone says otherwise: `hexad bench kernels --op paged_attention`
times all that serve, and `HEXAD_OPS=paged_attention=flash_attn` (or `operators` in the configuration) takes one. Importing this module
imports neither.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch

from hexad.operators.args import AttentionArgs
from hexad.operators.registry import Kernel, Provider, registry

HALVES = (torch.bfloat16, torch.float16)
LEAST_CAPABILITY = {"flash_attn": (9, 0), "flashinfer": (8, 0)}
MODULES = {"flash_attn": "flash_attn.cute", "flashinfer": "flashinfer"}
PACKAGES = {"flash_attn": "flash-attn-4", "flashinfer": "flashinfer-python"}
PRIORITY = 40  # below the own kernels


@functools.cache
def installed(name: str) -> bool:
    """Whether the library's module is there; it is not imported (the package around it may be)."""
    try:
        return importlib.util.find_spec(MODULES[name]) is not None
    except (ImportError, ValueError):  # an older package of the same name
        return False


def reasons_of(name: str, args: AttentionArgs) -> list[str]:
    """Why the library does not serve this attention here; empty: it does."""
    reasons = []
    if args.device_type != "cuda":
        reasons.append(f"tensors are on {args.device_type}, not on cuda")
    elif torch.version.hip is not None:
        reasons.append("these kernels were written for NVIDIA cards")
    elif torch.cuda.is_available() and torch.cuda.get_device_capability() < LEAST_CAPABILITY[name]:
        reasons.append("the card is older than compute capability {}.{}".format(*LEAST_CAPABILITY[name]))
    if args.dtype not in HALVES:
        reasons.append(f"queries are in {args.dtype}, not in float16 or bfloat16")
    if args.kv_dtype != args.dtype:
        reasons.append(f"pages are in {args.kv_dtype}, queries in {args.dtype}")
    if args.head_dim % 8 or args.head_dim > 256:
        reasons.append(f"head size {args.head_dim} is not a multiple of 8 up to 256")
    if not reasons and not installed(name):
        reasons.append(f"{PACKAGES[name]} is not installed")
    return reasons


def _register(name: str) -> None:
    def bind(args: AttentionArgs) -> Kernel:
        kernel: Kernel = importlib.import_module(f"hexad.operators.libraries.{name}").bind(args)
        return kernel

    def supports(args: AttentionArgs) -> list[str]:
        return reasons_of(name, args)

    registry.register(Provider("paged_attention", name, bind, supports, priority=PRIORITY))


for _name in MODULES:
    _register(_name)
