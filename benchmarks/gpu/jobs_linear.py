"""Products of a few rows: every tile choice per layer shape and number of rows, beside the library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timing import Job, Made, relative_error

from hexad.operators.fused import FusedLinearArgs
from hexad.operators.triton.linear import Product
from hexad.operators.triton.rows import bind_gated_act
from hexad.operators.triton.tuning import BUCKETS, Choice

GEMV = [(2, 2048, 4, 0), (2, 2048, 4, 2048), (1, 2048, 4, 0), (1, 2048, 4, 2048), (4, 1024, 4, 1024), (4, 2048, 8, 0), (2, 1024, 2, 1024)]
SKINNY = [  # block_n, block_k, warps, stages, prefetch
    (16, 256, 4, 4, 1024), (16, 256, 4, 4, 4096), (32, 128, 2, 6, 1024), (32, 128, 2, 6, 4096), (32, 256, 4, 4, 0), (32, 256, 4, 4, 1024),
    (32, 256, 4, 4, 4096), (32, 256, 4, 6, 2048), (32, 512, 4, 3, 2048), (64, 128, 4, 4, 1024), (64, 256, 8, 3, 1024),
    (32, 512, 8, 4, 1024),
]  # fmt: skip
STREAM = [  # block_n, block_k, warps, stages, split, prefetch
    (128, 64, 4, 4, 1, 512), (128, 64, 4, 6, 1, 512), (128, 128, 4, 3, 1, 512), (64, 128, 4, 4, 1, 1024), (64, 128, 4, 6, 1, 0),
    (128, 64, 4, 4, 4, 512), (128, 64, 4, 6, 4, 512), (128, 128, 4, 3, 4, 512), (64, 128, 4, 4, 2, 1024), (64, 128, 4, 6, 2, 1024),
    (64, 128, 4, 4, 4, 512), (128, 128, 8, 4, 4, 512), (128, 64, 4, 4, 2, 512), (128, 128, 4, 4, 8, 512),
]  # fmt: skip
SHAPES = {
    "llama-3.1-8b": [("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336), ("head", 128256, 4096)],
    "llama-3.2-1b": [("qkv", 3072, 2048), ("o", 2048, 2048), ("gate_up", 16384, 2048), ("down", 2048, 8192), ("head", 128256, 2048)],
}
FUSED = {"gate_up": "gated_linear"}


def choices(op: str, out: int, inside: int, rows: int) -> list[Choice]:
    own = [Choice("gemv", n, k, warps, prefetch=ahead) for n, k, warps, ahead in GEMV] if rows == 1 else []
    if 1 < rows <= 16:
        own += [Choice("skinny", n, k, warps, stages, 16, prefetch=ahead) for n, k, warps, stages, ahead in SKINNY]
    if rows > 1:
        wide = [Choice("stream", n, k, warps, stages, max(16, rows), split, ahead) for n, k, warps, stages, split, ahead in STREAM]
        width = out // 2 if op == "gated_linear" else out
        own += [c for c in wide if width % c.block_n == 0 and inside % (c.split * c.block_k) == 0 and fits(op, width, c)]
    return [Choice("library"), *own]


def fits(op: str, width: int, choice: Choice) -> bool:
    """Split only where one program a block of outputs would leave processors idle."""
    programs = width // choice.block_n
    return (choice.split == 1 or (op == "linear" and programs < 200)) and 48 <= programs * choice.split <= 4096


def product_job(op: str, out: int, inside: int, rows: int, choice: Choice, label: str) -> Job:
    gated = op == "gated_linear"
    width = out // 2 if gated else out

    def make(copies: int) -> Made:
        args = FusedLinearArgs(inside, out, False, torch.bfloat16, "cuda", "silu" if gated else "")
        product = Product(args, op, choice)
        act = bind_gated_act(args.act) if gated else None
        xs = [torch.randn(rows, inside, device="cuda").bfloat16() for _ in range(copies)]
        weights = [(torch.randn(out, inside, device="cuda") * inside**-0.5).bfloat16() for _ in range(copies)]

        def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
            if choice.kind != "library":
                return product.few(x, (weight, None), None)
            return F.linear(x, weight) if act is None else act(F.linear(x, weight))

        def check() -> float:
            y = xs[0].float() @ weights[0].float().t()
            if gated:
                y = F.silu(y[:, :width]) * y[:, width:]
            return relative_error(call(xs[0], weights[0]), y)

        return [lambda x=x, w=w: call(x, w) for x, w in zip(xs, weights, strict=True)], check

    size = 2.0 * out * inside
    name = f"{label} {op} {out}x{inside} M={rows} {','.join(map(str, vars(choice).values()))}"
    labels = {"op": op, "out": out, "in": inside, "rows": rows, "choice": list(vars(choice).values())}
    moved = size + 2.0 * rows * (inside + width)
    return Job("linear", name, make, bytes_moved=moved, flops=2.0 * rows * out * inside, buffer_bytes=size, labels=labels)


def jobs(models: list[str], buckets: list[int]) -> list[Job]:
    made = []
    for model in models:
        for label, out, inside in SHAPES[model]:
            for rows in buckets:
                for op in filter(None, ("linear", FUSED.get(label))):
                    made += [product_job(op, out, inside, rows, choice, f"{model} {label}") for choice in choices(op, out, inside, rows)]
    return made


def tuned(rows: list[dict]) -> dict[str, dict[str, list]]:
    """The fastest choice of each problem, as the shipped table has it; buckets that were not measured take the next larger one's."""
    best: dict[str, dict[int, dict]] = {}
    for row in rows:
        if row["section"] == "linear":
            problem = best.setdefault(f"{row['op']},{row['out']},{row['in']}", {})
            if row["rows"] not in problem or row["us"] < problem[row["rows"]]["us"]:
                problem[row["rows"]] = row
    table: dict[str, dict[str, list]] = {}
    for problem, by_rows in best.items():
        table[problem] = {}
        for bucket in BUCKETS:
            measured = next((size for size in sorted(by_rows) if size >= bucket and (bucket > 1 or size == 1)), None)
            if measured is not None:
                table[problem][str(bucket)] = by_rows[measured]["choice"]
    return table
