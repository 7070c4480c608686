"""Build a network from a spec and a store of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from hexad.common.errors import ModelError
from hexad.models.decoder import DecoderModel
from hexad.models.families.family import find_family
from hexad.models.inputs import ForwardInputs
from hexad.models.layers.context import BuildContext
from hexad.models.loader import WeightStore
from hexad.models.quant.packed import PackedScheme, packs_here
from hexad.models.quant.plain import PlainScheme
from hexad.models.quant.scheme import Scheme
from hexad.models.served import CHECKPOINTS, check_quantization, unserved_model
from hexad.models.spec import ModelSpec
from hexad.operators.batch import KVPages
from hexad.operators.load import load_operators

DEFAULT_BLOCK_SIZE = 16


class Model(Protocol):
    """What the engine's runner needs of a network."""

    spec: ModelSpec
    weight_bytes: int  # what stays resident, shared tensors counted once
    picks_last: bool  # `ForwardInputs.last` is served

    def forward(self, inputs: ForwardInputs, kv_layers: list[KVPages]) -> torch.Tensor:
        """One step's tokens -> hidden states [T, H], or [S, H] of `inputs.last`; writes keys and values of all (one `KVPages` per layer, in
        layer order)."""
        ...

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [R, H] -> [R, vocab] float32, in `out` if it is given."""
        ...

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> [R, vocab] of any dtype, with the same best tokens as the logits: all that a greedy choice needs."""
        ...


def build_model(
    spec: ModelSpec,
    store: WeightStore,
    dtype: torch.dtype,
    device: torch.device,
    prefer: Mapping[str, str] | None = None,
    *,
    kv_dtype: torch.dtype | None = None,
    block_size: int = DEFAULT_BLOCK_SIZE,
    max_len: int | None = None,
    quantization: str | None = None,
) -> Model:
    """Read every parameter and bind every operator.

    Args:
        prefer: forced operator providers, `{"paged_attention": "torch"}`.
        kv_dtype: of the pages; default: `dtype`.
        block_size: tokens a page.
        max_len: longest sequence served; default: the checkpoint's context.
        quantization: round weights to this while they are read (models/quant/rounding.py).

    Raises:
        WeightsError: a tensor is missing, misshapen or left over.
        ModelError: no stack or family here supports the model.
        ConfigError: a forced provider cannot serve it, or there is no such quantization here.
    """
    unserved = unserved_model(spec)
    if unserved is not None:
        raise ModelError(f"{spec.name} {unserved}")
    check_quantization(quantization, device.type)
    load_operators()
    family = find_family(spec.family)
    context = BuildContext(
        spec=spec,
        family=family,
        store=store,
        scheme=_scheme(spec, dtype, device, prefer, quantization, (family.embedding, family.head)),
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype or dtype,
        block_size=block_size,
        prefer=prefer,
    )
    with torch.inference_mode():
        model = DecoderModel(context, max_len or spec.max_len)
    store.finish()
    return model


def _scheme(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    prefer: Mapping[str, str] | None,
    quantization: str | None,
    tables: tuple[str, ...],
) -> Scheme:
    if spec.weight_format not in CHECKPOINTS:
        raise ModelError(f"{spec.name} has weights in the format {spec.weight_format!r}; supported: plain, gguf (dequantised)")
    if quantization is not None:  # without packed products the rounded numbers are kept as plain ones
        return PackedScheme(prefer, quantization, tables)
    return PackedScheme(prefer) if packs_here(dtype, device, prefer) else PlainScheme(prefer)
