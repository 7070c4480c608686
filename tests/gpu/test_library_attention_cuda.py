"""Attention of FlashAttention 4 and FlashInfer against the reference, where they are installed."""

import random
from dataclasses import replace

import pytest
import torch

from hexad.operators.args import AttentionArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.libraries.provider import installed
from hexad.operators.load import load_operators

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BLOCK = 64
ARGS = AttentionArgs(32, 8, 128, 128**-0.5, None, None, BLOCK, torch.bfloat16, torch.bfloat16, "cuda")


@pytest.mark.parametrize("library", ["flash_attn", "flashinfer"])
@pytest.mark.parametrize("window", [None, 200])
def test_mixed_steps_agree_with_the_reference(library, window):
    if not installed(library):
        pytest.skip(f"{library} is not installed")
    registry, args = load_operators(), replace(ARGS, window=window)
    call = registry.bind("paged_attention", args, {"paged_attention": library}).call
    rows = [(1, 1), (1, 777), (64, 64), (130, 513), (1, 2048), (300, 300)]
    random.shuffle(rows)
    queries, lengths = zip(*rows, strict=True)
    width = -(-max(lengths) // BLOCK)
    table = torch.full((len(rows), width), -1, dtype=torch.int32)
    order = torch.randperm(width * len(rows)).tolist()
    for row, length in enumerate(lengths):
        table[row, : -(-length // BLOCK)] = torch.tensor([order.pop() for _ in range(-(-length // BLOCK))], dtype=torch.int32)
    start = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    batch = AttentionBatch(
        query_start=start.cuda(), seq_lens=torch.tensor(lengths, dtype=torch.int32).cuda(), block_table=table.cuda(),
        slots=torch.full((sum(queries),), -1).cuda(), max_query_len=max(queries), max_seq_len=max(lengths), block_size=BLOCK, num_decodes=0,
    )  # fmt: skip
    q = torch.randn(sum(queries), 32, 128, device="cuda").bfloat16()
    kv = KVPages(*(torch.randn(width * len(rows), BLOCK, 8, 128, device="cuda").bfloat16() for _ in range(2)))
    wanted = registry.reference("paged_attention", args)(q, kv, batch)
    torch.testing.assert_close(call(q, kv, batch).float(), wanted.float(), atol=2e-2, rtol=2e-2)
