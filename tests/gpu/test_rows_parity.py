"""Row operators, RoPE with the KV write, products of a few rows and arg max against float64 references."""

import random

import pytest
import torch
from reference import DEVICE, DTYPES, INTERPRETED, assert_close, fresh_seed, needs_kernels

from hexad.operators.args import ActArgs, BestTokenArgs, LinearArgs, NormArgs, RopeKVArgs
from hexad.operators.batch import KVPages
from hexad.operators.best_token import best_token_reference
from hexad.operators.fused import FusedLinearArgs
from hexad.operators.load import load_operators

pytestmark = needs_kernels
ROPES = [
    (8, 2, 64, 64, False, False),
    (3, 3, 80, 32, True, False),
    (5, 1, 96, 96, False, True),
    (4, 2, 128, 64, False, True),
    (2, 1, 64, 0, False, False),
]
WARP_TILES = [(2, 16, 128, 4), (8, 32, 64, 4), (11, 16, 64, 8), (16, 32, 128, 2), (32, 32, 32, 4)]
HALVES = [dtype for dtype in DTYPES if dtype != torch.float32]


def draw(*shape, dtype, scale=1.0):
    return (torch.randn(*shape) * scale).to(dtype).to(DEVICE)


def rms_norm_64(x, weight, eps):
    x = x.double().cpu()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double().cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 576, 4096])
