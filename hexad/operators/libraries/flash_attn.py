"""Prompts' attention by FlashAttention 4 (Shah, Dao et al.; package flash-attn-4, written in CuTe's Python): any mix of rows in one call.

It compiles a variant at its first call (seconds), which is kept in the cache folder. Nothing waits for the device.
"""

from __future__ import annotations

import importlib
import os

import torch

from hexad.common.cache import cache_dir
from hexad.operators.args import AttentionArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.libraries.pages import own_pages
from hexad.operators.registry import Kernel


def bind(args: AttentionArgs) -> Kernel:
    """Raises ImportError, or what else the library's import ends with."""
    # read when it is imported; without a folder named it would load code from the machine's common one for temporary files
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_dir() / "flash_attn"))
    attend = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    options = {"softmax_scale": args.scale, "causal": True, "softcap": args.softcap or 0.0}

    def paged_attention(q: torch.Tensor, kv: KVPages, batch: AttentionBatch) -> torch.Tensor:
        result = attend(
            q,
            kv.k,
            kv.v,
            cu_seqlens_q=batch.query_start,
            seqused_k=batch.seq_lens,
            page_table=own_pages(batch),
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_seq_len,
            **options,
        )
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out.flatten(1)

    return paged_attention
