"""Self-attention of a decoder layer: merged QKV, rotation with the KV write, paged attention, output projection."""

from __future__ import annotations

import torch

from hexad.models.inputs import LastTokens
from hexad.models.layers.context import BuildContext, KVContext
from hexad.operators.args import AttentionArgs, RopeKVArgs
from hexad.operators.batch import AttentionBatch, KVPages


class Attention:
    """One layer's self-attention. Reads and writes the pages it is given, nothing else."""

    def __init__(self, context: BuildContext, index: int, cos_sin: torch.Tensor) -> None:
        spec, family = context.spec.attention, context.family
        q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        names = tuple(context.layer_name(index, name) for name in family.qkv)
        self.qkv = context.linear(names, q_size + 2 * kv_size, context.spec.hidden, bias=spec.qkv_bias)
        self.out = context.linear((context.layer_name(index, family.attention_out),), context.spec.hidden, q_size, bias=spec.out_bias)
        self.q_norm = context.vector(context.layer_name(index, family.q_norm), spec.head_dim) if spec.qk_norm else None
        self.k_norm = context.vector(context.layer_name(index, family.k_norm), spec.head_dim) if spec.qk_norm else None
        self.cos_sin = cos_sin
        self.rope_kv_write = context.bind("rope_kv_write", rope_args(context)).call
        self.paged_attention = context.bind("paged_attention", attention_args(context, index)).call

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, kv: KVPages, last: LastTokens | None = None
    ) -> torch.Tensor:
        """x [T, H] -> [T, H], or [S, H] of `last`."""
        return self.out.apply(self.attend(self.qkv.apply(x), positions, batch, kv, last))

    def attend(
        self, qkv: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, kv: KVPages, last: LastTokens | None = None
    ) -> torch.Tensor:
        """qkv [T, (Hq + 2 Hkv) * D] -> [T, Hq * D], before the output projection; with `last` [S, Hq * D], all keys and values written."""
        q = self.rope_kv_write(qkv, positions, self.cos_sin, batch.slots, kv, self.q_norm, self.k_norm)
        if last is not None:
            q, batch = last.pick(q), last.attention
            if not len(q):
                return q.flatten(1)
        mixed: torch.Tensor = self.paged_attention(q, kv, batch)
        return mixed


def rope_args(context: KVContext) -> RopeKVArgs:
    spec, rope = context.spec.attention, context.spec.rope
    return RopeKVArgs(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        rotary_dim=rope.dim if rope is not None else 0,
        interleaved=rope is not None and rope.interleaved,
        qk_norm=spec.qk_norm,
        eps=context.spec.norm_eps,
        dtype=context.dtype,
        kv_dtype=context.kv_dtype,
        device_type=context.device.type,
    )


def attention_args(context: KVContext, index: int) -> AttentionArgs:
    spec = context.spec.attention
    return AttentionArgs(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        window=spec.window if context.spec.layer_kinds[index] == "sliding" else None,
        softcap=spec.logit_softcap,
        block_size=context.block_size,
        dtype=context.dtype,
        kv_dtype=context.kv_dtype,
        device_type=context.device.type,
    )
