"""The whole decoder in one native call against its torch reference, for every instruction set: ragged batches of decodes and prompts over
pages in random order, grouped heads, windows, norms of q and k, partial and interleaved rotation, plain and gated activations."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest
import torch
from native_library import isas, use

from hexad.operators.args import AttentionArgs, RopeKVArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.load import load_operators
from hexad.operators.native.library import PackedWeight
from hexad.operators.native.stack import NativeStack, bind_stack, supports_stack
from hexad.operators.registry import registry
from hexad.operators.stack import LayerParams, Product, StackArgs, StackParams

VOCAB, MAX_LEN = 50, 300


@dataclass(frozen=True)
class Shape:
    """What a network differs in."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 32
    rotary: int = 32
    interleaved: bool = False
    qk_norm: bool = False
    window: int | None = None
    softcap: float | None = None
    activation: str = "silu"
    gated: bool = True
    block_size: int = 16
    kv_dtype: torch.dtype | None = None
    out_norms: bool = False


SHAPES = [
    Shape(),
    Shape(heads=4, kv_heads=4, dim=64, rotary=32, interleaved=True, activation="gelu_tanh", block_size=32),
    Shape(heads=5, kv_heads=1, dim=48, rotary=24, qk_norm=True, activation="gelu", block_size=4),
    Shape(heads=8, kv_heads=2, dim=128, rotary=128, window=37, activation="relu", gated=False),
    Shape(heads=3, kv_heads=1, dim=96, rotary=0, softcap=5.0),
    Shape(window=50, kv_dtype=torch.bfloat16),
    Shape(heads=4, kv_heads=1, dim=256, rotary=256, qk_norm=True, window=37, activation="gelu_tanh", out_norms=True),
]


