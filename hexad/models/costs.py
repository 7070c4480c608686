"""What a model costs, from its `ModelSpec` alone: parameters, weight bytes per format, KV bytes, and the work of one step. No torch.

What counts in a step: every linear layer and the output head in their own format, norms and biases; the embedding table is a look-up
and is not streamed (tied, it is streamed once, as the head). The head multiplies only the rows that sample. Attention counts 4 * heads *
head_dim operations for each (query, visible key) pair, in the activation type. A mixture of experts streams the expected number of
distinct experts under uniform routing, E * (1 - (1 - k / E) ** tokens).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hexad.common.errors import ConfigError, nearest
from hexad.hardware.roofline import Work
from hexad.models.formats.stored import FORMATS as STORED_FORMATS
from hexad.models.spec import DTYPE_BYTES, ModelSpec


@dataclass(frozen=True)
class WeightFormat:
    """Bytes of a matrix in one number format, and the kind its products run in."""

    name: str
    weight_bytes: float  # per weight, group scales and zero points included
    row_bytes: float = 0.0  # per output row (per-channel scales)
    compute: str = "bf16"
    table_bytes: float | None = None  # per weight of embedding and output head; None: they are in the model's own dtype


def _blocks(name: str) -> WeightFormat:
    elements, nbytes = STORED_FORMATS[name]
    return WeightFormat(name, nbytes / elements, table_bytes=nbytes / elements)


FORMATS: dict[str, WeightFormat] = {
    f.name: f
    for f in (
        WeightFormat("float32", 4, compute="fp32", table_bytes=4),
        WeightFormat("bfloat16", 2, table_bytes=2),
        WeightFormat("float16", 2, compute="fp16", table_bytes=2),
        WeightFormat("fp8", 1, row_bytes=4, compute="fp8"),  # W8A8, a float32 scale per output channel
        WeightFormat("int8", 1, row_bytes=4, compute="int8"),  # W8A8, likewise
        WeightFormat("int4_g32", 0.5 + 2 / 32, table_bytes=1),  # --quantization on CPUs: products in 16 bits, tables in 8 bits
        WeightFormat("int4_g32_zp", 0.5 + 4 / 32, table_bytes=1),
        WeightFormat("int4", 0.5 + 2.5 / 128),  # groups of 128: a 16-bit scale and a 4-bit zero point each; products in 16 bits
        *map(_blocks, ("q8_0", "q6_k", "q5_k", "q4_k", "q4_1", "q4_0")),
    )
}  # fmt: skip

_ALIASES = {
    "awq": "int4", "gptq": "int4", "w4a16": "int4", "w8a8": "int8", "compressed-tensors": "fp8", "fbgemm_fp8": "fp8",
    "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32",
}  # fmt: skip


def find_format(name: str, group_size: int = 128) -> WeightFormat:
    """The weight format called `name` (checkpoint names such as awq or compressed-tensors are understood).

    Raises:
        ConfigError: no such format; names the nearest one.
    """
    key = name.lower()
    key = _ALIASES.get(key, key)
    if key == "int4" and group_size != 128:
        return WeightFormat(f"int4-g{group_size}", 0.5 + 2.5 / group_size)
    if key in FORMATS:
        return FORMATS[key]
    near = nearest(key, [*FORMATS, *_ALIASES], 3)
    raise ConfigError(
        f"there is no weight format {name!r}: " + (f"did you mean {near!r}? " if near else "") + f"known: {', '.join(FORMATS)}"
    )


def format_of(spec: ModelSpec) -> WeightFormat:
    """The format that the checkpoint itself is in."""
    quantization = spec.quantization
    method = str(quantization.get("quant_method") or spec.weight_format)
    if method in ("plain", "none", ""):
        return find_format(spec.dtype)
    if method == "compressed-tensors":
        groups: list[dict[str, Any]] = list(quantization.get("config_groups", {}).values())
        weights: dict[str, Any] = groups[0].get("weights", {}) if groups else {}
        kind = f"{weights.get('type')}{weights.get('num_bits')}"
        method = {"float8": "fp8", "int8": "int8", "int4": "int4"}.get(kind, method)
        return find_format(method, int(weights.get("group_size") or 128))
    if method == "gguf":
        return find_format(str(quantization.get("file_type", "q4_k")).lower())
    return find_format(method, int(quantization.get("group_size") or 128))


@dataclass(frozen=True)
class Linear:
    """One weight matrix [out, in] of a layer; `copies` layers (or experts of all layers) have one like it."""

    name: str
    out_features: int
    in_features: int
    copies: int
    role: str = "dense"  # dense | expert | router | head
    bias: bool = False

    @property
    def weights(self) -> int:
        return self.out_features * self.in_features * self.copies


def linears(spec: ModelSpec) -> tuple[Linear, ...]:
    """Every matrix that tokens are multiplied with, the output head included (a tied one too)."""
    a, layers, hidden = spec.attention, spec.num_layers, spec.hidden
    wide = a.heads * a.head_dim
    found = [
        Linear("qkv", wide + 2 * a.kv_heads * a.head_dim, hidden, layers, bias=a.qkv_bias),
        Linear("o", hidden, wide, layers, bias=a.out_bias),
    ]
    if spec.moe is None:
        up = 2 if spec.mlp.gated else 1
        found.append(Linear("up", up * spec.mlp.intermediate, hidden, layers, bias=spec.mlp.bias))
        found.append(Linear("down", hidden, spec.mlp.intermediate, layers, bias=spec.mlp.bias))
    else:
        moe = spec.moe
        found.append(Linear("router", moe.experts, hidden, layers, "router"))
        found.append(Linear("expert_up", 2 * moe.intermediate, hidden, layers * moe.experts, "expert"))
        found.append(Linear("expert_down", hidden, moe.intermediate, layers * moe.experts, "expert"))
        if moe.shared_intermediate:
            found.append(Linear("shared_up", 2 * moe.shared_intermediate, hidden, layers))
            found.append(Linear("shared_down", hidden, moe.shared_intermediate, layers))
    if spec.stack == "encoder_decoder":
        found += [Linear(f"cross_{m.name}", m.out_features, m.in_features, m.copies, bias=m.bias) for m in found[:2]]
        found += [Linear(f"encoder_{m.name}", m.out_features, m.in_features, _encoder_layers(spec), bias=m.bias) for m in found[:4]]
    if spec.stack != "encoder":
        found.append(Linear("head", spec.vocab_size, hidden, 1, "head"))
    return tuple(found)


def _encoder_layers(spec: ModelSpec) -> int:
    return int(spec.extra.get("encoder_layers", spec.num_layers))


@dataclass(frozen=True)
class Rows:
    """`count` sequences that each compute `new` positions after `past` cached ones, the first `shared` of which all have in common."""

    count: int
    new: int
    past: float = 0.0
    shared: float = 0.0
    samples: bool = True


class ModelCosts:
    """The costs of one model in one weight format and KV type, seen from one of `tp` tensor-parallel ranks."""

    def __init__(self, spec: ModelSpec, weight_format: str | WeightFormat | None = None, kv_dtype: str = "auto", tp: int = 1) -> None:
        self.spec = spec
        self.tp = tp
        self.format = (
            format_of(spec) if weight_format is None else find_format(weight_format) if isinstance(weight_format, str) else weight_format
        )  # fmt: skip
        self.activation = spec.dtype if self.format.name not in ("float32", "bfloat16", "float16") else self.format.name
        self.kv_dtype = resolve_kv_dtype(kv_dtype, self.activation)
        self._linears = linears(spec)
        self._attention_compute = {"float32": "fp32", "float16": "fp16"}.get(self.activation, "bf16")

    def parameters(self) -> int:
        """Parameters of the whole model (tied ones once)."""
        tied = sum(m.weights for m in self._linears if m.role == "head") if self.spec.tied else 0
        return sum(m.weights for m in self._linears) - tied + self._table_weights() + self._small_weights()

    def resident_bytes(self) -> int:
        """Weights that one rank keeps in memory."""
        matrices = sum(self._bytes(m) * m.copies for m in self._linears if not (self.spec.tied and m.role == "head"))
        return int((matrices + self._table_weights() * self._table_format().weight_bytes) / self.tp + self._small_bytes())

    def streamed_bytes(self, tokens: int) -> float:
        """Weights that one rank reads in a step of `tokens` tokens."""
        return sum(self._bytes(m) * self._copies_read(m, tokens) for m in self._linears) / self.tp + self._small_bytes()

    def head_bytes(self) -> float:
        """Bytes of the output head on one rank (a tied one too); 0 without a head."""
        return sum(self._bytes(m) for m in self._linears if m.role == "head") / self.tp

    def flops(self, tokens: int, sampled: int) -> dict[str, float]:
        """Operations of the linear layers on one rank, by the kind they run in."""
        total: dict[str, float] = {}
        for m in self._linears:
            rows, copies = (sampled if m.role == "head" else tokens), m.copies
            if m.role == "expert" and self.spec.moe is not None:
                copies = m.copies // self.spec.moe.experts * self.spec.moe.experts_per_token
            kind = self._format_of(m).compute
            total[kind] = total.get(kind, 0.0) + 2.0 * rows * m.out_features * m.in_features * copies / self.tp
        return total

    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token on one rank, no window taken into account."""
        if self.spec.stack == "encoder":
            return 0
        return int(self.spec.kv_bytes_per_token(self.kv_dtype) * self._kv_heads() / self.spec.attention.kv_heads)

    def kv_bytes(self, context: float) -> float:
        """Keys and values that a sequence of `context` tokens holds on one rank (sliding layers keep their window)."""
        layers = self.spec.num_layers
        return self.kv_bytes_per_token() / layers * sum(min(context, window) for window in self._windows())

    def attention_flops(self, rows: Rows) -> float:
        """Operations of attention on one rank: each new position sees itself and what lies before it."""
        a = self.spec.attention
        causal = self.spec.stack != "encoder"
        pairs = sum(_visible_pairs(rows.new, rows.past, window, causal) for window in self._windows())
        return 4.0 * a.heads / self.tp * a.head_dim * pairs * rows.count

    def step(self, batch: Iterable[Rows]) -> Work:
        """The work of one step on one rank."""
        tokens = sampled = 0
        attention, kv = 0.0, 0.0
        for rows in batch:
            tokens += rows.count * rows.new
            sampled += rows.count if rows.samples else 0
            attention += self.attention_flops(rows)
            own = self.kv_bytes(rows.past + 1) - self.kv_bytes(rows.shared)  # cached positions and, for a decode, its own
            kv += rows.count * own + self.kv_bytes(rows.shared)
        link = 2 * self.spec.num_layers * tokens * self.spec.hidden * 2 * 2 * (self.tp - 1) / self.tp if self.tp > 1 else 0.0
        return Work(
            self.streamed_bytes(tokens), kv, self.flops(tokens, sampled), {self._attention_compute: attention}, link_bytes=link
        )  # fmt: skip

    def _format_of(self, m: Linear) -> WeightFormat:
        return self._table_format() if m.role in ("head", "router") else self.format

    def _table_format(self) -> WeightFormat:
        own = self.format
        if own.table_bytes is None:
            return find_format(self.spec.dtype)
        return own if own.table_bytes == own.weight_bytes else replace(own, weight_bytes=own.table_bytes)

    def _bytes(self, m: Linear) -> float:
        form = self._format_of(m)
        return m.out_features * (m.in_features * form.weight_bytes + form.row_bytes)

    def _copies_read(self, m: Linear, tokens: int) -> float:
        if m.role != "expert" or self.spec.moe is None:
            return m.copies
        moe = self.spec.moe
        return m.copies * (1 - (1 - moe.experts_per_token / moe.experts) ** tokens)

    def _table_weights(self) -> int:
        positions = int(self.spec.extra.get("max_positions", self.spec.max_len)) if self.spec.rope is None else 0
        return (self.spec.vocab_size + (positions if self.spec.stack == "encoder" else 0)) * self.spec.hidden

    def _small_weights(self) -> int:
        per_layer = 2 * self.spec.hidden + (2 * self.spec.attention.head_dim if self.spec.attention.qk_norm else 0)
        biases = sum(m.out_features * m.copies for m in self._linears if m.bias)
        return self.spec.num_layers * per_layer + self.spec.hidden + biases

    def _small_bytes(self) -> int:
        return int(self._small_weights() * DTYPE_BYTES[self.spec.dtype])

    def _kv_heads(self) -> float:
        return max(self.spec.attention.kv_heads / self.tp, 1)  # fewer heads than ranks: each rank keeps a copy

    def _windows(self) -> list[float]:
        window = self.spec.attention.window
        return [float(window) if kind == "sliding" and window else float("inf") for kind in self.spec.layer_kinds]


def _visible_pairs(new: int, past: float, window: float, causal: bool) -> float:
    """(query, key) pairs of `new` queries after `past` keys."""
    if not causal:
        return new * (new + past)
    if past + new <= window:
        return new * past + new * (new + 1) / 2
    growing = max(min(window - past, new), 0.0)  # queries that still see everything before them
    return growing * past + growing * (growing + 1) / 2 + (new - growing) * window


def resolve_kv_dtype(kv_dtype: str, activation: str) -> str:
    """The key of DTYPE_BYTES that a --kv-cache-dtype value means.

    Raises:
        ConfigError: an unknown value.
    """
    names = {
        "auto": activation,
        "fp8": "float8_e4m3",
        "fp8_e4m3": "float8_e4m3",
        "fp8_e5m2": "float8_e5m2",
        "bf16": "bfloat16",
        "fp16": "float16",
    }
    name = names.get(kv_dtype, kv_dtype)
    if name not in DTYPE_BYTES:
        raise ConfigError(f"there is no KV type {kv_dtype!r}: known are auto, bfloat16, float16, float32, fp8, int8")
    return name
