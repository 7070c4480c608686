"""Each Triton kernel compiles for Ampere, Ada and Hopper in the configurations that real models bind. No GPU needed."""

import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton

from hexad.operators.args import ActArgs, AttentionArgs, NormArgs, RopeKVArgs
from hexad.operators.fused import FusedLinearArgs
from hexad.operators.triton import ahead, argmax, attention, draw, linear, ranks, rope_kv, rows
from hexad.operators.triton.assumed import assemble, compile_for_older
from hexad.operators.triton.launch import Launcher, Target
from hexad.operators.triton.prefill_hopper import page_layout
from hexad.operators.triton.tuning import Choice

CHOICES = [
    Choice("gemv", 2, 2048, 4),
    Choice("warp", 16, 128, 4, 1, 8),
    Choice("skinny", 32, 256, 4, 4, 16, prefetch=1024),
    Choice("stream", 128, 64, 4, 4, 64),
]
ARCHES = [80, 89, 90]
LLAMA = (32, 8, 128, 64, torch.bfloat16, None, None)
MODELS = [
    *[(arch, *LLAMA) for arch in ARCHES],
    (80, 9, 3, 64, 16, torch.float32, None, None),  # SmolLM2 135M
    (90, 4, 1, 256, 64, torch.bfloat16, 512, 50.0),  # Gemma
    (89, 32, 32, 96, 32, torch.float16, 2047, None),  # Phi 3
]
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448}  # bytes a program may use
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv"}


def compiled(launcher: Launcher, types: list[str], arch: int):
    kernel = launcher.compile(types, arch)
    assert kernel.metadata.shared <= SHARED_LIMIT[arch]
    return kernel


def layout(arch: int, heads: int, kv_heads: int, dim: int, block: int, dtype, window=None, softcap=None, kv_dtype=None):
    args = AttentionArgs(heads, kv_heads, dim, dim**-0.5, window, softcap, block, dtype, kv_dtype or dtype, "cuda")
    strides = (2 * block * kv_heads * dim, kv_heads * dim, dim, 1)
    return attention.Layout(args, Target(arch, 132, "test"), (heads + 2 * kv_heads) * dim, block, strides, tensor_copies=arch >= 90)


def decode_types(q: str, kv: str) -> list[str]:
    return [q, kv, kv, "*i32", "*i32", *["*fp32"] * 4, q, "i32", "i32", "i32"]


def descriptor(made, tile: int, dtype) -> str:
    return f"tensordesc<{NAMES[dtype]}[1, 1, {tile}, {made.dim_pad}]>" if made.copied(tile) else "constexpr"


@pytest.mark.parametrize(("arch", "heads", "kv_heads", "dim", "block", "dtype", "window", "softcap"), MODELS)
def test_attention(arch, heads, kv_heads, dim, block, dtype, window, softcap):
    made = layout(arch, heads, kv_heads, dim, block, dtype, window, softcap)
    name = "*" + NAMES[dtype]
    compiled(made.decode_launcher(shared=False), decode_types(name, name), arch)
    for short in (True, False):
        tiles, launcher = made.prefill_launcher(short=short)
        desc = descriptor(made, tiles.tile, dtype)
        kernel = compiled(launcher, [name, name, name, desc, desc, "*i32", "*i32", "*i32", name, "i32", "i32", "i32"], arch)
        assert ("cp.async.bulk.tensor" in kernel.asm["ptx"]) == made.copied(tiles.tile)


@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_prefill(dim):
    """The warp-specialised kernel: its products overlap with the softmax (the assembler did not serialise them) and do not spill much."""
    made = layout(90, 32, 8, dim, 64, torch.bfloat16)
    made.strides = (64 * 8 * dim, 8 * dim, dim, 1)
    launcher = made._hopper_launcher()
    assert launcher is not None
    desc = f"tensordesc<bf16[64, {dim}],{page_layout(dim, torch.bfloat16)!r}>"
    kernel = compiled(launcher, ["*bf16", desc, desc, "*i32", "*i32", "*i32", "*bf16", "i32", "i32", "i32"], 90)
    assert "wgmma.mma_async" in kernel.asm["ptx"] and "setmaxnreg" in kernel.asm["ptx"]
    assert waits_between_products(kernel.asm["cubin"]) <= 20


