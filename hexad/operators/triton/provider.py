"""Registers the Triton kernels as providers, if Triton is installed. Importing this module needs neither Triton nor a GPU."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

import hexad.operators.fused  # noqa: F401  (defines the composite operators)
from hexad.operators.args import ActArgs, AttentionArgs, BestTokenArgs, DrawArgs, LinearArgs, NormArgs, RopeKVArgs
from hexad.operators.fused import FusedLinearArgs
from hexad.operators.registry import Kernel, Provider, registry

HALVES = (torch.bfloat16, torch.float16)
WIDTHS = (*HALVES, torch.float32)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def _common(args: Any, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """Reasons that hold for every kernel here."""
    reasons = _card_reasons(args)
    if args.dtype not in dtypes:
        reasons.append(f"dtype {args.dtype} is not one of {', '.join(str(d).removeprefix('torch.') for d in dtypes)}")
    return reasons


def _card_reasons(args: Any) -> list[str]:
    """Reasons in the machine."""
    reasons = []
    if args.device_type != "cuda":
        reasons.append(f"tensors are on {args.device_type}, not on cuda")
    elif torch.version.hip is not None:
        reasons.append("these kernels were written for NVIDIA cards")
    elif torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        reasons.append("the card is older than compute capability 8.0")
    return reasons


def norm_reasons(args: NormArgs) -> list[str]:
    reasons = _common(args, WIDTHS)
    if args.hidden > 65536:
        reasons.append(f"rows of {args.hidden} are over 65536")
    return reasons


def rope_reasons(args: RopeKVArgs) -> list[str]:
    reasons = _common(args, WIDTHS)
    if args.head_dim > 256:
        reasons.append(f"head size {args.head_dim} is over 256")
    if args.kv_dtype == torch.int8:
        reasons.append("int8 pages (codes and a scale a head) are written on CPUs alone")
    return reasons


def act_reasons(args: ActArgs) -> list[str]:
    reasons = _common(args, WIDTHS)
    if args.activation not in ACTIVATIONS:
        reasons.append(f"activation {args.activation!r} is not one of {', '.join(ACTIVATIONS)}")
    return reasons


def best_token_reasons(args: BestTokenArgs) -> list[str]:
    return _common(args, WIDTHS)


def draw_reasons(args: DrawArgs) -> list[str]:
    reasons = _card_reasons(args)
    if args.vocab_size > 2**20:
        reasons.append(f"{args.vocab_size} tokens are over {2**20}: their weights sum to more than the kernel compares exactly")
    return reasons


def linear_reasons(args: LinearArgs | FusedLinearArgs) -> list[str]:
    reasons = _common(args, HALVES)
    if args.in_features % 8:
        reasons.append(f"{args.in_features} inputs are not a multiple of 8")
    return reasons


def gated_reasons(args: FusedLinearArgs) -> list[str]:
    reasons = linear_reasons(args)
    if args.activation not in ACTIVATIONS:
        reasons.append(f"activation {args.activation!r} is not one of {', '.join(ACTIVATIONS)}")
    return reasons


def attention_reasons(args: AttentionArgs) -> list[str]:
    reasons = _common(args, WIDTHS)
    if args.kv_dtype not in (args.dtype, torch.float8_e4m3fn):
        reasons.append(f"pages in {args.kv_dtype} with queries in {args.dtype}: they need {args.dtype} or float8_e4m3fn")
    if reasons:  # a machine without a GPU never imports Triton
        return reasons
    shapes: list[str] = importlib.import_module("hexad.operators.triton.attention").attention_reasons(args)
    return shapes


def _later(module: str, name: str) -> Callable[[Any], Kernel]:
    """A `bind` that imports Triton only when something is bound."""

    def bind(args: Any) -> Kernel:
        kernel: Kernel = getattr(importlib.import_module(f"hexad.operators.triton.{module}"), name)(args)
        return kernel

    return bind


def _register() -> None:
    kernels: tuple[tuple[str, str, str, Callable[[Any], list[str]]], ...] = (
        ("rms_norm", "rows", "bind_rms_norm", norm_reasons),
        ("add_rms_norm", "rows", "bind_add_rms_norm", norm_reasons),
        ("gated_act", "rows", "bind_gated_act", act_reasons),
        ("silu_mul", "rows", "bind_gated_act", act_reasons),
        ("rope_kv_write", "rope_kv", "bind_rope_kv_write", rope_reasons),
        ("paged_attention", "attention", "bind_paged_attention", attention_reasons),
        ("best_token", "argmax", "bind_best_token", best_token_reasons),
        ("draw", "draw", "bind_draw", draw_reasons),
        ("token_ranks", "ranks", "bind_token_ranks", draw_reasons),
        ("linear", "linear", "bind_linear", linear_reasons),
        ("gated_linear", "linear", "bind_gated_linear", gated_reasons),
        ("linear_add", "linear", "bind_linear_add", linear_reasons),
    )
    for op, module, name, reasons in kernels:
        registry.register(Provider(op, "triton", _later(module, name), reasons, priority=50))


if importlib.util.find_spec("triton") is not None:
    _register()
