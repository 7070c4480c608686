"""A whole decode step of a Llama-shaped model from the operators, with random weights, as one captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jobs_linear import OPS, choices
from timing import capture, median_us
from torch.profiler import ProfilerActivity, profile

from hexad.operators.args import AttentionArgs, BestTokenArgs, NormArgs, RopeKVArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.fused import FusedLinearArgs
from hexad.operators.load import load_operators
from hexad.operators.triton.tuning import Choice, bucket

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
        self.norm = bind("rms_norm", norm)
        self.products = {}
        sizes = {"qkv": (qkv, hidden), "o": (hidden, heads * dim), "gate_up": (2 * width, hidden), "down": (hidden, width)}
        for label, (out, inside) in (sizes | {"head": (vocab, hidden)}).items():
            args = FusedLinearArgs(inside, out, False, dtype, "cuda", "silu" if label == "gate_up" else "")
            self.products[label] = bind(OPS[label], args.linear if OPS[label] == "linear" else args)
        self.rope = bind("rope_kv_write", RopeKVArgs(heads, kv_heads, dim, dim, False, False, 0.0, dtype, dtype, "cuda"))
        self.attention = bind("paged_attention", AttentionArgs(heads, kv_heads, dim, dim**-0.5, None, None, block, dtype, dtype, "cuda"))
        self.best_token = bind("best_token", BestTokenArgs(vocab, dtype, "cuda"))
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

    def attention_batch(self) -> AttentionBatch:
        return AttentionBatch(self.starts, self.lengths, self.table, self.slots, 1, self.context + 1, self.block, self.batch_size)

    def run(self) -> torch.Tensor:
        """One step; the tokens drawn are the next step's input."""
        batch, product = self.attention_batch(), self.products
        h = torch.nn.functional.embedding(self.tokens, self.embedding)
        for weights, kv in zip(self.weights, self.pages, strict=True):
            q = self.rope(product["qkv"](self.norm(h, self.gain), weights[0]), self.positions, self.cos_sin, self.slots, kv)
            h = product["o"](self.attention(q, kv, batch), h, weights[1])
            h = product["down"](product["gate_up"](self.norm(h, self.gain), weights[2]), h, weights[3])
        x = self.norm(h, self.gain)
        self.tokens.copy_(self.best_token(product["head"](x, self.head))[0])
        return x

    def graph_us(self) -> float:
        graph, _ = capture([self.run], 1)
        graph.replay()
        return median_us(graph.replay, 7)

    def tune(self) -> dict[str, list]:
        """The fastest kernel of each product inside the whole step, one product after another: "op,out,in" -> choice."""
        found, size = {}, bucket(self.batch_size)
        for label in ("gate_up", "down", "qkv", "o", "head"):
            product = self.products[label].product
            op, out, inside = product.op, product.args.out_features, product.args.in_features
            times = {}
            for choice in choices(op, out, inside, self.batch_size):
                product.set_choice(size, choice)
                times[choice] = self.graph_us()
            best = min(times, key=times.__getitem__)
            product.set_choice(size, best)
            found[f"{op},{out},{inside}"] = list(vars(best).values())
            ranked = sorted(times.items(), key=lambda pair: pair[1])
            shown = "; ".join(f"{us:.0f} {','.join(map(str, vars(c).values()))}" for c, us in ranked[:4])
            library, worst = times[Choice("library")], ranked[-1][1]
            print(f"batch {self.batch_size} {label} {out}x{inside}: library {library:.0f}; {shown}; worst {worst:.0f}", flush=True)
        return found

    def floor_us(self, read_gb_s: float, tflop_s: float) -> float:
        """Weights and keys once through memory, or the arithmetic of the products."""
        count = sum(w[0].numel() for ws in self.weights for w in ws) + self.head[0].numel()
        kv = sum(p.k[0, 0].numel() for p in self.pages) * 2 * 2 * self.batch_size * self.context
        return max(2 * count / read_gb_s / 1e3, 2 * count * self.batch_size / tflop_s / 1e6) + kv / read_gb_s / 1e3


def measure(name: str, batch: int, context: int, read_gb_s: float, tflop_s: float, table: dict | None) -> dict[str, Any]:
    """Time of a replayed and of an eager step, and where the replayed one's time goes by kernel."""
    step = Step(name, batch, context)
    if table is not None and bucket(batch) is not None:
        for problem, choice in step.tune().items():
            table.setdefault(problem, {})[str(batch)] = choice
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
