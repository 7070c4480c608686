"""The whole decoder as the composite operator `decoder_stack`, where a provider other than the reference has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hexad.models.layers.attention import attention_args, rope_args
from hexad.models.layers.context import BuildContext
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.registry import registry
from hexad.operators.stack import LayerParams, Product, StackArgs, StackParams

if TYPE_CHECKING:
    from hexad.models.decoder import DecoderLayer

Starting = Callable[[], None] | None
Stack = Callable[[torch.Tensor, torch.Tensor, Sequence[AttentionBatch], Sequence[KVPages], Starting, torch.Tensor | None], torch.Tensor]


def bind_stack(
    context: BuildContext,
    embedding: Any,
    layers: Sequence[DecoderLayer],
    final_norm: torch.Tensor,
    kv_group: Sequence[int],
    max_len: int,
) -> Stack | None:
    """token ids, positions, KV groups, pages -> hidden states [T, H] after the final norm; None: layer by layer it is.

    The last two arguments are `ForwardInputs.starting` and the places of the tokens that alone are wanted (None: all).
    """
    products = [embedding, *(p for layer in layers for p in _products(layer))]
    if any(getattr(product, "packed", None) is None for product in products):
        return None
    args = _stack_args(context, kv_group, max_len)
    chosen = next(candidate.provider for candidate in registry.explain("decoder_stack", args, context.prefer) if candidate.chosen)
    if chosen == "torch":
        return None
    bound = registry.bind("decoder_stack", args, context.prefer)
    params = StackParams(_product(embedding), [_layer_params(layer) for layer in layers], final_norm)
    call, prepared = bound.call, bound.prepare(params)

    def stack(ids: torch.Tensor, positions: torch.Tensor, groups: Any, kv_layers: Any, starting: Any, last: Any) -> torch.Tensor:
        hidden: torch.Tensor = call(ids, positions, groups, kv_layers, prepared, starting, last)
        return hidden

    return stack


def _products(layer: DecoderLayer) -> tuple[Any, Any, Any, Any]:
    return layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down


def _product(method: Any) -> Product:
    return Product(method.apply, method.packed)


def _layer_params(layer: DecoderLayer) -> LayerParams:
    qkv, out, gate_up, down = (_product(method) for method in _products(layer))
    attention = layer.attention
    return LayerParams(
        qkv=qkv,
        attention_out=out,
        gate_up=gate_up,
        down=down,
        input_norm=layer.input_norm,
        post_attention_norm=layer.post_attention_norm,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        cos_sin=attention.cos_sin,
        attention_out_norm=layer.attention_out_norm,
        down_norm=layer.down_norm,
    )


def _stack_args(context: BuildContext, kv_group: Sequence[int], max_len: int) -> StackArgs:
    spec = context.spec
    windowed = tuple(kind == "sliding" for kind in spec.layer_kinds)
    return StackArgs(
        hidden=spec.hidden,
        intermediate=spec.mlp.intermediate,
        activation=spec.mlp.activation,
        gated=spec.mlp.gated,
        rope=rope_args(context),
        attention=attention_args(context, windowed.index(True) if any(windowed) else 0),
        windowed=windowed,
        kv_group=tuple(kv_group),
        eps=spec.norm_eps,
        embedding_scale=spec.embedding_scale,
        max_len=max_len,
        dtype=context.dtype,
        device_type=context.device.type,
    )