def waits_between_products(cubin: bytes) -> int:
    """Waits for the matrix units in the machine code; serialised code has one after each product."""
    return sass(cubin).count("WARPGROUP.DEPBAR")


def sass(cubin: bytes) -> str:
    """Machine code as text."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def test_small_attention_kernels():
    made = layout(90, 32, 8, 128, 64, torch.bfloat16)
    compiled(made.plan_launcher(250), ["*i32", "*i32", "*i32", "*i32", "i32", "i32", "i32"], 90)
    compiled(made.combine_launcher(1, shared=False)[1], ["*fp32", "*fp32", "*i32", "*fp32", "*fp32", "*bf16", "i32", "i32"], 90)


def test_fp8_pages():
    made = layout(90, 32, 8, 128, 64, torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    compiled(made.decode_launcher(shared=False), decode_types("*bf16", "*fp8e4nv"), 90)


@pytest.mark.parametrize("arch", [80, 90])
def test_rows(arch, monkeypatch):
    on = Target(arch, 132, "test")
    monkeypatch.setattr(rows, "target", lambda: on)
    norm = rows._RowNorm(NormArgs(4096, 1e-5, torch.bfloat16, "cuda"), add=True, pdl=arch >= 90).get(4096, 8)
    kernel = compiled(norm, ["*bf16"] * 4, arch)
    assert ("griddepcontrol" in kernel.asm["ptx"]) == (arch >= 90)
    assert "ld.global.v4" in kernel.asm["ptx"]
    act = ActArgs(14336, "silu", torch.bfloat16, "cuda")
    constants = {"WIDTH": act.intermediate, "BLOCK": 1024, "ACTIVATION": "gelu", "EARLY": True, "PDL": arch >= 90}
    compiled(Launcher(rows.gated_act_kernel, constants), ["*bf16"] * 2, arch)
    rope = RopeKVArgs(32, 8, 128, 128, False, True, 1e-6, torch.bfloat16, torch.bfloat16, "cuda")
    constants = rope_kv.rope_constants(rope, 6144, 64, (131072, 1024, 128, 1), pdl=arch >= 90)
    compiled(Launcher(rope_kv.rope_kv_kernel, constants), ["*bf16", "*i64", "*fp32", "*i64"] + ["*bf16"] * 4, arch)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.kind)
def test_products(choice, arch, monkeypatch):
    monkeypatch.setattr(linear, "target", lambda: Target(arch, 132, "test"))
    args = FusedLinearArgs(4096, 28672, False, torch.bfloat16, "cuda", activation="silu")
    launcher = linear.Product(args, "gated_linear", choice).launcher(choice, 4096, False)
    if choice.kind == "stream":
        desc = "tensordesc<bf16[128, 64]>" if arch >= 90 else "constexpr"
        kernel = compiled(launcher, ["*bf16", "*bf16", desc, "*bf16", "*bf16", "*bf16", "i32"], arch)
        assert ("wgmma" in kernel.asm["ptx"]) == (arch >= 90)
    else:
        kernel = compiled(launcher, ["*bf16"] * 5 + (["i32"] if choice.kind != "gemv" else []), arch)
        assert ("mma.sync" in kernel.asm["ptx"]) == (choice.kind != "gemv")
        assert ("prefetch.global.L2" in kernel.asm["ptx"]) == (arch >= 90 and choice.prefetch > 0)
        if choice.kind == "warp":
            assert ".v4.b32" in kernel.asm["ptx"] and "ldmatrix" not in kernel.asm["ptx"]


def test_an_older_cards_code_is_assembled_for_a_newer_one():
    """What HEXAD_TRITON_ARCH=80 runs on a Hopper card: Ampere's matrix instructions and copies."""
    made = layout(80, *LLAMA)
    name, calls = "*bf16", {}
    for arch in (80, 90):
        kernel = made.prefill_launcher(short=False)[1].compile(
            [name] * 3 + ["constexpr"] * 2 + ["*i32"] * 3 + [name, "i32", "i32", "i32"], arch
        )
        cubin = assemble(kernel.asm["ptx"], 90)
        calls[arch] = sass(cubin)
    assert "HGMMA" not in calls[80] and "HMMA" in calls[80] and "HGMMA" in calls[90]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.kind)
