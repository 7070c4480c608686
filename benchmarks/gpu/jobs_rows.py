"""Row operators at decode and prefill sizes, arg max over a vocabulary, and launches from the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timing import Job, Made, relative_error

from hexad.operators.args import ActArgs, BestTokenArgs, NormArgs, RopeKVArgs
from hexad.operators.batch import KVPages
from hexad.operators.triton.argmax import bind_best_token
from hexad.operators.triton.rope_kv import bind_rope_kv_write
from hexad.operators.triton.rows import bind_add_rms_norm, bind_gated_act, bind_rms_norm

HIDDEN, WIDTH, HEADS, KV_HEADS, DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def norm_job(rows: int, add: bool) -> Job:
    def make(copies: int) -> Made:
        args = NormArgs(HIDDEN, 1e-5, torch.bfloat16, "cuda")
        weight = _bf16(HIDDEN)
        xs, residuals = [_bf16(rows, HIDDEN) for _ in range(copies)], [_bf16(rows, HIDDEN) for _ in range(copies)]
        norm, add_norm = bind_rms_norm(args), bind_add_rms_norm(args)

        def check() -> float:
            total = (xs[0].float() + residuals[0].float()).bfloat16().float() if add else xs[0].float()
            expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight.float()
            got = add_norm(xs[0], residuals[0].clone(), weight)[0] if add else norm(xs[0], weight)
            return relative_error(got, expected)

        if add:
            return [lambda x=x, r=r: add_norm(x, r, weight) for x, r in zip(xs, residuals, strict=True)], check
        return [lambda x=x: norm(x, weight) for x in xs], check

    moved = 2.0 * rows * HIDDEN * (4 if add else 2)
    return Job("rows", f"{'add_' if add else ''}rms_norm {rows}x{HIDDEN}", make, bytes_moved=moved, buffer_bytes=moved)


def act_job(rows: int) -> Job:
    def make(copies: int) -> Made:
        xs = [_bf16(rows, 2 * WIDTH) for _ in range(copies)]
        act = bind_gated_act(ActArgs(WIDTH, "silu", torch.bfloat16, "cuda"))
        check = lambda: relative_error(act(xs[0]), F.silu(xs[0][:, :WIDTH].float()) * xs[0][:, WIDTH:].float())  # noqa: E731
        return [lambda x=x: act(x) for x in xs], check

    moved = 2.0 * rows * WIDTH * 3
    return Job("rows", f"silu_mul {rows}x{WIDTH}", make, bytes_moved=moved, buffer_bytes=moved)


def rope_job(rows: int) -> Job:
    def make(copies: int) -> Made:
        args = RopeKVArgs(HEADS, KV_HEADS, DIM, DIM, False, False, 1e-5, torch.bfloat16, torch.bfloat16, "cuda")
        rope = bind_rope_kv_write(args)
        xs = [_bf16(rows, (HEADS + 2 * KV_HEADS) * DIM) for _ in range(copies)]
        angles = torch.rand(rows, DIM // 2, device="cuda")
        table = torch.cat([angles.cos(), angles.sin()], 1)
        positions = torch.arange(rows, device="cuda")
        blocks = -(-rows // 64)
        kv = KVPages(_bf16(blocks, 64, KV_HEADS, DIM), _bf16(blocks, 64, KV_HEADS, DIM))

        def check() -> float:
            q = xs[0].view(rows, -1, DIM)[:, :HEADS].float()
            low, high = q[..., : DIM // 2], q[..., DIM // 2 :]
            c, s = angles.cos()[:, None], angles.sin()[:, None]
            expected = torch.cat([low * c - high * s, high * c + low * s], -1)
            return relative_error(rope(xs[0].clone(), positions, table, positions, kv), expected)

        return [lambda x=x: rope(x, positions, table, positions, kv) for x in xs], check

    moved = 2.0 * rows * (HEADS + 2 * KV_HEADS) * DIM * 2
    return Job("rows", f"rope_kv_write {rows}", make, bytes_moved=moved, buffer_bytes=moved)


def argmax_job(rows: int, own: bool) -> Job:
    def make(copies: int) -> Made:
        xs = [torch.randn(rows, VOCAB, device="cuda") for _ in range(copies)]
        best = bind_best_token(BestTokenArgs(VOCAB, torch.float32, "cuda"))
        if not own:
            return [lambda x=x: x.argmax(-1) for x in xs], lambda: 0.0
        return [lambda x=x: best(x) for x in xs], lambda: float((best(xs[0])[0] != xs[0].argmax(-1)).sum())

    moved = 4.0 * rows * VOCAB
    return Job("rows", f"argmax {'own' if own else 'torch'} {rows}x{VOCAB}", make, bytes_moved=moved, buffer_bytes=moved)


def jobs() -> list[Job]:
    made = []
    for rows in (1, 64, 256, 2048, 8192):
        made += [norm_job(rows, False), norm_job(rows, True), act_job(rows), rope_job(rows)]
    for rows in (1, 64, 256):
        made += [argmax_job(rows, True), argmax_job(rows, False)]
    return made
