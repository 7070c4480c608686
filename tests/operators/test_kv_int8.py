"""Int8 keys and values in torch: the format, and attention over it against float64 on the dequantised values."""

from __future__ import annotations

import random
import time

import pytest
import torch
from test_reference_operators import attention64

from hexad.operators.args import AttentionArgs, RopeKVArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.kv_int8 import SMALLEST_TOP, dequantize_heads, quantize_heads, row_width
from hexad.operators.load import load_operators

registry = load_operators()


@pytest.fixture(autouse=True)
def rng() -> random.Random:
    seed = time.time_ns() % 2**31
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return random.Random(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_half_a_step(dtype, rng):
    values = (torch.randn(7, 3, rng.randrange(1, 300)) * 10 ** rng.uniform(-3, 3)).to(dtype)
    rows = quantize_heads(values)
    assert rows.dtype == torch.int8 and rows.shape[-1] == row_width(values.shape[-1], torch.int8) == values.shape[-1] + 4
    step = values.double().abs().amax(-1, keepdim=True) / 127
    assert ((dequantize_heads(rows, torch.float64) - values.double()).abs() <= step * 0.5001).all()
    assert rows[..., :-4].min() >= -127


def test_heads_of_zero_nan_and_infinity():
    values = torch.randn(6, 32)
    values[0] = 0
    values[1] = SMALLEST_TOP / 3
    values[2, 5], values[3, 7], values[4, 9] = float("nan"), float("inf"), float("-inf")
    found = dequantize_heads(quantize_heads(values), torch.float32)
    assert not found[:2].any() and found[2:5].isnan().all() and found[5].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_and_attention_over_what_was_written(dtype, rng):
    """GQA 1 to 16, any head size, page borders, window, softcap: the operators against float64 on the dequantised values."""
    for group in (1, rng.randint(2, 15), 16):
        kv_heads, dim, size = rng.randint(1, 2), rng.choice([6, 64, 80, 128, 256]), rng.choice([1, 3, 16])
        heads, lengths = kv_heads * group, [1, size, size + 1, rng.randint(1, 70)]
        counts = [rng.choice([1, length]) for length in lengths]
        blocks = [-(-length // size) for length in lengths]
        free = torch.randperm(sum(blocks) + 2, dtype=torch.int32)
        table = torch.full((4, max(blocks)), -1, dtype=torch.int32)
        for row, n in enumerate(blocks):
            table[row, :n], free = free[:n], free[n:]
        pages = KVPages(*(torch.full((sum(blocks) + 2, size, kv_heads, dim + 4), -1, dtype=torch.int8) for _ in "kv"))  # scales are NaN
        slots = [(table[row].long()[torch.arange(n) // size] * size + torch.arange(n) % size) for row, n in enumerate(lengths)]
        write = registry.reference("rope_kv_write", RopeKVArgs(heads, kv_heads, dim, 0, False, False, 1e-6, dtype, torch.int8, "cpu"))
        qkv = torch.randn(sum(lengths), (heads + 2 * kv_heads) * dim, dtype=dtype)
        write(qkv, torch.zeros(sum(lengths), dtype=torch.int64), torch.empty(0), torch.cat(slots), pages, None, None)
        kv = qkv.view(-1, heads + 2 * kv_heads, dim)[:, heads:]
        for tensor, wanted in ((pages.k, kv[:, :kv_heads]), (pages.v, kv[:, kv_heads:])):
            assert torch.equal(tensor.flatten(0, 1)[torch.cat(slots)], quantize_heads(wanted))
        window, softcap = rng.choice([None, 1, 20]), rng.choice([None, 5.0])
        args = AttentionArgs(heads, kv_heads, dim, dim**-0.5, window, softcap, size, dtype, torch.int8, "cpu")
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        batch = AttentionBatch(
            starts, torch.tensor(lengths, dtype=torch.int32), table, torch.zeros(sum(counts), dtype=torch.int64), max(counts), max(lengths),
            size, 0,
        )  # fmt: skip
        q = torch.randn(sum(counts), heads, dim, dtype=dtype)
        found = registry.reference("paged_attention", args)(q, pages, batch)
        for row in range(4):
            k, v = (dequantize_heads(tensor.flatten(0, 1)[slots[row]], torch.float64) for tensor in (pages.k, pages.v))
            low, high = int(starts[row]), int(starts[row + 1])
            expected = attention64(args, q[low:high], k, v).reshape(high - low, -1)
            limit = 1e-5 if dtype == torch.float32 else 3e-2
            assert (found[low:high].double() - expected).abs().max() <= limit * expected.abs().max()


def test_a_single_row_at_any_byte():
    """One row of pages whose heads are no multiple of four bytes begins anywhere in its storage."""
    values = torch.randn(1, 1, 6)
    rows = quantize_heads(values)
    for offset in range(4):
        moved = torch.cat((torch.zeros(offset, dtype=torch.int8), rows.flatten()))[offset:].view(1, 1, 10)
        assert torch.equal(dequantize_heads(moved, torch.float32), dequantize_heads(rows, torch.float32))
