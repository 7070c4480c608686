"""Products of a few rows: every tile choice per layer shape and number of rows, beside the library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timing import Job, Made, relative_error

from hexad.operators.fused import FusedLinearArgs
from hexad.operators.triton.linear import Product
from hexad.operators.triton.rows import bind_gated_act
from hexad.operators.triton.tuning import Choice

GEMV = [(2, 2048, 4, 0), (2, 2048, 4, 2048), (1, 2048, 4, 0), (4, 1024, 4, 1024), (4, 2048, 8, 0), (2, 1024, 2, 1024), (1, 4096, 4, 0)]
WARP = [  # block_n, step, warps
    (16, 128, 4), (16, 64, 4), (16, 64, 8), (16, 128, 8), (32, 64, 4), (32, 64, 8), (32, 128, 4), (16, 256, 4), (16, 128, 2),
]  # fmt: skip
SKINNY = [  # block_n, block_k, warps, stages, prefetch
    (32, 256, 4, 4, 0), (32, 256, 4, 4, 1024), (32, 256, 4, 6, 2048), (32, 256, 4, 4, 4096), (16, 256, 4, 4, 1024),
]  # fmt: skip
STREAM = [  # block_n, block_k, warps, stages, split, prefetch
    (128, 64, 4, 4, 1, 512), (128, 64, 4, 6, 1, 512), (128, 128, 4, 3, 1, 512), (64, 128, 4, 4, 1, 1024), (64, 128, 4, 6, 1, 0),
    (64, 128, 4, 6, 1, 2048), (128, 64, 4, 6, 4, 512), (128, 128, 4, 3, 4, 512), (64, 128, 4, 4, 2, 1024), (64, 128, 4, 6, 2, 1024),
    (64, 128, 4, 4, 4, 512), (128, 128, 8, 4, 4, 512), (128, 128, 4, 3, 2, 1024),
    # at 64 rows these leave room for two programs a multiprocessor, so that gate-up's 224 are all at work at once, not 132 and then 92
    (64, 64, 4, 4, 1, 512), (64, 64, 4, 4, 1, 0), (64, 128, 4, 2, 1, 1024), (64, 64, 4, 6, 2, 512), (64, 128, 4, 3, 2, 1024),
    (64, 128, 4, 3, 4, 512), (64, 64, 4, 6, 4, 512), (128, 64, 4, 4, 1, 0),
]  # fmt: skip
SHAPES = {
    "llama-3.1-8b": [("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336), ("head", 128256, 4096)],
    "llama-3.2-1b": [("qkv", 3072, 2048), ("o", 2048, 2048), ("gate_up", 16384, 2048), ("down", 2048, 8192), ("head", 128256, 2048)],
}
OPS = {"qkv": "linear", "o": "linear_add", "gate_up": "gated_linear", "down": "linear_add", "head": "linear"}


def choices(op: str, out: int, inside: int, rows: int) -> list[Choice]:
    """What may serve one problem, the library first."""
    width = out // 2 if op == "gated_linear" else out
    own = [Choice("gemv", n, k, warps, prefetch=ahead) for n, k, warps, ahead in GEMV] if rows == 1 else []
    if 1 < rows <= 32:
        warp = [Choice("warp", n, k, warps, 1, max(8, rows)) for n, k, warps in WARP]
        own += [c for c in warp if inside % (c.warps * c.block_k) == 0 and (rows <= 16 or c.block_n == 32)]
    if 1 < rows <= 16:
        own += [Choice("skinny", n, k, warps, stages, 16, prefetch=ahead) for n, k, warps, stages, ahead in SKINNY]
    if rows > 1:
        wide = [Choice("stream", n, k, warps, stages, max(16, rows), split, ahead) for n, k, warps, stages, split, ahead in STREAM]
        own += [c for c in wide if width % c.block_n == 0 and inside % (c.split * c.block_k) == 0 and fits(op, width, rows, c)]
    return [Choice("library"), *own]


def fits(op: str, width: int, rows: int, choice: Choice) -> bool:
    """Splits where one program a block of outputs would leave processors idle; stages that shared memory holds."""
    programs = width // choice.block_n
    tiles = choice.block_n * (2 if op == "gated_linear" else 1) + max(16, rows)
    small = tiles * choice.block_k * 2 * choice.stages <= 225 * 1024
    return small and (choice.split == 1 or (op != "gated_linear" and programs < 200)) and 48 <= programs * choice.split <= 4096


def product_job(op: str, out: int, inside: int, rows: int, choice: Choice, label: str) -> Job:
    gated, added = op == "gated_linear", op == "linear_add"
    width = out // 2 if gated else out

    def make(copies: int) -> Made:
        args = FusedLinearArgs(inside, out, False, torch.bfloat16, "cuda", "silu" if gated else "")
        product = Product(args, op, choice)
        act = bind_gated_act(args.act) if gated else None
        xs = [torch.randn(rows, inside, device="cuda").bfloat16() for _ in range(copies)]
        weights = [(torch.randn(out, inside, device="cuda") * inside**-0.5).bfloat16() for _ in range(copies)]

        residual = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16) if added else None

        def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
            if choice.kind != "library":
                return product.few(x, (weight, None), residual)
            if residual is not None:
                return residual.addmm_(x, weight.t())
            return F.linear(x, weight) if act is None else act(F.linear(x, weight))

        def check() -> float:
            y = xs[0].float() @ weights[0].float().t()
            if gated:
                y = F.silu(y[:, :width]) * y[:, width:]
            if residual is not None:
                y += residual.normal_().float()
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
                op = OPS[label]
                made += [product_job(op, out, inside, rows, choice, f"{model} {label}") for choice in choices(op, out, inside, rows)]
    return made
