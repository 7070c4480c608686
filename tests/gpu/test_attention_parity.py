"""Paged attention kernels against a float64 reference."""

import random

import pytest
import torch
from reference import DEVICE, DTYPES, INTERPRETED, assert_close, attention_case, attention_reference, fresh_seed, needs_kernels

from hexad.operators.args import AttentionArgs

pytestmark = needs_kernels

LONG = 1 if INTERPRETED else 8  # the interpreter is slow: shorter rows there
SHAPES = [(4, 2, 64, 16), (3, 3, 80, 64), (6, 2, 96, 32), (2, 1, 256, 128), (8, 1, 128, 32) if INTERPRETED else (16, 1, 128, 64)]
COPIES = [False] if INTERPRETED else [False, None]


def run(query_lens, seq_lens, heads, kv_heads, dim, block, dtype, window=None, softcap=None, padding=0, copies=None, contiguous=False):
    from hexad.operators.triton.attention import attention_reasons, bind_paged_attention

    args = AttentionArgs(heads, kv_heads, dim, dim**-0.5 * 1.3, window, softcap, block, dtype, dtype, DEVICE)
    assert attention_reasons(args) == []
    case = attention_case(query_lens, seq_lens, heads, kv_heads, dim, block, dtype, window, padding, contiguous)
    attend = bind_paged_attention(args, tensor_copies=copies)
    out = attend(case.q, case.kv, case.batch)[: sum(query_lens)]
    assert_close(out, attention_reference(case, query_lens, args.scale, window, softcap), dtype)
    return attend, case, out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block"), SHAPES)
def test_ragged_mix_of_decode_and_prefill(heads, kv_heads, dim, block, dtype, copies):
    fresh_seed()
    decodes = [1, block, block + 1, 64 * LONG + 7]
    prefills = [(5, 5), (1, 3), (17, 17 + block), (70 * LONG, 70 * LONG + 9)]
    query_lens = [1] * len(decodes) + [q for q, _ in prefills]
    run(query_lens, decodes + [n for _, n in prefills], heads, kv_heads, dim, block, dtype, copies=copies)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize(("window", "softcap"), [(24, None), (None, 5.0), (40, 8.0), (1, None), (300, None)])
def test_window_and_softcap(window, softcap, copies):
    fresh_seed()
    dtype = DTYPES[0]
    block = random.choice([16, 64])
    decodes = [1, 24, 25, 130 * LONG]
    prefills = [(30, 30), (33, 97), (90 * LONG, 100 * LONG)]
    query_lens = [1] * len(decodes) + [q for q, _ in prefills]
    run(query_lens, decodes + [n for _, n in prefills], 4, 2, 64, block, dtype, window, softcap, copies=copies)


@pytest.mark.parametrize("block", [16, 64])
def test_padding_rows_and_unsorted_rows(block):
    fresh_seed()
    dtype = DTYPES[0]
    run([1, 1, 1], [33, 1, 64], 4, 1, 64, block, dtype, padding=3)
    run([4, 1, 1], [33, 1, 64], 4, 1, 64, block, dtype)


@pytest.mark.parametrize("block", [16, 64])
def test_many_splits_agree_with_one(block):
    """One long row: its keys are split over many programs; the reference does not know of splits."""
    fresh_seed()
    length = 1000 * LONG + random.randrange(100)
    run([1], [length], 8, 2, 64, block, DTYPES[0])
    run([1] * 3, [length, 3, length // 3], 2, 2, 64, block, DTYPES[0], window=None if INTERPRETED else 500)


@pytest.mark.parametrize("query_len", [1, 40])
def test_a_distant_key_matters(query_len):
    """Changing one key far back changes the output of its head group and of no other."""
    fresh_seed()
    length = 150 * LONG
    attend, case, before = run([query_len], [length], 4, 2, 64, 16, DTYPES[0])
    before = before.clone()
    block = int(case.batch.block_table[0, 0])
    case.kv.k[block, 3, 1] = case.q[-1, 3] * 4  # key head 1 at position 3 now points along the last query of head 3
    case.batch.scratch.clear()
    after = attend(case.q, case.kv, case.batch)[:query_len]
    change = (after.float() - before.float()).view(query_len, 4, 64).norm(dim=-1)
    assert float(change[-1, 3]) > 0.1
    assert float(change[:, :2].max()) == 0.0


@pytest.mark.skipif(INTERPRETED, reason="Gluon kernels run on the card only")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block"), [(4, 1, 128, 64), (3, 3, 64, 64), (8, 2, 128, 128), (4, 2, 64, 256)])
def test_long_prefill_over_contiguous_pages(heads, kv_heads, dim, block, dtype):
    """Shapes that the warp-specialised kernel of Hopper serves: whole and partial tiles, cached prefixes, lengths beside tile borders."""
    fresh_seed()
    longest = random.randrange(769, 1000)  # long enough for that kernel
    rows = [
        (1, 77),
        (128, 128),
        (129, 129),
        (200, 640),
        (64, 65),
        (3, 300),
        (511, 1023),
        (1, 1),
        (longest, longest + random.randrange(300)),
    ]
    attend, case, out = run([q for q, _ in rows], [n for _, n in rows], heads, kv_heads, dim, block, dtype, contiguous=True)
    again = attend(case.q, case.kv, case.batch)
    assert torch.equal(again, out), "two runs differ"
    single = random.randrange(800, 3000)
    run([single], [single], heads, kv_heads, dim, block, dtype, contiguous=True)


@pytest.mark.parametrize("contiguous", [False, True])
def test_the_order_of_programs_changes_no_bit(contiguous, monkeypatch):
    """Heads abreast or one after the other, in the general kernel and, over contiguous pages, the warp-specialised one."""
    from hexad.operators.triton import attention

    fresh_seed()
    prefills = [(17, 17), (40, 100), (100 * LONG, 130 * LONG)]
    query_lens, seq_lens = [1, *(q for q, _ in prefills)], [70, *(n for _, n in prefills)]
    attend, case, out = run(query_lens, seq_lens, 6, 2, 128, 64, DTYPES[0], contiguous=contiguous)
    assert max(seq_lens) <= attention.ABREAST_KEYS
    monkeypatch.setattr(attention, "ABREAST_KEYS", 0)
    assert torch.equal(attend(case.q, case.kv, case.batch)[: sum(query_lens)], out)
