"""Prompts' attention by FlashInfer (Ye et al. 2025; package flashinfer-python): any mix of rows, planned on the host once a step.

The plan needs the rows' lengths on the host and so waits for the device. Its code is compiled at the first call, which takes nvcc, and
one to two minutes for a Hopper.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from hexad.operators.args import AttentionArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.libraries.pages import own_pages
from hexad.operators.registry import Kernel

WORKSPACE_BYTES = 128 << 20  # what its documentation advises


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def bind(args: AttentionArgs) -> Kernel:
    """Raises ImportError, or what else the library's import ends with."""
    make = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    key = f"flashinfer {args}"  # layers of other kinds have plans of their own

    def paged_attention(q: torch.Tensor, kv: KVPages, batch: AttentionBatch) -> torch.Tensor:
        if key not in batch.scratch:
            wrapper = make(_workspace(q.device), "NHD")
            wrapper.plan(*_rows(batch), args.heads, args.kv_heads, args.head_dim, batch.block_size, **_options(args))
            batch.scratch[key] = wrapper
        out: torch.Tensor = batch.scratch[key].run(q, (kv.k, kv.v))
        return out.flatten(1)

    return paged_attention


def _options(args: AttentionArgs) -> dict[str, Any]:
    return {
        "causal": True,
        "sm_scale": args.scale,
        "logits_soft_cap": args.softcap,
        "q_data_type": args.dtype,
        "kv_data_type": args.kv_dtype,
    }


def _rows(batch: AttentionBatch) -> tuple[torch.Tensor, ...]:
    """(query offsets, page offsets, pages one row after the other, keys in each row's last page), int32.

    A padding row (no keys) is given one key, which nobody looks at.
    """
    lengths = batch.seq_lens.to("cpu").clamp(min=1)  # waits for the device
    counts = (lengths + batch.block_size - 1) // batch.block_size
    page_start = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    page_start[1:] = counts.cumsum(0)
    device = batch.block_table.device
    named = torch.arange(batch.block_table.shape[1]) < counts[:, None]
    pages = own_pages(batch)[named.to(device)]
    last = lengths - (counts - 1) * batch.block_size
    return batch.query_start.to("cpu"), page_start, pages.to(torch.int32), last.to(torch.int32)
