"""Static arguments of the operators: what does not change between steps, so that a provider decides and compiles once.

All are frozen and hashable. `device_type` is torch's ("cpu", "cuda"); `dtype` is the compute dtype of activations, `kv_dtype` the pages'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class NormArgs:
    """`rms_norm` and `add_rms_norm` over rows of `hidden` features."""

    hidden: int
    eps: float
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True)
class RopeKVArgs:
    """`rope_kv_write`: (q/k norm,) rotate q and k, write k and v to pages."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int  # the first `rotary_dim` features of a head turn, the rest pass (0: none turn)
    interleaved: bool  # True: features (2i, 2i + 1) are a pair; False: (i, i + rotary_dim / 2)
    qk_norm: bool
    eps: float  # of the q/k norm
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device_type: str


@dataclass(frozen=True)
class AttentionArgs:
    """`paged_attention`: causal attention of ragged rows over paged keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # keys visible to a query, itself included
    softcap: float | None  # scores become softcap * tanh(scores / softcap)
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device_type: str


@dataclass(frozen=True)
class ActArgs:
    """`gated_act` (and `silu_mul`, its silu case) and `act`."""

    intermediate: int
    activation: str  # silu | gelu | gelu_tanh | relu
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True)
class LinearArgs:
    """`linear`: x W^T + b, W [out_features, in_features]."""

    in_features: int
    out_features: int
    bias: bool
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True)
class BestTokenArgs:
    """`best_token`: the largest logit of each row."""

    vocab_size: int  # columns beyond are padding
    dtype: torch.dtype  # of the logits
    device_type: str


@dataclass(frozen=True)
class DrawArgs:
    """`draw` and `token_ranks`: what looks at whole distributions."""

    vocab_size: int
    device_type: str


@dataclass(frozen=True)
class EmbeddingArgs:
    """`embedding`: rows of a table."""

    vocab_size: int
    hidden: int
    dtype: torch.dtype
    device_type: str
