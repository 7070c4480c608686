"""How much memory a step's activations take: measured by running the largest one."""

from __future__ import annotations

import numpy as np
import torch

from hexad.models.build import Model
from hexad.models.inputs import ForwardInputs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.kv_int8 import row_width


@torch.inference_mode()
def activation_peak_bytes(
    model: Model, device: torch.device, max_batched_tokens: int, max_num_seqs: int, block_size: int, kv_dtype: torch.dtype
) -> int:
    """Peak bytes above what is resident while a step of `max_batched_tokens` is computed and `max_num_seqs` rows are sampled (CUDA)."""
    spec = model.spec
    tokens = min(max_batched_tokens, spec.max_len)
    rows = -(-max_batched_tokens // tokens)
    blocks = -(-tokens // block_size)
    shape = (blocks, block_size, spec.attention.kv_heads, row_width(spec.attention.head_dim, kv_dtype))
    pages = KVPages(torch.zeros(shape, dtype=kv_dtype, device=device), torch.zeros(shape, dtype=kv_dtype, device=device))
    inputs = _largest_step(len(spec.kv_layer_groups), rows, tokens, blocks, block_size, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    hidden = model.forward(inputs, [pages] * spec.num_layers)
    logits = model.logits(hidden[: min(max_num_seqs, len(hidden))])
    # sampling sorts a copy of the logits and keeps their order beside it
    logits.softmax(-1).sort(-1)
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _largest_step(groups: int, rows: int, tokens: int, blocks: int, block_size: int, device: torch.device) -> ForwardInputs:
    """`rows` prompts of `tokens` tokens that all use the same blocks: what they write does not matter."""
    positions = torch.arange(tokens, device=device).repeat(rows)
    starts = torch.from_numpy(np.arange(rows + 1, dtype=np.int32) * tokens).to(device)
    batch = AttentionBatch(
        query_start=starts,
        seq_lens=torch.full((rows,), tokens, dtype=torch.int32, device=device),
        block_table=torch.arange(blocks, dtype=torch.int32, device=device).repeat(rows, 1),
        slots=positions.clone(),
        max_query_len=tokens,
        max_seq_len=tokens,
        block_size=block_size,
        num_decodes=0,
    )
    return ForwardInputs(torch.zeros_like(positions), positions, (batch,) * groups)