def build(shape: Shape, dtype: torch.dtype, make: torch.Generator) -> tuple[StackArgs, StackParams]:
    """Two layers, the second in the first's KV group or (with a window) sliding in its own."""
    hidden, intermediate = 64, 96
    q_size, kv_size = shape.heads * shape.dim, shape.kv_heads * shape.dim
    kv_dtype = shape.kv_dtype or dtype
    sliding = shape.window is not None

    def vector(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=make)).to(dtype)

    def product(rows: int, columns: int) -> Product:
        weight = (torch.randn(rows, columns, generator=make) * columns**-0.5).bfloat16()
        packed = PackedWeight("bfloat16", rows, columns)
        packed.fill(0, weight)
        return Product(lambda x: (x.double() @ weight.double().T).to(dtype), packed)

    def turns() -> torch.Tensor:
        angles = torch.rand(MAX_LEN, shape.rotary // 2, generator=make) * 6
        return torch.cat((angles.cos(), angles.sin()), dim=1)

    table = torch.randn(VOCAB, hidden, generator=make).bfloat16()
    packed_table = PackedWeight("bfloat16", VOCAB, hidden)
    packed_table.fill(0, table)
    layers = [
        LayerParams(
            product(q_size + 2 * kv_size, hidden),
            product(hidden, q_size),
            product(2 * intermediate if shape.gated else intermediate, hidden),
            product(hidden, intermediate),
            vector(hidden),
            vector(hidden),
            vector(shape.dim) if shape.qk_norm else None,
            vector(shape.dim) if shape.qk_norm else None,
            turns(),
            vector(hidden) if shape.out_norms else None,
            vector(hidden) if shape.out_norms else None,
        )
        for _ in range(2)
    ]
    args = StackArgs(
        hidden=hidden,
        intermediate=intermediate,
        activation=shape.activation,
        gated=shape.gated,
        rope=RopeKVArgs(
            shape.heads, shape.kv_heads, shape.dim, shape.rotary, shape.interleaved, shape.qk_norm, 1e-5, dtype, kv_dtype, "cpu"
        ),
        attention=AttentionArgs(
            shape.heads, shape.kv_heads, shape.dim, shape.dim**-0.5, shape.window, shape.softcap, shape.block_size, dtype, kv_dtype, "cpu"
        ),
        windowed=(False, sliding),
        kv_group=(0, 1 if sliding else 0),
        eps=1e-5,
        embedding_scale=1.5,
        max_len=MAX_LEN,
        dtype=dtype,
        device_type="cpu",
    )
    params = StackParams(Product(lambda ids: table[ids].to(dtype), packed_table), layers, vector(hidden))
    return args, params


def batch_of(shape: Shape, rows: list[tuple[int, int]], make: torch.Generator, num_blocks: int) -> tuple:
    """(token ids, positions, groups) of rows (queries, length), their pages scattered; the window's group has lost its old pages."""
    size = shape.block_size
    width = max(-(-length // size) for _, length in rows)
    starts = torch.tensor([0, *torch.tensor([n for n, _ in rows]).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(length - n, length) for n, length in rows])
    groups = []
    for group in range(2):
        free = torch.randperm(num_blocks, generator=make).tolist()
        table = torch.full((len(rows), width), -1, dtype=torch.int32)
        slots = []
        for row, (n, length) in enumerate(rows):
            oldest = 0 if group == 0 or shape.window is None else max(0, length - n + 1 - shape.window)
            for block in range(oldest // size, -(-length // size)):
                table[row, block] = free.pop()
            at = torch.arange(length - n, length)
            slots.append(table[row].long()[at // size] * size + at % size)
        lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
        widest = max(n for n, _ in rows)
        groups.append(AttentionBatch(starts, lengths, table, torch.cat(slots), widest, int(lengths.max()), size, 0))
    ids = torch.randint(0, VOCAB, (positions.numel(),), generator=make)
    return ids, positions, tuple(groups)


def pages_of(shape: Shape, dtype: torch.dtype, num_blocks: int, make: torch.Generator) -> list[KVPages]:
    size = (num_blocks, shape.block_size, shape.kv_heads, shape.dim)
    return [KVPages(*(torch.randn(size, generator=make).to(shape.kv_dtype or dtype) for _ in range(2))) for _ in range(2)]


def copy(pages: list[KVPages]) -> list[KVPages]:
    return [KVPages(kv.k.clone(), kv.v.clone()) for kv in pages]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("isa", isas())
def test_agrees_with_the_reference(isa: str, shape: Shape, monkeypatch) -> None:
    load_operators()
    use(monkeypatch, isa)
    seed = time.time_ns() % 2**31
    print("seed", seed)
    make = torch.Generator().manual_seed(seed)
    rows = [(1, 1), (1, 70), (5, 5), (40, 130), (1, 33), (17, 17)]
    num_blocks = 2 * sum(-(-length // shape.block_size) for _, length in rows)
    for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        args, params = build(shape, dtype, make)
        assert supports_stack(args) == []
        pages = pages_of(shape, dtype, num_blocks, make)
        ids, positions, groups = batch_of(shape, rows, make, num_blocks)
        expected_pages, found_pages = copy(pages), copy(pages)
        expected = registry.reference("decoder_stack", args)(ids, positions, groups, expected_pages, params)
        found = bind_stack(args)(ids, positions, groups, found_pages, NativeStack(args, params))
        if shape.kv_dtype is not None and dtype == torch.float32:
            limit = 1e-2  # roundings of keys may fall on either side
        assert error(found, expected) < limit, dtype
        for one, other in zip(found_pages, expected_pages, strict=True):
            assert error(one.k, other.k) < limit and error(one.v, other.v) < limit


@pytest.mark.parametrize("wanted", [[0, 1, 6, 46, 47, 64], [46], [5, 6, 63], [], list(range(65))], ids=len)
@pytest.mark.parametrize("isa", isas())
def test_some_tokens_alone_are_those_of_all(isa: str, wanted: list[int], monkeypatch) -> None:
    load_operators()
    use(monkeypatch, isa)
    seed = time.time_ns() % 2**31
    print("seed", seed)
    make = torch.Generator().manual_seed(seed)
    rows = [(1, 1), (1, 70), (5, 5), (40, 130), (1, 33), (17, 17)]
    for shape in (SHAPES[0], Shape(out_norms=True)):
        num_blocks = 2 * sum(-(-length // shape.block_size) for _, length in rows)
        for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            args, params = build(shape, dtype, make)
            stack, pages = NativeStack(args, params), pages_of(shape, dtype, num_blocks, make)
            ids, positions, groups = batch_of(shape, rows, make, num_blocks)
            all_pages, some_pages, index = copy(pages), copy(pages), torch.tensor(wanted, dtype=torch.int64)
            everything = bind_stack(args)(ids, positions, groups, all_pages, stack)
            found = bind_stack(args)(ids, positions, groups, some_pages, stack, None, index)
            assert found.shape == (len(wanted), args.hidden)
            assert not wanted or error(found, everything[index]) < limit
            reference = registry.reference("decoder_stack", args)(ids, positions, groups, copy(pages), params, None, index)
            assert reference.shape == found.shape and (not wanted or error(found, reference) < 2e-2)
            for one, other in zip(some_pages, all_pages, strict=True):  # keys and values of all are written
                assert torch.equal(one.k, other.k) and torch.equal(one.v, other.v)


@pytest.mark.parametrize("isa", isas())
def test_stale_memory_is_never_seen(isa: str, monkeypatch) -> None:
    """Every slot that no row owns holds NaN; padding tokens and rows write and read nothing."""
    use(monkeypatch, isa)
    make = torch.Generator().manual_seed(time.time_ns() % 2**31)
    shape = Shape(window=20)
    for dtype in (torch.float32, torch.bfloat16):
        args, params = build(shape, dtype, make)
        rows = [(1, 19), (30, 30), (9, 41)]
        ids, positions, groups = batch_of(shape, rows, make, 16)
        pages = pages_of(shape, dtype, 16, make)
        for kv, batch in zip(pages, groups, strict=True):
            owned = torch.zeros(16 * 16, dtype=torch.bool)
            for row, (n, length) in enumerate(rows):
                at = torch.arange(max(0, length - n + 1 - 20) if batch is groups[1] else 0, length)
                owned[batch.block_table[row].long()[at // 16] * 16 + at % 16] = True
            for tensor in (kv.k, kv.v):
                tensor.view(256, 2, 32)[~owned] = float("nan")
        found = bind_stack(args)(ids, positions, groups, pages, NativeStack(args, params))
        assert found.isfinite().all()


def test_bad_calls_are_refused(monkeypatch) -> None:
    use(monkeypatch, isas()[-1])
    make = torch.Generator().manual_seed(1)
    args, params = build(Shape(), torch.float32, make)
    call, stack = bind_stack(args), NativeStack(args, params)
    ids, positions, groups = batch_of(Shape(), [(1, 9), (4, 20)], make, 8)
    pages = pages_of(Shape(), torch.float32, 8, make)

    def refused(message: str, ids=ids, positions=positions, batch=groups[0]) -> None:
        with pytest.raises(AssertionError, match=message):
            call(ids, positions, (batch, groups[1]), pages, stack)

    refused("token id", ids=ids + VOCAB)
    refused("position", positions=positions + MAX_LEN)
    refused("slot", batch=replace(groups[0], slots=groups[0].slots + 8 * 16))
    refused("page", batch=replace(groups[0], block_table=groups[0].block_table + 8))
    refused("page", batch=replace(groups[0], block_table=groups[0].block_table[:, :1]))
    refused("page", batch=replace(groups[0], block_table=torch.full_like(groups[0].block_table, -1)))
    refused("fit together", batch=replace(groups[0], seq_lens=groups[0].seq_lens - 18))
    for last in ([5], [-1], [2, 2], [3, 1]):
        with pytest.raises(AssertionError, match="fit together"):
            call(ids, positions, groups, pages, stack, None, torch.tensor(last))
    assert call(ids, positions, groups, pages, stack).isfinite().all()


def test_what_is_not_served_is_said() -> None:
    make = torch.Generator().manual_seed(1)
    try:
        args, _ = build(Shape(), torch.float32, make)
    except AssertionError:
        pytest.skip("no native library")
    odd = replace(args, attention=replace(args.attention, head_dim=20))
    assert "multiple of 16" in supports_stack(odd)[0]
    assert "cuda" in supports_stack(replace(args, device_type="cuda"))[0]
    assert "float16" in supports_stack(replace(args, dtype=torch.float16))[0]
