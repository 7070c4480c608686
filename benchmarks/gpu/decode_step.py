"""A whole decode step of a Llama-shaped model from the operators, with random weights, as one captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timing import capture, median_us
from torch.profiler import ProfilerActivity, profile

from hexad.operators.args import AttentionArgs, LinearArgs, NormArgs, RopeKVArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.fused import FusedLinearArgs
from hexad.operators.load import load_operators
from hexad.operators.triton.argmax import Argmax

SHAPES = {
    "llama-3.1-8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "dim": 128, "width": 14336, "vocab": 128256},
    "llama-3.2-1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "dim": 64, "width": 8192, "vocab": 128256},
}


class Step:
    """Weights, pages and bound operators of one model at one batch size."""

    def __init__(self, name: str, batch: int, context: int, block: int = 64) -> None:
        shape = SHAPES[name]
        self.layers, hidden, heads, kv_heads = shape["layers"], shape["hidden"], shape["heads"], shape["kv_heads"]
        dim, width, vocab = shape["dim"], shape["width"], shape["vocab"]
        dtype, self.batch_size, self.context, self.block = torch.bfloat16, batch, context, block

        def weight(out: int, inside: int) -> tuple[torch.Tensor, None]:
            return torch.empty(out, inside, dtype=dtype, device="cuda").normal_(std=inside**-0.5), None

        qkv = (heads + 2 * kv_heads) * dim
        self.weights = [
            (weight(qkv, hidden), weight(hidden, heads * dim), weight(2 * width, hidden), weight(hidden, width)) for _ in range(self.layers)
        ]
        self.head, self.embedding = weight(vocab, hidden), torch.empty(vocab, hidden, dtype=dtype, device="cuda").normal_()
        self.gain = torch.rand(hidden, device="cuda", dtype=dtype) + 0.5
        registry = load_operators()

        def bind(op: str, args: Any) -> Callable[..., Any]:
            bound = registry.bind(op, args)
            assert bound.provider == "triton", registry.explain(op, args)
            return bound.call

        norm = NormArgs(hidden, 1e-5, dtype, "cuda")
        self.norm, self.add_norm = bind("rms_norm", norm), bind("add_rms_norm", norm)
        self.linears = [bind("linear", LinearArgs(i, o, False, dtype, "cuda")) for o, i in self._sizes(qkv, hidden, heads * dim, width)]
        self.lm_head = bind("linear", LinearArgs(hidden, vocab, False, dtype, "cuda"))
        self.rope = bind("rope_kv_write", RopeKVArgs(heads, kv_heads, dim, dim, False, False, 0.0, dtype, dtype, "cuda"))
        self.attention = bind("paged_attention", AttentionArgs(heads, kv_heads, dim, dim**-0.5, None, None, block, dtype, dtype, "cuda"))
        self.gate_up = bind("gated_linear", FusedLinearArgs(hidden, 2 * width, False, dtype, "cuda", "silu"))
        self.argmax = Argmax(vocab)
        per_row = -(-(context + 1) // block)
        blocks = batch * per_row
        self.pages = [
            KVPages(*(torch.randn(blocks, block, kv_heads, dim, dtype=dtype, device="cuda") for _ in range(2))) for _ in range(self.layers)
        ]
        self.table = torch.randperm(blocks, device="cuda").int().view(batch, per_row)
        angles = torch.rand(context + 1, dim // 2, device="cuda")
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        self.tokens = torch.randint(0, vocab, (batch,), device="cuda")
        self.positions = torch.full((batch,), context, device="cuda")
        self.lengths = torch.full((batch,), context + 1, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        self.slots = self.table[:, context // block].long() * block + context % block

    @staticmethod
    def _sizes(qkv: int, hidden: int, inner: int, width: int) -> list[tuple[int, int]]:
        return [(qkv, hidden), (hidden, inner), (2 * width, hidden), (hidden, width)]

    def attention_batch(self) -> AttentionBatch:
        return AttentionBatch(self.starts, self.lengths, self.table, self.slots, 1, self.context + 1, self.block, self.batch_size)

    def run(self) -> torch.Tensor:
        """One step; the tokens drawn are the next step's input."""
        batch = self.attention_batch()
        residual = torch.nn.functional.embedding(self.tokens, self.embedding)
        x = self.norm(residual, self.gain)
        for weights, kv in zip(self.weights, self.pages, strict=True):
            q = self.rope(self.linears[0](x, weights[0]), self.positions, self.cos_sin, self.slots, kv)
            x, residual = self.add_norm(self.linears[1](self.attention(q, kv, batch), weights[1]), residual, self.gain)
            x, residual = self.add_norm(self.linears[3](self.gate_up(x, weights[2]), weights[3]), residual, self.gain)
        self.tokens.copy_(self.argmax(self.lm_head(x, self.head)))
        return x

    def floor_us(self, read_gb_s: float, tflop_s: float) -> float:
        """Weights and keys once through memory, or the arithmetic of the products."""
        count = sum(w[0].numel() for ws in self.weights for w in ws) + self.head[0].numel()
        kv = sum(p.k[0, 0].numel() for p in self.pages) * 2 * 2 * self.batch_size * self.context
        return max(2 * count / read_gb_s / 1e3, 2 * count * self.batch_size / tflop_s / 1e6) + kv / read_gb_s / 1e3


def measure(name: str, batch: int, context: int, read_gb_s: float, tflop_s: float) -> dict[str, Any]:
    """Time of a replayed and of an eager step, and where the replayed one's time goes by kernel."""
    step = Step(name, batch, context)
    first = step.run().clone()
    graph, _ = capture([step.run], 1)
    graph.replay()
    us = median_us(graph.replay, 15)
    eager = median_us(step.run, 3)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        graph.replay()
        torch.cuda.synchronize()
    kernels = sorted(((e.self_device_time_total, e.count, e.key[:60]) for e in trace.key_averages()), reverse=True)
    floor = step.floor_us(read_gb_s, tflop_s)
    label = {
        "section": "step",
        "name": f"{name} batch {batch} ctx {context}",
        "us": us,
        "eager_us": eager,
        "floor_us": floor,
        "share": floor / us,
    }
    finite = bool(torch.isfinite(first).all())
    return label | {"error": 0.0 if finite else float("inf"), "kernels": kernels[:14], "busy_us": sum(k[0] for k in kernels)}
