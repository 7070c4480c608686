"""`paged_attention` where a library computes the long prompts of a step, and the package's own kernels all else.

Decode rows, short prompts and captured steps stay with the own kernels: they split the keys of a few rows over the whole card, plan on the
device and can be replayed, none of which the libraries do. benchmarks/gpu/library_attention.py times both at every kind of step.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import torch

from hexad.operators.args import AttentionArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.registry import Kernel
from hexad.operators.triton.attention import bind_paged_attention
from hexad.operators.triton.launch import capturing

LEAST_QUERIES = 513  # of the longest prompt; shorter steps are replayed from graphs


class PromptAttention:
    """A kernel of `paged_attention`: `library` takes q [T, H, D] of rows that all belong to prompts, and returns [T, H * D]."""

    def __init__(self, library: Kernel, own: Kernel) -> None:
        self.library, self.own = library, own

    def takes(self, q: torch.Tensor, _kv: KVPages, batch: AttentionBatch) -> bool:
        """Whether the library computes any part of this step. On tensors without memory (`hexad warm`) it does not."""
        return batch.max_query_len >= LEAST_QUERIES and not q.is_meta and not capturing(q.device)

    def __call__(self, q: torch.Tensor, kv: KVPages, batch: AttentionBatch) -> torch.Tensor:
        """[T, H * D]. Raises what the library raises, RuntimeError in general."""
        if not self.takes(q, kv, batch):
            out: torch.Tensor = self.own(q, kv, batch)
            return out
        count = batch.num_decodes
        if count == 0:
            return self.library(q, kv, batch)
        decodes, prompts = _parts(batch)
        return torch.cat((self.own(q[:count], kv, decodes), self.library(q[count:], kv, prompts)))


def _parts(batch: AttentionBatch) -> tuple[AttentionBatch, AttentionBatch]:
    """The decode rows, which come first and have one token each, and the others; made once a step."""
    if "prompts.parts" not in batch.scratch:
        count = batch.num_decodes
        rows = {name: getattr(batch, name) for name in ("seq_lens", "block_table", "slots")}
        decodes = replace(
            batch, query_start=batch.query_start[: count + 1], max_query_len=1, scratch={}, **{name: rows[name][:count] for name in rows}
        )
        prompts = replace(
            batch, query_start=batch.query_start[count:] - count, num_decodes=0, shared_len=None, scratch={},
            **{name: rows[name][count:] for name in rows},
        )  # fmt: skip
        batch.scratch["prompts.parts"] = decodes, prompts
    parts: tuple[AttentionBatch, AttentionBatch] = batch.scratch["prompts.parts"]
    return parts


def bind(name: str, args: AttentionArgs) -> Kernel:
    """Raises ImportError: the library is broken."""
    library: Kernel = importlib.import_module(f"hexad.operators.libraries.{name}").bind(args)
    return PromptAttention(library, bind_paged_attention(args))
