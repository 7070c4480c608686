"""The operators of one model at the shapes that its steps have, with inputs, bytes and operations: what `bench kernels` times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hexad.models.costs import ModelCosts, Rows, linears
from hexad.models.loader import open_weights
from hexad.models.spec import ModelSpec
from hexad.operators.args import ActArgs, AttentionArgs, BestTokenArgs, DrawArgs, LinearArgs, NormArgs, RopeKVArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.draw import DrawOptions

BLOCK_SIZES = {"cpu": 16, "cuda": 64}  # what the engine chooses on each


@dataclass(frozen=True)
class Case:
    """One operator at one shape. `params()` makes fresh parameters (several copies defeat caches), `inputs()` the step's tensors."""

    op: str
    label: str
    args: Any
    params: Callable[[], Any] | None  # what `prepare` takes; None: no parameters
    inputs: Callable[[], tuple[Any, ...]]
    before: int  # how many of the inputs stand before the prepared parameters in the call
    nbytes: float  # that must be read
    flops: float


def cases(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    batches: Sequence[int],
    contexts: Sequence[int],
    packed: Path | None = None,
) -> Iterator[Case]:
    """Every case: linear layers, norms, activation and rope by batch; attention by batch and context, and whole prompts.

    Args:
        packed: a GGUF file: its matrices are timed as they are packed, too.
    """
    for batch in batches:
        for m in linears(spec):
            if m.role not in ("expert", "router"):
                yield _linear(m.name, m.out_features, m.in_features, batch, dtype, device)
        if packed is not None:
            yield from _packed(spec, packed, batch, dtype, device)
        yield _norm(spec, batch, dtype, device)
        if spec.mlp.gated:
            yield _gated(spec, batch, dtype, device)
        if spec.rope is not None:
            yield _rope(spec, batch, dtype, device)
        yield from _sampling(spec, batch, device)
        for context in contexts:
            yield attention_case(spec, batch, 1, context, dtype, device)
    for context in contexts:
        yield attention_case(spec, 1, context, context, dtype, device)


def _rand(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def _linear(name: str, out: int, inner: int, rows: int, dtype: torch.dtype, device: torch.device) -> Case:
    return Case(
        "linear",
        f"{name} {rows}x{inner}x{out}",
        LinearArgs(inner, out, False, dtype, device.type),
        lambda: (_rand(out, inner, dtype=dtype, device=device), None),
        lambda: (_rand(rows, inner, dtype=dtype, device=device),),
        1,
        float(out * inner * dtype.itemsize),
        2.0 * rows * out * inner,
    )


_PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "o": ("self_attn.o_proj",),
    "up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",),
}  # fmt: skip


