"""Torch references against plain float64 arithmetic, on fresh random shapes."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch

from hexad.operators.args import ActArgs, AttentionArgs, EmbeddingArgs, LinearArgs, NormArgs, RopeKVArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.load import load_operators

registry = load_operators()
FLOAT_TYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def rng() -> random.Random:
    seed = time.time_ns() % 2**31
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return random.Random(seed)


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    scale = expected.abs().max().clamp_min(1e-3)
    assert ((got.double() - expected.double()).abs().max() / scale) < TOLERANCE[dtype]


# -- norms


def norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_rms_norm(dtype, rng):
    hidden, tokens = rng.randint(1, 300), rng.randint(1, 40)
    x, weight = torch.randn(tokens, hidden, dtype=dtype) * 5, torch.randn(hidden, dtype=dtype)
    call = registry.reference("rms_norm", NormArgs(hidden, 1e-5, dtype, "cpu"))
    assert_close(call(x, weight), norm64(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_rounds_before_the_weight(dtype, rng):
    x, weight = torch.randn(64, 96, dtype=dtype), torch.randn(96, dtype=dtype)
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    assert torch.equal(registry.reference("rms_norm", NormArgs(96, 1e-6, dtype, "cpu"))(x, weight), expected)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_add_rms_norm(dtype, rng):
    hidden, tokens = rng.randint(1, 200), rng.randint(1, 20)
    x, residual, weight = (torch.randn(n, hidden, dtype=dtype) for n in (tokens, tokens, 1))
    total, kept = residual + x, x.clone()
    normed, new_residual = registry.reference("add_rms_norm", NormArgs(hidden, 1e-5, dtype, "cpu"))(x, residual, weight[0])
    assert torch.equal(new_residual, total)
    assert torch.equal(x, kept)
    assert_close(normed, norm64(total, weight[0], 1e-5), dtype)


# -- rotary embedding and the KV write


def rotate64(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Turn pairs one by one: x [T, H, D], angles [T, R / 2]."""
    out, half = x.double().clone(), angles.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        cos, sin = angles[:, i].cos().unsqueeze(1), angles[:, i].sin().unsqueeze(1)
        out[..., a] = x[..., a].double() * cos - x[..., b].double() * sin
        out[..., b] = x[..., b].double() * cos + x[..., a].double() * sin
    return out


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_rope_kv_write(dtype, interleaved, qk_norm, partial, rng):
    kv_heads = rng.randint(1, 3)
    heads, dim, tokens, block_size = kv_heads * rng.randint(1, 4), 2 * rng.randint(2, 20), rng.randint(2, 12), rng.choice([1, 4, 7])
    rotary_dim = max(2, dim // 4 * 2) if partial else dim
    args = RopeKVArgs(heads, kv_heads, dim, rotary_dim, interleaved, qk_norm, 1e-6, dtype, dtype, "cpu")
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions = torch.randint(0, 50, (tokens,))
    table = torch.randn(50, rotary_dim // 2, dtype=torch.float64)
    cos_sin = torch.cat((table.cos(), table.sin()), 1).float()
    slots = torch.randperm(5 * block_size * 4)[:tokens]
    slots[rng.randrange(tokens)] = -1
    pages = KVPages(*(torch.full((20, block_size, kv_heads, dim), 7.0, dtype=dtype) for _ in "kv"))
    weights = [torch.randn(dim, dtype=dtype) if qk_norm else None for _ in "qk"]
    q, k, v = (part.view(tokens, -1, dim).double() for part in qkv.clone().split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1))
    if qk_norm:
        q, k = norm64(q, weights[0], 1e-6), norm64(k, weights[1], 1e-6)
    angles = table[positions]

    got = registry.reference("rope_kv_write", args)(qkv, positions, cos_sin, slots, pages, *weights)

    assert_close(got, rotate64(q, angles, interleaved), dtype)
    flat_k, flat_v = pages.k.flatten(0, 1), pages.v.flatten(0, 1)
    written = slots >= 0
    assert_close(flat_k[slots[written]], rotate64(k, angles, interleaved)[written], dtype)
    assert torch.equal(flat_v[slots[written]].double(), v[written])
    untouched = torch.ones(len(flat_k), dtype=torch.bool)
    untouched[slots[written]] = False
    assert (flat_k[untouched] == 7).all() and (flat_v[untouched] == 7).all()


def test_rope_takes_a_new_step_in_new_tensors(rng):
    args = RopeKVArgs(1, 1, 8, 8, False, False, 1e-6, torch.float32, torch.float32, "cpu")
    call = registry.reference("rope_kv_write", args)
    table = torch.randn(10, 4)
    cos_sin = torch.cat((table.cos(), table.sin()), 1)
    pages = KVPages(torch.zeros(4, 4, 1, 8), torch.zeros(4, 4, 1, 8))
    for position in (3, 9, 3):
        qkv = torch.randn(1, 24)
        q = call(qkv.clone(), torch.tensor([position]), cos_sin, torch.tensor([position]), pages, None, None)
        assert_close(q, rotate64(qkv[:, :8].view(1, 1, 8), table[[position]].double(), False), torch.float32)


# -- attention


def attention64(args: AttentionArgs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One row, query by query: q [n, Hq, D] are the last n positions of k, v [L, Hkv, D]."""
    queries, length, group = q.shape[0], k.shape[0], args.heads // args.kv_heads
    out = torch.zeros(queries, args.heads, args.head_dim, dtype=torch.float64)
    for i, head in itertools.product(range(queries), range(args.heads)):
        last = length - queries + i
        first = 0 if args.window is None else max(0, last - args.window + 1)
        keys, values = (x[first : last + 1, head // group].double() for x in (k, v))
        scores = keys @ q[i, head].double() * args.scale
        if args.softcap is not None:
            scores = torch.tanh(scores / args.softcap) * args.softcap
        out[i, head] = scores.softmax(0) @ values
    return out.flatten(1)


def random_case(rng: random.Random, args: AttentionArgs, rows: list[tuple[int, int]]):
    """Rows of (queries, length) over scattered blocks; everything that no row may read is NaN."""
    size, dtype = args.block_size, args.kv_dtype
    blocks_of = [-(-length // size) for _, length in rows]
    total = sum(blocks_of)
    order = list(range(total + 3))
    rng.shuffle(order)
    pages = KVPages(*(torch.full((total + 3, size, args.kv_heads, args.head_dim), float("nan"), dtype=dtype) for _ in "kv"))
    table = torch.full((len(rows), max(blocks_of, default=1) + 1), -1, dtype=torch.int32)
    keys, values, taken = [], [], 0
    for row, (queries, length) in enumerate(rows):
        blocks = order[taken : taken + blocks_of[row]]
        taken += len(blocks)
        k, v = (torch.randn(length, args.kv_heads, args.head_dim).to(dtype) for _ in "kv")
        first = 0 if args.window is None else max(0, length - queries - args.window + 1)  # older blocks were given back
        for position in range(first, length):
            pages.k[blocks[position // size], position % size] = k[position]
            pages.v[blocks[position // size], position % size] = v[position]
        table[row, : len(blocks)] = torch.tensor([-1 if (i + 1) * size <= first else b for i, b in enumerate(blocks)])
        keys.append(k)
        values.append(v)
    starts = list(itertools.accumulate((queries for queries, _ in rows), initial=0))
    lengths = [length for _, length in rows]
    batch = AttentionBatch(
        query_start=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slots=torch.zeros(starts[-1], dtype=torch.int64),
        max_query_len=max((queries for queries, _ in rows), default=0),
        max_seq_len=max(lengths, default=0),
        block_size=size,
        num_decodes=0,
    )
    q = torch.randn(starts[-1], args.heads, args.head_dim).to(args.dtype)
    return q, pages, batch, keys, values


def random_args(rng: random.Random, dtype: torch.dtype, **fixed) -> AttentionArgs:
    kv_heads, dim = rng.randint(1, 3), rng.choice([8, 16, 32])
    values = {
        "heads": kv_heads * rng.randint(1, 4), "kv_heads": kv_heads, "head_dim": dim, "scale": rng.uniform(0.5, 2) * dim**-0.5,
        "window": None, "softcap": None, "block_size": rng.choice([1, 3, 16]), "dtype": dtype, "kv_dtype": dtype, "device_type": "cpu",
    }  # fmt: skip
    return AttentionArgs(**{**values, **fixed})


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("window", [None, 1, 5, 16, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_paged_attention_of_ragged_rows(dtype, window, softcap, rng):
    args = random_args(rng, dtype, window=window, softcap=softcap)
    rows = [(1, rng.randint(1, 90)) for _ in range(rng.randint(0, 9))]
    rows += [(queries, queries + rng.choice([0, rng.randint(0, 40)])) for queries in (rng.randint(1, 30) for _ in range(3))]
    rng.shuffle(rows)
    q, pages, batch, keys, values = random_case(rng, args, rows)
    got = registry.reference("paged_attention", args)(q, pages, batch)
    starts = batch.query_start.tolist()
    for row in range(len(rows)):
        low, high = starts[row], starts[row + 1]
        assert_close(got[low:high], attention64(args, q[low:high], keys[row], values[row]), dtype)


@pytest.mark.parametrize("rows", [[(1, 1)], [(1, 40)], [(7, 7)], [(5, 21)], [(1, 9)] * 4, [(1, 3), (1, 200), (1, 64), (1, 65)]])
def test_paged_attention_of_one_kind_of_row(rows, rng):
    args = random_args(rng, torch.float32)
    q, pages, batch, keys, values = random_case(rng, args, rows)
    got = registry.reference("paged_attention", args)(q, pages, batch)
    starts = batch.query_start.tolist()
    for row in range(len(rows)):
        low, high = starts[row], starts[row + 1]
        assert_close(got[low:high], attention64(args, q[low:high], keys[row], values[row]), torch.float32)


def test_paged_attention_skips_padding_rows(rng):
    args = random_args(rng, torch.float32)
    q, pages, batch, keys, values = random_case(rng, args, [(1, 5), (1, 8)])
    batch.query_start = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    batch.seq_lens = torch.tensor([5, 8, 0], dtype=torch.int32)
    batch.block_table = torch.cat((batch.block_table, torch.full_like(batch.block_table[:1], -1)))
    batch.slots = torch.tensor([0, 0, -1])
    q = torch.cat((q, torch.full_like(q[:1], float("nan"))))
    got = registry.reference("paged_attention", args)(q, pages, batch)
    for row in range(2):
        assert_close(got[row : row + 1], attention64(args, q[row : row + 1], keys[row], values[row]), torch.float32)


def test_paged_attention_keeps_a_damaged_row_to_itself(rng):
    args = random_args(rng, torch.float32)
    q, pages, batch, keys, values = random_case(rng, args, [(1, 20), (1, 33), (1, 31), (4, 12)])
    damaged = batch.block_table[1][0]
    pages.k[damaged] = float("nan")
    pages.v[damaged] = float("inf")
    got = registry.reference("paged_attention", args)(q, pages, batch)
    assert not got[1].isfinite().all()
    starts = batch.query_start.tolist()
    for row in (0, 2, 3):
        low, high = starts[row], starts[row + 1]
        assert_close(got[low:high], attention64(args, q[low:high], keys[row], values[row]), torch.float32)


def test_paged_attention_with_pages_of_another_dtype(rng):
    args = random_args(rng, torch.float32, kv_dtype=torch.bfloat16)
    q, pages, batch, keys, values = random_case(rng, args, [(1, 20), (6, 33)])
    got = registry.reference("paged_attention", args)(q, pages, batch)
    assert got.dtype == torch.float32
    assert_close(got[1:], attention64(args, q[1:], keys[1], values[1]), torch.float32)


@pytest.mark.parametrize("chunk", [1, 3, 8, 40])
@pytest.mark.parametrize("length", [5, 7, 8, 9, 10, 17, 40])
def test_b46_visible_keys_by_one_hot_values(length, chunk, rng):
    """The value of key j is the j-th unit vector: what comes out is how much of each key a query saw."""
    window, dim = 8, 40
    args = random_args(rng, torch.float32, heads=1, kv_heads=1, head_dim=dim, window=window, block_size=rng.choice([1, 3, 8]))
    call = registry.reference("paged_attention", args)
    blocks = -(-length // args.block_size)
    pages = KVPages(torch.zeros(blocks, args.block_size, 1, dim), torch.zeros(blocks, args.block_size, 1, dim))
    pages.v.view(-1, dim)[:length] = torch.eye(dim)[:length]
    for start in range(0, length, chunk):
        queries = min(chunk, length - start)
        batch = AttentionBatch(
            query_start=torch.tensor([0, queries], dtype=torch.int32),
            seq_lens=torch.tensor([start + queries], dtype=torch.int32),
            block_table=torch.arange(blocks, dtype=torch.int32).unsqueeze(0),
            slots=torch.zeros(queries, dtype=torch.int64),
            max_query_len=queries,
            max_seq_len=start + queries,
            block_size=args.block_size,
            num_decodes=0,
        )
        seen = call(torch.zeros(queries, 1, dim), pages, batch)
        for i in range(queries):
            position = start + i
            expected = {j for j in range(length) if position - window < j <= position}
            assert set(seen[i].nonzero().flatten().tolist()) == expected
            assert torch.allclose(seen[i][sorted(expected)], torch.tensor(1 / len(expected)))


# -- the rest


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gated_act(dtype, activation, rng):
    width = rng.randint(1, 50)
    x = torch.randn(rng.randint(1, 9), 2 * width, dtype=dtype)
    gate, up = x[:, :width].double(), x[:, width:].double()
    expected = {
        "silu": gate / (1 + (-gate).exp()),
        "gelu": gate * 0.5 * (1 + torch.erf(gate / 2**0.5)),
        "gelu_tanh": gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))),
        "relu": gate.clamp_min(0),
    }[activation]
    args = ActArgs(width, activation, dtype, "cpu")
    assert_close(registry.reference("gated_act", args)(x.clone()), expected * up, dtype)
    assert_close(registry.reference("act", args)(x[:, :width].clone()), expected, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("provider", ["torch", "onednn"])
def test_linear(dtype, bias, provider, rng):
    out_features = rng.randint(8_192, 8_500) if provider == "onednn" else rng.randint(1, 70)
    args = LinearArgs(rng.randint(1, 70), out_features, bias, dtype, "cpu")
    reasons = {c.provider: c.reasons for c in registry.explain("linear", args)}[provider]
    if reasons:
        pytest.skip(", ".join(reasons))
    bound = registry.bind("linear", args, {"linear": provider})
    weight = torch.randn(args.out_features, args.in_features, dtype=dtype)
    offset = torch.randn(args.out_features, dtype=dtype) if bias else None
    x = torch.randn(rng.randint(1, 40), args.in_features, dtype=dtype)
    expected = x.double() @ weight.double().T + (offset.double() if offset is not None else 0)
    assert_close(bound.call(x, bound.prepare((weight, offset))), expected, dtype)


def test_onednn_says_why_not(rng):
    for args, reason in (
        (LinearArgs(8, 8, False, torch.float16, "cpu"), "float16"),
        (LinearArgs(8, 8, False, torch.float32, "cpu"), "8,192"),
        (LinearArgs(8, 8, False, torch.bfloat16, "cuda"), "cuda"),
    ):
        candidate = next(c for c in registry.explain("linear", args) if c.provider == "onednn")
        assert not candidate.chosen and any(reason in text for text in candidate.reasons)


def test_embedding(rng):
    table = torch.randn(30, 7)
    ids = torch.randint(0, 30, (11,))
    assert torch.equal(registry.reference("embedding", EmbeddingArgs(30, 7, torch.float32, "cpu"))(ids, table), table[ids])
