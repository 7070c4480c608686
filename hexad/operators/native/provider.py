"""Registers the native operators: `packed_linear` and the whole `decoder_stack`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from hexad.operators.native.draw import bind_draw, bind_token_ranks, supports_draw
from hexad.operators.native.library import BLOCKS, DTYPES, MAX_PARTS, SOURCES, PackedWeight, probe, require
from hexad.operators.native.stack import bind_stack, prepare_stack, supports_stack
from hexad.operators.packed import PackedLinearArgs, PackedParams, StoredRows
from hexad.operators.registry import Kernel, Provider, registry

ROWS_AT_ONCE = 8_192  # stored rows that are gathered at a time: bounds what packing needs beside its result

MAX_PADDING = 1.125  # plain weights grow by at most this, else they stay plain


def supports_linear(args: PackedLinearArgs) -> list[str]:
    if args.device_type != "cpu":
        return [f"needs a CPU, not {args.device_type}"]
    formats = args.format.split("+")
    reasons = [f"packs {', '.join(SOURCES)}, not {name}" for name in formats if name not in SOURCES]
    if len(formats) > MAX_PARTS:
        reasons.append(f"joins at most {MAX_PARTS} formats, not {len(formats)}")
    if "float32" in formats or ("bfloat16" in formats and args.dtype == torch.float32):
        reasons.append("plain weights are kept in bfloat16, which serves bfloat16 activations alone")
    blocks = {name: BLOCKS[name] for name in formats if args.in_features % BLOCKS.get(name, 1)}
    reasons += [f"{name} comes in blocks of {block} columns, not rows of {args.in_features}" for name, block in blocks.items()]
    padded = -(-args.in_features // 32) * -(-args.out_features // 16) * 512
    if args.format == "bfloat16" and padded > MAX_PADDING * args.in_features * args.out_features:
        reasons.append(f"{args.out_features} x {args.in_features} numbers would be padded to {padded}")
    if args.dtype not in DTYPES or args.out_dtype not in DTYPES:
        reasons.append(f"needs float32 or bfloat16, not {args.dtype} and {args.out_dtype}")
    return reasons or _missing()


def _missing() -> list[str]:
    """Asked last: it may compile."""
    library, reason = probe()
    return [] if library is not None else [reason]


def prepare_linear(args: PackedLinearArgs, params: PackedParams) -> PackedWeight:
    rows, bias = params
    require().set_threads(torch.get_num_threads())
    weight: PackedWeight | None = None
    for name, parts in itertools.groupby(rows, lambda part: part.format):
        packed = _pack(name, list(parts), args.in_features)
        if weight is None:
            weight = packed
        else:
            weight.append(packed)
    assert weight is not None and weight.out_features == args.out_features
    if bias is not None:
        weight.set_bias(bias)
    return weight


def _pack(source: str, parts: list[StoredRows], in_features: int) -> PackedWeight:
    weight = PackedWeight(source, sum(part.shape[0] for part in parts), in_features)
    first = 0
    for part in parts:
        stored, found = part.raw()
        assert found == source, (found, source)
        for low in range(0, part.shape[0], ROWS_AT_ONCE):
            weight.fill(first + low, stored[low : low + ROWS_AT_ONCE])
        first += part.shape[0]
    return weight


def bind_linear(args: PackedLinearArgs) -> Kernel:
    out_dtype = args.out_dtype

    def packed_linear(x: torch.Tensor, prepared: PackedWeight) -> torch.Tensor:
        return prepared.linear(x, out_dtype)

    return packed_linear


def _register(op: str, bind: Callable, supports: Callable, prepare: Callable) -> None:
    registry.register(Provider(op, "native", bind, supports, prepare, priority=20))


_register("packed_linear", bind_linear, supports_linear, prepare_linear)
_register("decoder_stack", bind_stack, supports_stack, prepare_stack)
registry.register(Provider("draw", "native", bind_draw, supports_draw, priority=20))
registry.register(Provider("token_ranks", "native", bind_token_ranks, supports_draw, priority=20))