def _packed(spec: ModelSpec, path: Path, rows: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """The file's own matrices; copies come from one layer after another."""
    from hexad.operators.packed import PackedLinearArgs

    store = open_weights(path, spec)
    for name, parts in _PARTS.items():
        layers = itertools.cycle(range(spec.num_layers))

        def stored(parts: tuple[str, ...] = parts, layers: Iterator[int] = layers) -> list[Any]:
            layer = next(layers)
            return [store.get(f"model.layers.{layer}.{part}.weight") for part in parts]

        first = stored()
        out, inner = sum(part.shape[0] for part in first), first[0].shape[1]
        if len({part.format for part in first}) != 1:
            continue  # the engine splits these
        yield Case(
            "packed_linear",
            f"{name} {first[0].format} {rows}x{inner}x{out}",
            PackedLinearArgs(inner, out, False, first[0].format, dtype, dtype, device.type),
            lambda stored=stored: (stored(), None),  # type: ignore[misc]
            lambda inner=inner: (_rand(rows, inner, dtype=dtype, device=device),),  # type: ignore[misc]
            1,
            float(sum(part.nbytes for part in first)),
            2.0 * rows * out * inner,
        )


def _norm(spec: ModelSpec, rows: int, dtype: torch.dtype, device: torch.device) -> Case:
    shape = (rows, spec.hidden)
    return Case(
        "add_rms_norm",
        f"{rows}x{spec.hidden}",
        NormArgs(spec.hidden, spec.norm_eps, dtype, device.type),
        None,
        lambda: tuple(_rand(*s, dtype=dtype, device=device) for s in (shape, shape, (spec.hidden,))),
        3,
        4.0 * rows * spec.hidden * dtype.itemsize,
        0.0,
    )  # fmt: skip


def _gated(spec: ModelSpec, rows: int, dtype: torch.dtype, device: torch.device) -> Case:
    width = spec.mlp.intermediate
    return Case(
        "gated_act",
        f"{rows}x{width}",
        ActArgs(width, spec.mlp.activation, dtype, device.type),
        None,
        lambda: (_rand(rows, 2 * width, dtype=dtype, device=device),),
        1,
        3.0 * rows * width * dtype.itemsize,
        0.0,
    )


def _rope(spec: ModelSpec, rows: int, dtype: torch.dtype, device: torch.device) -> Case:
    a, rope = spec.attention, spec.rope
    assert rope is not None
    rotary = rope.dim or a.head_dim
    features = (a.heads + 2 * a.kv_heads) * a.head_dim

    def inputs() -> tuple[Any, ...]:
        head = _rand(a.head_dim, dtype=dtype, device=device) if a.qk_norm else None
        pages = _pages(spec, -(-rows // BLOCK_SIZES[device.type]), dtype, device)
        slots = torch.arange(rows, device=device)
        table = torch.rand(rows, rotary, device=device)
        return _rand(rows, features, dtype=dtype, device=device), torch.arange(rows, device=device), table, slots, pages, head, head

    args = RopeKVArgs(
        a.heads, a.kv_heads, a.head_dim, rotary, rope.interleaved, a.qk_norm, spec.norm_eps, dtype, dtype, device.type
    )  # fmt: skip
    return Case("rope_kv_write", f"{rows}x{features}", args, None, inputs, 7, 2.0 * rows * features * dtype.itemsize, 0.0)


DRAWS = {"temperature": (0, 1.0), "top_k 40": (40, 1.0), "top_p 0.95": (0, 0.95)}  # top_k, top_p


def _sampling(spec: ModelSpec, rows: int, device: torch.device) -> Iterator[Case]:
    """What follows the head: the best token, random ones, log-probabilities; all read float32 logits once at least."""
    vocab = spec.vocab_size
    nbytes = 4.0 * rows * vocab
    args = DrawArgs(vocab, device.type)

    def scored() -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.randn(rows, vocab, device=device) * 3
        return logits, logits.max(dim=-1).values

    def random(top_k: int, top_p: float) -> tuple[Any, ...]:
        def column(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        kind = "short" if top_k else "nucleus" if top_p < 1 else "dense"
        limit = top_k or vocab
        options = DrawOptions(
            kind, column(0.8, torch.float32), None, column(limit, torch.int64), column(top_p, torch.float64), limit
        )  # fmt: skip
        return *scored(), options, torch.rand(rows, dtype=torch.float64, device=device)

    def ranked() -> tuple[Any, ...]:
        return *scored(), torch.randint(vocab, (rows,), device=device), 5

    shape = f"{rows}x{vocab}"
    yield Case("best_token", shape, BestTokenArgs(vocab, torch.float32, device.type), None, lambda: scored()[:1], 1, nbytes, 0.0)
    for name, (top_k, top_p) in DRAWS.items():
        yield Case("draw", f"{name} {shape}", args, None, lambda top_k=top_k, top_p=top_p: random(top_k, top_p), 4, nbytes, 0.0)  # type: ignore[misc]
    yield Case("token_ranks", f"top 5 {shape}", args, None, ranked, 4, nbytes, 0.0)


def _pages(spec: ModelSpec, blocks: int, dtype: torch.dtype, device: torch.device) -> KVPages:
    shape = (blocks, BLOCK_SIZES[device.type], spec.attention.kv_heads, spec.attention.head_dim)
    return KVPages(_rand(*shape, dtype=dtype, device=device), _rand(*shape, dtype=dtype, device=device))


def attention_case(spec: ModelSpec, rows: int, queries: int, context: int, dtype: torch.dtype, device: torch.device) -> Case:
    a, block_size = spec.attention, BLOCK_SIZES[device.type]
    args = AttentionArgs(
        a.heads, a.kv_heads, a.head_dim, a.scale, None, a.logit_softcap, block_size, dtype, dtype, device.type
    )  # fmt: skip

    def inputs() -> tuple[Any, ...]:
        blocks = -(-context // block_size)
        tokens = rows * queries
        order = torch.randperm(rows * blocks, device=device).to(torch.int32).view(rows, blocks)
        batch = AttentionBatch(
            query_start=torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=device),
            seq_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
            block_table=order,
            slots=torch.full((tokens,), -1, device=device),
            max_query_len=queries,
            max_seq_len=context,
            block_size=block_size,
            num_decodes=rows if queries == 1 else 0,
        )
        return _rand(tokens, a.heads, a.head_dim, dtype=dtype, device=device), _pages(spec, rows * blocks, dtype, device), batch

    costs = ModelCosts(spec)
    flops = costs.attention_flops(Rows(rows, queries, context - queries)) / spec.num_layers
    nbytes = 2.0 * rows * context * a.kv_heads * a.head_dim * dtype.itemsize
    label = f"decode {rows} x {context}" if queries == 1 else f"prompt {context}"
    return Case("paged_attention", label, args, None, inputs, 3, nbytes, flops)
