"""`decoder_stack(token_ids [T], positions [T], groups, kv_layers, prepared, starting=None, last=None) -> [T, H]`: all but the head.

The largest composite operator: where a provider has it, a step is one call and costs the interpreter nothing. `prepare(args, StackParams)`
keeps what it needs; `groups` has one `AttentionBatch` per KV group, `kv_layers` one `KVPages` per layer, in layer order. Keys and values of
the step are written to the pages. With `last` ([S] int64, ascending) the hidden states of those tokens alone are wanted: [S, H]. A provider
may keep hidden states in float32 where the reference rounds them to `dtype`, and calls `starting` just before it leaves the interpreter
for good.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hexad.operators.activation import ACTIVATIONS, gated_act_reference
from hexad.operators.args import ActArgs, AttentionArgs, NormArgs, RopeKVArgs
from hexad.operators.attention import paged_attention_reference
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.norm import add_rms_norm_reference, rms_norm_reference
from hexad.operators.registry import Kernel, registry
from hexad.operators.rope import rope_kv_write_reference


@dataclass(frozen=True)
class StackArgs:
    """A pre-norm decoder with merged QKV and gate-up products."""

    hidden: int
    intermediate: int
    activation: str
    gated: bool
    rope: RopeKVArgs
    attention: AttentionArgs  # `window` is that of the layers named in `windowed`
    windowed: tuple[bool, ...]  # per layer
    kv_group: tuple[int, ...]  # per layer
    eps: float
    embedding_scale: float
    max_len: int  # positions in the rotary table; also where nothing turns
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True)
class Product:
    """One linear layer (or the embedding's look-up): how to call it, and what a provider of packed products made of it."""

    apply: Callable[[torch.Tensor], torch.Tensor]
    packed: Any = None


@dataclass(frozen=True)
class LayerParams:
    """One layer. Vectors are in the compute dtype."""

    qkv: Product
    attention_out: Product
    gate_up: Product
    down: Product
    input_norm: torch.Tensor
    post_attention_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    cos_sin: torch.Tensor  # [max_len, R] float32; layers of one rule share theirs
    attention_out_norm: torch.Tensor | None = None  # of what attention adds to the hidden state
    down_norm: torch.Tensor | None = None  # of what the MLP adds


@dataclass(frozen=True)
class StackParams:
    """The whole network but its head."""

    embedding: Product
    layers: Sequence[LayerParams]
    final_norm: torch.Tensor


def decoder_stack_reference(args: StackArgs) -> Kernel:
    norms = NormArgs(args.hidden, args.eps, args.dtype, args.device_type)
    norm, add_norm = rms_norm_reference(norms), add_rms_norm_reference(norms)
    act = _activation(args)
    rope = rope_kv_write_reference(args.rope)
    full = paged_attention_reference(_windowed(args.attention, None))
    sliding = paged_attention_reference(args.attention)

    def decoder_stack(
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        groups: Sequence[AttentionBatch],
        kv_layers: Sequence[KVPages],
        prepared: StackParams,
        starting: Callable[[], None] | None = None,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        residual = prepared.embedding.apply(token_ids) * args.embedding_scale  # [T, H]
        branch = torch.zeros_like(residual)
        for layer, group, windowed, kv in zip(prepared.layers, args.kv_group, args.windowed, kv_layers, strict=True):
            batch = groups[group]
            x, residual = add_norm(branch, residual, layer.input_norm)
            q = rope(layer.qkv.apply(x), positions, layer.cos_sin, batch.slots, kv, layer.q_norm, layer.k_norm)
            mixed = (sliding if windowed else full)(q, kv, batch)
            attended = layer.attention_out.apply(mixed)
            if layer.attention_out_norm is not None:
                attended = norm(attended, layer.attention_out_norm)
            x, residual = add_norm(attended, residual, layer.post_attention_norm)
            branch = layer.down.apply(act(layer.gate_up.apply(x)))
            if layer.down_norm is not None:
                branch = norm(branch, layer.down_norm)
        hidden = residual + branch
        out: torch.Tensor = norm(hidden if last is None else hidden.index_select(0, last), prepared.final_norm)
        return out

    return decoder_stack


def _activation(args: StackArgs) -> Kernel:
    if not args.gated:
        return ACTIVATIONS[args.activation]
    return gated_act_reference(ActArgs(args.intermediate, args.activation, args.dtype, args.device_type))


def _windowed(args: AttentionArgs, window: int | None) -> AttentionArgs:
    return dataclasses.replace(args, window=window)


registry.define("decoder_stack", decoder_stack_reference)
