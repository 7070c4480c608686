"""The decoder stack: one network for every decoder-only family, driven by a `ModelSpec`."""

from __future__ import annotations

import msgspec
import torch

from hexad.models.inputs import ForwardInputs, LastTokens
from hexad.models.layers.attention import Attention
from hexad.models.layers.context import BuildContext
from hexad.models.layers.fused import FusedLayer, fuse
from hexad.models.layers.mlp import MLP
from hexad.models.layers.rope import rope_table
from hexad.models.layers.stack import bind_stack
from hexad.models.spec import RopeSpec
from hexad.operators.args import NormArgs
from hexad.operators.batch import AttentionBatch, KVPages


class DecoderLayer:
    """Pre-norm block; the residual travels beside the activations so that each addition fuses with the norm after it."""

    def __init__(self, context: BuildContext, index: int, cos_sin: torch.Tensor) -> None:
        spec, family = context.spec, context.family
        norm = NormArgs(spec.hidden, spec.norm_eps, context.dtype, context.device.type)
        self.add_norm = context.bind("add_rms_norm", norm).call
        self.input_norm = context.vector(context.layer_name(index, family.input_norm), spec.hidden)
        self.attention = Attention(context, index, cos_sin)
        self.post_attention_norm = context.vector(context.layer_name(index, family.post_attention_norm), spec.hidden)
        self.mlp = MLP(context, index)
        self.rms_norm = context.bind("rms_norm", norm).call
        self.attention_out_norm, self.down_norm = (
            context.vector(context.layer_name(index, name), spec.hidden) if name else None
            for name in (family.attention_out_norm, family.down_norm)
        )
        plain = self.attention_out_norm is None and self.down_norm is None
        self.fused = fuse(self.rms_norm, self.attention, self.mlp, self.input_norm, self.post_attention_norm) if plain else None

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        kv: KVPages,
        last: LastTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed x [T, H], residual [T, H]) -> (output not yet added to the residual, residual), both [S, H] of `last` if it is given."""
        x = self.attention(x, positions, batch, kv, last)
        if last is not None:
            residual = last.pick(residual)
            if not len(residual):
                return residual, residual
        if self.attention_out_norm is not None:
            x = self.rms_norm(x, self.attention_out_norm)
        x, residual = self.add_norm(x, residual, self.post_attention_norm)
        x = self.mlp(x)
        return (x if self.down_norm is None else self.rms_norm(x, self.down_norm)), residual


class DecoderModel:
    """Embedding, layers, final norm, head. Holds parameters alone: keys and values come with each call, nothing is kept between calls."""

    def __init__(self, context: BuildContext, max_len: int) -> None:
        spec = context.spec
        self.spec = spec
        self.embedding = context.embedding()
        tables = _positions_tables(context, max_len)
        self.layers = [DecoderLayer(context, index, tables[kind]) for index, kind in enumerate(spec.layer_kinds)]
        norm = NormArgs(spec.hidden, spec.norm_eps, context.dtype, context.device.type)
        self.norm = context.bind("rms_norm", norm).call
        self.add_norm = context.bind("add_rms_norm", norm).call
        self.final_norm = context.vector(context.family.final_norm, spec.hidden)
        self.head = context.head()
        self.weight_bytes = context.weight_bytes + sum(table.nbytes for table in {id(table): table for table in tables.values()}.values())
        self._group_of_layer = _group_of_layer(context)
        self._following_norms = [layer.input_norm for layer in self.layers[1:]] + [self.final_norm]
        fused = [layer.fused for layer in self.layers if layer.fused is not None]
        self._fused = fused if len(fused) == len(self.layers) else None
        self._stack = bind_stack(context, self.embedding, self.layers, self.final_norm, self._group_of_layer, max_len)
        self.picks_last = True  # `ForwardInputs.last` is served
        self._head = getattr(self.head, "apply_float32", self.head.apply)  # logits need no rounding on the way

    def forward(self, inputs: ForwardInputs, kv_layers: list[KVPages]) -> torch.Tensor:
        """Compute one step's tokens: hidden states after the final norm, [T, H] or [S, H] of `inputs.last`.

        Writes the keys and values of all to `kv_layers`. With `last` the last layer's attention and MLP are computed for those tokens
        alone: nothing reads what it would give for others.
        """
        if self._stack is not None:
            wanted = None if inputs.last is None else inputs.last[0].index
            return self._stack(inputs.token_ids, inputs.positions, inputs.attention, kv_layers, inputs.starting, wanted)
        residual = self.embedding.apply(inputs.token_ids)  # [T, H]
        if self.spec.embedding_scale != 1.0:
            residual = residual * self.spec.embedding_scale
        if self._fused is not None:
            return self._forward_fused(self._fused, residual, inputs, kv_layers)
        x: torch.Tensor = self.norm(residual, self.layers[0].input_norm)
        positions, groups, add_norm = inputs.positions, inputs.attention, self.add_norm
        for layer, group, following, kv in zip(self.layers, self._group_of_layer, self._following_norms, kv_layers, strict=True):
            last = None if inputs.last is None or layer is not self.layers[-1] else inputs.last[group]
            x, residual = layer(x, residual, positions, groups[group], kv, last)
            if len(x):
                x, residual = add_norm(x, residual, following)
        return x

    def _forward_fused(self, layers: list[FusedLayer], h: torch.Tensor, inputs: ForwardInputs, kv_layers: list[KVPages]) -> torch.Tensor:
        positions, groups = inputs.positions, inputs.attention
        for layer, group, kv in zip(layers, self._group_of_layer, kv_layers, strict=True):
            last = None if inputs.last is None or layer is not layers[-1] else inputs.last[group]
            h = layer(h, positions, groups[group], kv, last)
        normed: torch.Tensor = self.norm(h, self.final_norm) if len(h) else h
        return normed

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [R, H] -> logits [R, vocab] float32, in `out` if it is given."""
        logits: torch.Tensor = self._head(hidden)
        logits = logits.float() if out is None else out.copy_(logits)
        softcap = self.spec.final_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> [R, vocab] of any dtype, with the same best tokens as the logits (a cap may make several equal)."""
        scores: torch.Tensor = self._head(hidden) if self.spec.final_softcap is None else self.logits(hidden)
        return scores


def _positions_tables(context: BuildContext, max_len: int) -> dict[str, torch.Tensor]:
    """The rotary table of each kind of layer; kinds with one rule share theirs."""
    rope, sliding = context.spec.rope, context.spec.extra.get("sliding_rope")
    if rope is None:
        table = torch.empty(0, dtype=torch.float32, device=context.device)
    else:
        table = rope_table(rope, max_len, context.spec.max_len, context.device)
    if sliding is None or "sliding" not in context.spec.layer_kinds:
        return {"full": table, "sliding": table}
    rule = msgspec.convert(sliding, RopeSpec)
    return {"full": table, "sliding": rope_table(rule, max_len, context.spec.max_len, context.device)}


def _group_of_layer(context: BuildContext) -> list[int]:
    """KV group of each layer, in layer order."""
    of_layer = {layer: group for group, (_kind, layers) in enumerate(context.spec.kv_layer_groups) for layer in layers}
    return [of_layer[layer] for layer in range(context.spec.num_layers)]
