"""`draw` and `token_ranks` by the native library: a row a thread, nothing sorted but what lies at a border."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hexad.operators.args import DrawArgs
from hexad.operators.draw import DrawOptions
from hexad.operators.native.library import MOST_RANKED, DrawTask, RankTask, check, probe, require
from hexad.operators.registry import Kernel
from hexad.operators.token_ranks import token_ranks_reference


def supports_draw(args: DrawArgs) -> list[str]:
    if args.device_type != "cpu":
        return [f"needs a CPU, not {args.device_type}"]
    library, reason = probe()
    return [] if library is not None else [reason]


def bind_draw(args: DrawArgs) -> Kernel:
    library, vocab = require(), args.vocab_size
    library.set_threads(torch.get_num_threads())

    def draw(logits: Tensor, best: Tensor, options: DrawOptions, uniforms: Tensor) -> Tensor:
        assert logits.dtype == torch.float32 and logits.shape[1] == vocab and logits.stride(1) == 1
        rows = logits.shape[0]
        out = torch.empty(rows, dtype=torch.int64)
        best = best.contiguous()
        least = options.min_weight
        task = DrawTask(
            logits.data_ptr(), logits.stride(0), vocab, best.data_ptr(), options.temperature.data_ptr(),
            None if least is None else least.data_ptr(), options.top_k.data_ptr(), options.top_p.data_ptr(), uniforms.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        check(library.handle.hx_draw(ctypes.byref(task), rows))
        return out

    return draw


def bind_token_ranks(args: DrawArgs) -> Kernel:
    library, vocab, reference = require(), args.vocab_size, token_ranks_reference(args)
    library.set_threads(torch.get_num_threads())

    def token_ranks(logits: Tensor, best: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        if top > MOST_RANKED:  # long lists are sorted
            ranks: tuple[Tensor, Tensor, Tensor] = reference(logits, best, token_ids, top)
            return ranks
        assert logits.dtype == torch.float32 and logits.shape[1] == vocab and logits.stride(1) == 1
        rows, best, token_ids = logits.shape[0], best.contiguous(), token_ids.contiguous()
        out = [torch.empty(shape, dtype=torch.int64) for shape in ((rows,), (rows,), (rows, top))]
        task = RankTask(
            logits.data_ptr(), logits.stride(0), vocab, best.data_ptr(), token_ids.data_ptr(), top, *(tensor.data_ptr() for tensor in out)
        )  # fmt: skip
        check(library.handle.hx_rank(ctypes.byref(task), rows))
        return out[0], out[2], out[1]

    return token_ranks
