"""`paged_attention` where a library computes the long prompts of a step, and the package's own kernels all else.

Decode rows and short prompts, which the engine captures into graphs, stay with the own kernels: they split the keys of a few rows over the
whole card, plan on the device and can be replayed, none of which the libraries do. benchmarks/gpu/library_attention.py times both at every
kind of step.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace

import torch

from hexad.common.errors import ConfigError
from hexad.operators.args import AttentionArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.libraries.fastest import Fastest
from hexad.operators.libraries.provider import LIBRARIES, MEASURED, reasons_of
from hexad.operators.registry import Kernel
from hexad.operators.triton.attention import bind_paged_attention

LEAST_QUERIES = 513  # of the longest prompt; steps of that many tokens are never captured


Choice = Callable[[torch.Tensor, KVPages, AttentionBatch], Kernel]


class PromptAttention:
    """A kernel of `paged_attention`: `choose` says who computes the rows of a step that belong to prompts."""

    def __init__(self, choose: Choice, own: Kernel) -> None:
        self.choose, self.own = choose, own

    def takes(self, q: torch.Tensor, _kv: KVPages, batch: AttentionBatch) -> bool:
        """Whether a library may compute part of this step. On tensors without memory (`hexad warm`) none does."""
        return batch.max_query_len >= LEAST_QUERIES and not q.is_meta

    def __call__(self, q: torch.Tensor, kv: KVPages, batch: AttentionBatch) -> torch.Tensor:
        """q [T, H, D] -> [T, H * D]. Raises what the library raises, RuntimeError in general."""
        kernel, count = self.own, batch.num_decodes
        if self.takes(q, kv, batch):
            decodes, prompts = parts(batch) if count else (batch, batch)
            kernel = self.choose(q[count:], kv, prompts)
            if kernel is not self.own and count:
                return torch.cat((self.own(q[:count], kv, decodes), kernel(q[count:], kv, prompts)))
        out: torch.Tensor = kernel(q, kv, batch)
        return out


def parts(batch: AttentionBatch) -> tuple[AttentionBatch, AttentionBatch]:
    """The decode rows, which come first and have one token each, and the others; made once a step."""
    if "prompts.parts" not in batch.scratch:
        count = batch.num_decodes
        rows = {name: getattr(batch, name) for name in ("seq_lens", "block_table", "slots")}
        decodes = replace(
            batch, query_start=batch.query_start[: count + 1], max_query_len=1, scratch={}, **{name: rows[name][:count] for name in rows}
        )
        prompts = replace(
            batch, query_start=batch.query_start[count:] - count, num_decodes=0, shared_len=None, scratch={},
            max_seq_len=batch.prompt_keys,
            **{name: rows[name][count:] for name in rows},
        )  # fmt: skip
        batch.scratch["prompts.parts"] = decodes, prompts
    made: tuple[AttentionBatch, AttentionBatch] = batch.scratch["prompts.parts"]
    return made


def bind(name: str, args: AttentionArgs) -> Kernel:
    """`name`: a library, or `MEASURED`. Raises ConfigError: a library is there and cannot be loaded."""
    own = bind_paged_attention(args)
    if name != MEASURED:
        library = _library(name, args)
        return PromptAttention(lambda *_: library, own)
    serving = {library: _library(library, args) for library in LIBRARIES if not reasons_of(library, args)}
    return PromptAttention(Fastest(args, {"triton": own, **serving}), own)


def _library(name: str, args: AttentionArgs) -> Kernel:
    try:
        kernel: Kernel = importlib.import_module(f"hexad.operators.libraries.{name}").bind(args)
    except Exception as error:  # whatever an import may end with
        package = LIBRARIES[name].package
        raise ConfigError(
            f"{package} is installed, but cannot be loaded ({type(error).__name__}: {error}): mend or remove it, or choose another "
            "provider of paged_attention"
        ) from error
    return kernel