def test_norms(hidden, dtype):
    from hexad.operators.triton.rows import bind_add_rms_norm, bind_rms_norm

    fresh_seed()
    args = NormArgs(hidden, 1e-5, dtype, DEVICE)
    rows = random.randrange(1, 7)
    x, residual, weight = draw(rows, hidden, dtype=dtype), draw(rows, hidden, dtype=dtype), draw(hidden, dtype=dtype)
    assert_close(bind_rms_norm(args)(x, weight), rms_norm_64(x, weight, 1e-5), dtype)
    strided = draw(rows, 2, hidden, dtype=dtype)[:, 1]
    assert_close(bind_rms_norm(args)(strided, weight), rms_norm_64(strided, weight, 1e-5), dtype)
    total = residual.double().cpu() + x.double().cpu()
    normed, new_residual = bind_add_rms_norm(args)(x, residual, weight)
    assert_close(new_residual, total, dtype)
    assert_close(normed, rms_norm_64(total.to(dtype), weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gated_act(activation, dtype):
    from hexad.operators.triton.rows import bind_gated_act

    fresh_seed()
    width = random.choice([96, 1024, 1536])
    x = draw(3, 2 * width, dtype=dtype, scale=3.0)
    reference = load_operators().reference("gated_act", ActArgs(width, activation, torch.float64, "cpu"))(x.double().cpu())
    assert_close(bind_gated_act(ActArgs(width, activation, dtype, DEVICE))(x), reference, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary", "interleaved", "qk_norm"), ROPES)
def test_rope_kv_write(heads, kv_heads, dim, rotary, interleaved, qk_norm, dtype):
    from hexad.operators.triton.rope_kv import bind_rope_kv_write

    fresh_seed()
    tokens, block_size, blocks = 7, 16, 5
    slots = torch.randperm(blocks * block_size)[:tokens]
    slots[2] = -1
    positions = torch.randint(0, 50, (tokens,))
    angles = torch.rand(50, rotary // 2) * 6
    table = torch.cat([angles.cos(), angles.sin()], 1)
    qkv = draw(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q_weight, k_weight = draw(dim, dtype=dtype), draw(dim, dtype=dtype)
    storage = draw(blocks, 2, block_size, kv_heads, dim, dtype=dtype)
    before = storage.clone()
    kv = KVPages(storage[:, 0], storage[:, 1])
    plain = [KVPages(before[:, i].double().cpu().contiguous(), before[:, i].double().cpu().contiguous()) for i in (0, 1)]

    def static(dtype):
        return RopeKVArgs(heads, kv_heads, dim, rotary, interleaved, qk_norm, 1e-6, dtype, dtype, DEVICE)

    weights = (q_weight, k_weight) if qk_norm else (None, None)
    reference = load_operators().reference("rope_kv_write", static(torch.float64))
    wide = KVPages(plain[0].k, plain[1].v)
    wide_weights = [None if w is None else w.double().cpu() for w in weights]
    q_64 = reference(qkv.double().cpu(), positions, table.double(), slots, wide, *wide_weights)
    q = bind_rope_kv_write(static(dtype))(qkv, positions.to(DEVICE), table.to(DEVICE), slots.to(DEVICE), kv, *weights)
    assert_close(q, q_64, dtype)
    assert_close(kv.k, wide.k, dtype)
    assert_close(kv.v, wide.v, dtype)
    written = set(slots.tolist()) - {-1}
    for slot in range(blocks * block_size):
        if slot not in written:
            assert torch.equal(storage[slot // block_size, :, slot % block_size], before[slot // block_size, :, slot % block_size])


def product_64(x, weight, bias):
    out = x.double().cpu() @ weight.double().cpu().t()
    return out if bias is None else out + bias.double().cpu()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 2, 5, 16] if INTERPRETED else [1, 2, 3, 5, 8, 13, 16, 17, 33, 64, 65])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products(rows, with_bias, dtype):
    from hexad.operators.triton import linear as provider

    fresh_seed()
    inside, outside = random.choice([(256, 96), (1104, 64)]) if INTERPRETED else random.choice([(4096, 1536), (1104, 4096), (576, 1000)])
    x, weight = draw(rows, inside, dtype=dtype), draw(outside, inside, dtype=dtype, scale=inside**-0.5)
    bias = draw(outside, dtype=dtype) if with_bias else None
    residual = draw(rows, outside, dtype=dtype)
    prepared = (weight, bias)
    out = provider.bind_linear(LinearArgs(inside, outside, with_bias, dtype, DEVICE))(x, prepared)
    assert_close(out, product_64(x, weight, bias), dtype)
    args = FusedLinearArgs(inside, outside, with_bias, dtype, DEVICE)
    expected = residual.double().cpu() + product_64(x, weight, bias)
    assert_close(provider.bind_linear_add(args)(x, residual, prepared), expected, dtype)
    gated = FusedLinearArgs(inside, outside, with_bias, dtype, DEVICE, activation="silu")
    gate, up = product_64(x, weight, bias).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    assert_close(provider.bind_gated_linear(gated)(x, prepared), expected, dtype, slack=2.0)


@pytest.mark.parametrize("kind", ["gemv", "skinny"])
def test_each_product_kernel_at_odd_sizes(kind):
    """Outputs and inputs that no tile divides."""
    from hexad.operators.triton.linear import Product
    from hexad.operators.triton.tuning import Choice

    fresh_seed()
    dtype = HALVES[0]
    rows = 1 if kind == "gemv" else 11
    choice = Choice("gemv", 4, 256, 4, prefetch=256) if kind == "gemv" else Choice("skinny", 32, 64, 4, 3, 16, prefetch=512)
    inside, outside = 328, 101
    x, weight = draw(rows, inside, dtype=dtype), draw(outside, inside, dtype=dtype, scale=inside**-0.5)
    product = Product(FusedLinearArgs(inside, outside, False, dtype, DEVICE), "linear", choice)
    assert_close(product.few(x, (weight, None), None), product_64(x, weight, None), dtype)


@pytest.mark.parametrize(("rows", "split"), [(3, 1), (16, 3), (29, 2), (64, 6)])
def test_stream_products(rows, split):
    """Alone, gated, and split with bias or residual."""
    from hexad.operators.triton.linear import Product
    from hexad.operators.triton.tuning import Choice

    fresh_seed()
    dtype = HALVES[0]
    inside, outside = 768, 256
    choice = Choice("stream", 64, 64, 4, 3, 16 if rows <= 16 else 64, split, 128)
    x, weight = draw(rows, inside, dtype=dtype), draw(outside, inside, dtype=dtype, scale=inside**-0.5)
    bias, residual = draw(outside, dtype=dtype), draw(rows, outside, dtype=dtype)
    plain = product_64(x, weight, None)
    args = FusedLinearArgs(inside, outside, False, dtype, DEVICE)
    assert_close(Product(args, "linear", choice).few(x, (weight, None), None), plain, dtype)
    expected = plain + residual.double().cpu()
    assert_close(Product(args, "linear_add", choice).few(x, (weight, None), residual), expected, dtype)
    biased = FusedLinearArgs(inside, outside, True, dtype, DEVICE)
    assert_close(Product(biased, "linear", choice).few(x, (weight, bias), None), product_64(x, weight, bias), dtype)
    if split == 1:
        gated = FusedLinearArgs(inside, outside, False, dtype, DEVICE, activation="silu")
        gate, up = plain.chunk(2, -1)
        out = Product(gated, "gated_linear", choice).few(x, (weight, None), None)
        assert_close(out, torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.skipif(INTERPRETED, reason="Gluon kernels run on the card only")
@pytest.mark.parametrize(("rows", "block_n", "step", "warps"), WARP_TILES)
def test_warp_products(rows, block_n, step, warps):
    """Alone, with bias, gated, and added to a residual."""
    from hexad.operators.triton.linear import Product
    from hexad.operators.triton.tuning import Choice

    fresh_seed()
    dtype = random.choice(HALVES)
    inside, outside = 1536, 320
    choice = Choice("warp", block_n, step, warps, 1, 8 if rows <= 8 else 16 if rows <= 16 else 32)
    x, weight = draw(rows, inside, dtype=dtype), draw(outside, inside, dtype=dtype, scale=inside**-0.5)
    bias, residual = draw(outside, dtype=dtype), draw(rows, outside, dtype=dtype)
    for given in (None, bias):
        args = FusedLinearArgs(inside, outside, given is not None, dtype, DEVICE)
        plain = product_64(x, weight, given)
        assert_close(Product(args, "linear", choice).few(x, (weight, given), None), plain, dtype)
        total = residual.clone()
        assert_close(Product(args, "linear_add", choice).few(x, (weight, given), total), residual.double().cpu() + plain, dtype)
        gated = FusedLinearArgs(inside, outside, given is not None, dtype, DEVICE, activation="gelu_tanh")
        gate, up = plain.chunk(2, -1)
        expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
        assert_close(Product(gated, "gated_linear", choice).few(x, (weight, given), None), expected, dtype, slack=2.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_best_token_prefers_the_lowest_id(dtype):
    from hexad.operators.triton.argmax import bind_best_token

    fresh_seed()
    vocab = random.randrange(9000, 12000)
    wide = draw(7, vocab + 40, dtype=dtype)
    wide[:, vocab:] = 100.0  # padding is never drawn
    ids = [0, vocab - 1, 4097, random.randrange(vocab - 1)]
    for row, index in enumerate(ids):
        wide[row, index] = wide[row, vocab - 1] = 50.0
    best_token = bind_best_token(BestTokenArgs(vocab, dtype, DEVICE))
    token_ids, codes = best_token(wide)
    assert token_ids[:4].tolist() == ids and not codes.any()
    expected, _ = best_token_reference(BestTokenArgs(vocab, dtype, DEVICE))(wide[4:])
    assert torch.equal(token_ids[4:], expected)
    wide[1, 5000], wide[2, 17], wide[3, :vocab] = float("nan"), float("inf"), float("-inf")
    token_ids, codes = best_token(wide)
    assert token_ids[1] == 5000 and codes.tolist() == [0, 1, 1, 1, 0, 0, 0] and 0 <= int(token_ids[3]) < vocab
