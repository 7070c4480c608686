"""Int8 keys and values in the native decoder, for every instruction set: what is written against torch's format, attention against the
reference on the same codes, and scales that no writer makes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from native_library import isas, use
from test_native_stack import Shape, batch_of, build, copy, error

from hexad.operators.batch import KVPages
from hexad.operators.kv_int8 import dequantize_heads, quantize_heads
from hexad.operators.load import load_operators
from hexad.operators.native.stack import NativeStack, bind_stack, supports_stack
from hexad.operators.registry import registry

LIMIT = {torch.float32: 2e-3, torch.bfloat16: 2e-2}  # codes at a border may fall on either side


@pytest.fixture
def make() -> torch.Generator:
    load_operators()
    seed = time.time_ns() % 2**31
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def choose(make: torch.Generator, among):
    return among[int(torch.randint(0, len(among), (1,), generator=make))]


def random_shape(make: torch.Generator) -> Shape:
    kv_heads, dim = choose(make, [1, 2, 3]), choose(make, [64, 80, 96, 128, 160, 256])
    return Shape(
        heads=kv_heads * choose(make, [1, 2, 3, 4, 7, 16]),
        kv_heads=kv_heads,
        dim=dim,
        rotary=choose(make, [0, 16, 32, dim]),
        interleaved=choose(make, [False, True]),
        qk_norm=choose(make, [False, True]),
        window=choose(make, [None, 1, 16, 37]),
        softcap=choose(make, [None, None, 5.0]),
        block_size=choose(make, [1, 5, 16, 32]),
        kv_dtype=torch.int8,
    )


def int8_pages(shape: Shape, num_blocks: int, make: torch.Generator) -> list[KVPages]:
    size = (num_blocks, shape.block_size, shape.kv_heads, shape.dim)
    return [KVPages(*(quantize_heads(torch.randn(size, generator=make)) for _ in range(2))) for _ in range(2)]


def random_rows(make: torch.Generator) -> list[tuple[int, int]]:
    """(queries, length): decodes, whole prompts, chunks, lengths at the borders of pages and tiles."""
    lengths = [1, 15, 16, 17, 31, 32, 33, *torch.randint(1, 140, (3,), generator=make).tolist()]
    return [(choose(make, [1, 1, min(3, n), min(5, n), (n + 1) // 2, n]), n) for n in lengths]


def random_case(make: torch.Generator, dtype: torch.dtype) -> tuple:
    shape = random_shape(make)
    args, params = build(shape, dtype, make)
    assert supports_stack(args) == []
    rows = random_rows(make)
    num_blocks = 2 * sum(-(-length // shape.block_size) for _, length in rows)
    return shape, args, params, int8_pages(shape, num_blocks, make), batch_of(shape, rows, make, num_blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", isas())
def test_agrees_with_the_reference_on_int8_pages(isa: str, dtype: torch.dtype, make, monkeypatch) -> None:
    use(monkeypatch, isa)
    for _ in range(4):
        shape, args, params, pages, (ids, positions, groups) = random_case(make, dtype)
        print(shape)
        expected_pages, found_pages = copy(pages), copy(pages)
        expected = registry.reference("decoder_stack", args)(ids, positions, groups, expected_pages, params)
        found = bind_stack(args)(ids, positions, groups, found_pages, NativeStack(args, params))
        assert error(found, expected) < LIMIT[dtype]
        for one, other in zip(found_pages, expected_pages, strict=True):
            for ours, theirs in ((one.k, other.k), (one.v, other.v)):
                assert error(dequantize_heads(ours, torch.float64), dequantize_heads(theirs, torch.float64)) < LIMIT[dtype]
                if dtype == torch.float32:
                    assert (ours[..., :-4].int() - theirs[..., :-4].int()).abs().max() <= 1


@pytest.mark.parametrize("isa", isas())
def test_corrupt_pages_never_crash_and_stay_in_their_row(isa: str, make, monkeypatch) -> None:
    """Random bytes for codes and scales, NaN and infinity among them, in every slot that one row owns or nobody does."""
    use(monkeypatch, isa)
    shape = Shape(heads=6, kv_heads=2, dim=64, rotary=64, kv_dtype=torch.int8)
    rows = [(1, 70), (40, 90), (1, 33), (20, 20)]
    for dtype in (torch.float32, torch.bfloat16):
        args, params = build(shape, dtype, make)
        ids, positions, groups = batch_of(shape, rows, make, 24)
        pages = int8_pages(shape, 24, make)
        stack, call = NativeStack(args, params), bind_stack(args)
        clean = call(ids, positions, groups, copy(pages), stack)
        healthy = groups[0].block_table[1:]
        spoilt = torch.ones(24, dtype=torch.bool)
        spoilt[healthy[healthy >= 0].long()] = False
        for kv in pages:
            for tensor in (kv.k, kv.v):
                tensor[spoilt] = torch.randint(-128, 128, tensor[spoilt].shape, generator=make, dtype=torch.int8)
                scales = torch.tensor([float("nan"), float("inf"), -1e30, 0.0])
                tensor[spoilt, :4, :, -4:] = scales.view(torch.int8).view(1, 4, 1, 4)
        found = call(ids, positions, groups, pages, stack)
        assert torch.equal(found[1:], clean[1:])
        assert found[0].isnan().any()


@pytest.mark.parametrize("isa", isas())
def test_nan_and_zero_heads_are_written_as_such(isa: str, make, monkeypatch) -> None:
    """An embedding of NaN or of zeros: the first spoils its own rows alone, the second reads back as zeros."""
    use(monkeypatch, isa)
    shape = Shape(dim=64, rotary=64, kv_dtype=torch.int8)
    args, params = build(shape, torch.float32, make)
    ids, positions, groups = batch_of(shape, [(1, 1), (6, 6)], make, 4)
    pages = int8_pages(shape, 4, make)
    first = params.layers[0]
    poisoned = replace(params, layers=[replace(first, input_norm=first.input_norm * float("nan")), params.layers[1]])
    assert bind_stack(args)(ids, positions, groups, pages, NativeStack(args, poisoned)).isnan().all()
    slots = groups[0].slots
    for tensor in (pages[0].k, pages[0].v):
        written = tensor.flatten(0, 1)[slots]
        assert dequantize_heads(written, torch.float32).isnan().all() and not written[..., :-4].any()
    zeroed = replace(params, layers=[replace(first, input_norm=first.input_norm * 0), params.layers[1]])
    assert bind_stack(args)(ids, positions, groups, pages, NativeStack(args, zeroed)).isfinite().all()
    for tensor in (pages[0].k, pages[0].v):
        assert not tensor.flatten(0, 1)[slots].any()


def test_other_pages_are_refused(make, monkeypatch) -> None:
    use(monkeypatch, isas()[-1])
    shape = Shape(kv_dtype=torch.int8)
    args, params = build(shape, torch.float32, make)
    ids, positions, groups = batch_of(shape, [(1, 1)], make, 4)
    plain = [KVPages(*(torch.zeros(4, 16, 2, 32) for _ in range(2))) for _ in range(2)]
    with pytest.raises(AssertionError):
        bind_stack(args)(ids, positions, groups, plain, NativeStack(args, params))