def test_older_products_run_on_a_newer_card(choice):
    """The path that HEXAD_TRITON_ARCH=80 takes at a launch, Gluon's kernel included."""
    rows, half = choice.block_m or 1, torch.bfloat16
    x, weight = (torch.empty(n, 4096, dtype=half, device="meta") for n in (rows, 8192))
    with ahead.gathering(Target(80, 108, "an older card")) as jobs:
        args = FusedLinearArgs(4096, 8192, False, torch.bfloat16, "cuda", activation="silu")
        linear.Product(args, "gated_linear", choice).few(x, (weight, None), None)
    (job,) = jobs.values()
    kernel = compile_for_older(job.launcher._kernel, job.args, job.launcher._constants | job.launcher._options, 80, 90)
    assert ".target sm_80" in kernel.asm["ptx"]
    text = sass(kernel.kernel)
    assert "sm_90" in text and "HGMMA" not in text and ("HMMA" in text) == (choice.kind != "gemv")


def test_argmax():
    compiled(Launcher(argmax.block_max_kernel, {"BLOCK": 4096, "PDL": False}), ["*bf16", "*fp32", "*i32", "i32", "i32"], 90)
    compiled(Launcher(argmax.row_max_kernel, {"PARTS": 32, "PDL": False}), ["*fp32", "*i32", "*i64", "*u8", "i32"], 90)


@pytest.mark.parametrize("arch", ARCHES)
def test_token_ranks(arch):
    blocks = Launcher(ranks.block_ranks_kernel, {"EXACT": True, "BLOCK": ranks.BLOCK}, num_warps=4)
    compiled(blocks, ["*fp32", "*fp32", "*i64", "*i64", "*i32", "*i64", "i32", "i32", "i32"], arch)
    across = Launcher(ranks.row_ranks_kernel, {"PARTS": 128, "KEYS": 4096}, num_warps=8)
    compiled(across, ["*i64", "*i32", "*i64", "*i64", "*i64", "*i64", "i32", "i32"], arch)


@pytest.mark.parametrize("arch", ARCHES)
def test_draw(arch):
    """No program needs more registers than a multiprocessor has."""
    kernels, row = draw.launchers(128_256), ["*fp32", "*fp32", "*fp32", "*i64"]
    numbers = ["i32", "i32", "i32"]
    for name in ("weigh", "weigh planned"):
        compiled(kernels[name], [*row, "*i64", "*i64", *numbers], arch)
    for name in ("pick", "pick planned"):
        compiled(kernels[name], [*row, "*i64", "*fp64", "*i64", "*i64", *numbers, "i32"], arch)
    for name in ("tiers", "tiers of planned"):
        compiled(kernels[name], [*row, "*i64", "*i32", "*i64", *numbers], arch)
    compiled(kernels["plan"], ["*i64", "*i64", "*fp64", "*i64", "*i32", "*i32", *numbers], arch)
    compiled(kernels["divide"], ["*i64", "*i64", "*i32", "*i32", *numbers], arch)
    compiled(kernels["list"], [*row[:3], "*i64", "*i32", "*fp32", "*i32", *numbers], arch)
    for name in ("short", "long"):
        types = [*row, "*i64", "*fp64", "*fp64", "*i64", "*i64", "*fp32", "*i32", *numbers, "i32", "i32", "i32"]
        compiled(kernels[name], types, arch)
