"""Decode over a prefix that all rows share, against the float64 reference, which knows nothing of sharing."""

import random

import pytest
import torch
from reference import DEVICE, DTYPES, INTERPRETED, assert_close, attention_case, attention_reference, fresh_seed, needs_kernels

from hexad.operators.args import AttentionArgs

pytestmark = needs_kernels

LONG = 1 if INTERPRETED else 8


def shared_case(shared, tails, heads, kv_heads, dim, block, dtype, padding):
    """Rows whose first `shared` keys lie in the same blocks (row 0's)."""
    lengths = [shared + tail for tail in tails]
    case = attention_case([1] * len(tails), lengths, heads, kv_heads, dim, block, dtype, padding_rows=padding)
    for row in range(1, len(tails)):
        case.batch.block_table[row, : shared // block] = case.batch.block_table[0, : shared // block]
        case.keys[row][:shared] = case.keys[0][:shared]
        case.values[row][:shared] = case.values[0][:shared]
    case.batch.shared_len = torch.tensor([shared], dtype=torch.int32, device=DEVICE)
    return case


def attend(case, heads, kv_heads, dim, block, dtype, window=None, softcap=None):
    from hexad.operators.triton.attention import bind_paged_attention

    args = AttentionArgs(heads, kv_heads, dim, dim**-0.5 * 1.3, window, softcap, block, dtype, dtype, DEVICE)
    out = bind_paged_attention(args)(case.q, case.kv, case.batch)
    rows = len(case.keys)
    assert_close(out[:rows], attention_reference(case, [1] * rows, args.scale, window, softcap), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block"), [(4, 2, 64, 16), (8, 2, 128, 64), (3, 1, 80, 32)])
@pytest.mark.parametrize("rows", [2, 9])
def test_rows_share_a_prefix(rows, heads, kv_heads, dim, block, dtype):
    fresh_seed()
    shared = block * random.randint(1, 2 * LONG)
    tails = [random.choice([1, block, block + 1, 64 * LONG + 5]) for _ in range(rows)]
    case = shared_case(shared, tails, heads, kv_heads, dim, block, dtype, padding=random.choice([0, 3]))
    attend(case, heads, kv_heads, dim, block, dtype)


TILES = [(64, 4, 2, 2), (64, 4, 4, 2), (128, 8, 3, 1), (128, 8, 4, 1), (128, 8, 3, 4), (256, 8, 3, 1)]
VARIANTS = [(*tiles, copies) for tiles in TILES for copies in ([False] if INTERPRETED else [False, True])]


@pytest.mark.parametrize(("pairs", "warps", "stages", "per_sm", "copies"), VARIANTS)
@pytest.mark.parametrize("block", [64, 16])
def test_each_tiling_of_the_shared_kernel(block, pairs, warps, stages, per_sm, copies):
    """Parts that get no keys, tiles with rows that are not there, and rows of several items after the prefix."""
    from hexad.operators.triton.attention import Layout
    from hexad.operators.triton.launch import target
    from hexad.operators.triton.shared_prefix import SharedTiles

    fresh_seed()
    dtype, heads, kv_heads, dim = DTYPES[0], 8, 2, 128 if not INTERPRETED else 64
    rows = random.randint(3, 9 if INTERPRETED else 90)
    tails = [random.choice([1, 63, 64, 65, 64 * LONG + 5]) for _ in range(rows)]
    case = shared_case(block * random.randint(1, 5 * LONG), tails, heads, kv_heads, dim, block, dtype, padding=2)
    args = AttentionArgs(heads, kv_heads, dim, dim**-0.5, None, None, block, dtype, dtype, DEVICE)
    layout = Layout(args, target(), case.q.stride(0), block, case.kv.k.stride(), tensor_copies=copies and target().tensor_copies)
    layout.prefix.forced = SharedTiles(pairs, warps, stages, per_sm)
    out = torch.full((rows + 2, heads * dim), float("nan"), dtype=dtype, device=DEVICE)
    layout.decode(case.q, case.kv, case.batch, rows + 2, out)
    assert_close(out[:rows], attention_reference(case, [1] * rows, args.scale, None, None), dtype)


def test_a_shared_length_of_zero_changes_nothing():
    """A captured step may meet a batch without a common prefix."""
    fresh_seed()
    case = shared_case(0, [5, 70, 33], 4, 2, 64, 16, DTYPES[0], padding=1)
    attend(case, 4, 2, 64, 16, DTYPES[0])


@pytest.mark.parametrize(("window", "softcap"), [(20, None), (None, 6.0)])
def test_window_and_softcap_with_a_shared_prefix(window, softcap):
    """A window looks past the prefix: sharing is of no use and must not change it."""
    fresh_seed()
    case = shared_case(48, [3, 30, 17], 4, 2, 64, 16, DTYPES[0], padding=0)
    attend(case, 4, 2, 64, 16, DTYPES[0], window, softcap)
