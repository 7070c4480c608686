"""Float64 references, random batches and the comparison used by the kernel tests. On CPU tensors under Triton's interpreter (small shapes,
no bf16 products: the interpreter gets them wrong), on CUDA tensors otherwise."""

import os
import random
from dataclasses import dataclass

import pytest
import torch

from hexad.operators.batch import AttentionBatch, KVPages

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float16, torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
needs_kernels = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device or TRITON_INTERPRET=1")

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 2e-6}


def fresh_seed() -> int:
    """A new seed, printed so that a failure can be repeated."""
    seed = int(os.environ.get("HEXAD_TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"HEXAD_TEST_SEED={seed}")
    torch.manual_seed(seed)
    random.seed(seed)
    return seed


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """||out - reference|| / ||reference||; NaN anywhere gives infinity."""
    out, reference = out.double().cpu(), reference.double().cpu()
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    return float((out - reference).norm() / reference.norm().clamp_min(1e-30))


def assert_close(out: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype, slack: float = 1.0) -> None:
    error = relative_error(out, reference)
    assert error <= TOLERANCE[dtype] * slack, f"relative error {error:.2e} in {dtype}"


@dataclass
class Case:
    """One random attention problem: pages hold NaN wherever no key was written."""

    q: torch.Tensor  # [T, Hq, D], a view into rows of qkv width
    kv: KVPages
    batch: AttentionBatch
    keys: list[torch.Tensor]  # per row [L, Hkv, D] float64
    values: list[torch.Tensor]


def attention_case(
    query_lens: list[int], seq_lens: list[int], heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype,
    window: int | None = None, padding_rows: int = 0, contiguous: bool = False,
) -> Case:  # fmt: skip
    """Random ragged rows; blocks are scattered, blocks out of the window are -1, unwritten slots are NaN."""
    rows = len(seq_lens)
    blocks_of = [-(-length // block_size) for length in seq_lens]
    total = sum(blocks_of) + 3
    order = torch.randperm(total).tolist()
    # keys and values of one layer are strided views into storage that other layers share
    storage = torch.full((total, 2, 2, block_size, kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE)
    pages = storage[:, 1, 0], storage[:, 1, 1]
    kv = KVPages(*(x.contiguous() for x in pages) if contiguous else pages)
    table = torch.full((rows + padding_rows, max(blocks_of) + 2), -1, dtype=torch.int32)
    keys, values, taken = [], [], 0
    for row, length in enumerate(seq_lens):
        k = torch.randn(length, kv_heads, dim).to(dtype)
        v = torch.randn(length, kv_heads, dim).to(dtype)
        oldest = 0 if window is None else max(0, length - query_lens[row] - window + 1)
        for index in range(blocks_of[row]):
            low, high = index * block_size, min(length, (index + 1) * block_size)
            if high <= oldest:
                continue
            block = order[taken]
            taken += 1
            table[row, index] = block
            kv.k[block, : high - low] = k[low:high].to(DEVICE)
            kv.v[block, : high - low] = v[low:high].to(DEVICE)
        keys.append(k.double())
        values.append(v.double())
    tokens = sum(query_lens) + padding_rows
    wide = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype).to(DEVICE)
    starts = torch.tensor([0, *query_lens, *[1] * padding_rows]).cumsum(0).int()
    decodes = 0
    while decodes < rows and query_lens[decodes] == 1:
        decodes += 1
    if decodes == rows:
        decodes += padding_rows
    batch = AttentionBatch(
        query_start=starts.to(DEVICE),
        seq_lens=torch.tensor(seq_lens + [0] * padding_rows, dtype=torch.int32, device=DEVICE),
        block_table=table.to(DEVICE),
        slots=torch.full((tokens,), -1, dtype=torch.int64, device=DEVICE),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_size=block_size,
        num_decodes=decodes,
    )
    return Case(wide[:, :heads], kv, batch, keys, values)


def attention_reference(case: Case, query_lens: list[int], scale: float, window: int | None, softcap: float | None) -> torch.Tensor:
    """[T, Hq * D] in float64 on the CPU; padding rows are left out."""
    q = case.q.double().cpu()
    outs, at = [], 0
    for row, count in enumerate(query_lens):
        k, v = case.keys[row], case.values[row]
        length, kv_heads, _ = k.shape
        group = q.shape[1] // kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[at : at + count], k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query = torch.arange(length - count, length)[:, None]
        key = torch.arange(length)[None]
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        at += count
    return torch.cat(outs)
