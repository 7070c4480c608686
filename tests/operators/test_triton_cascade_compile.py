"""The kernels of a shared prefix compile for Ampere, Ada and Hopper. No GPU needed."""

import pytest
import torch

pytest.importorskip("triton")

from hexad.operators.args import AttentionArgs
from hexad.operators.batch import AttentionBatch
from hexad.operators.triton import attention
from hexad.operators.triton.launch import Target
from hexad.operators.triton.shared_prefix import MAX_SHARED_SPLITS, SharedTiles

SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448}  # bytes a program may use


def layout(arch, heads, kv_heads, dim, block, dtype=torch.bfloat16):
    args = AttentionArgs(heads, kv_heads, dim, dim**-0.5, None, None, block, dtype, dtype, "cuda")
    strides = (2 * block * kv_heads * dim, kv_heads * dim, dim, 1)
    return attention.Layout(args, Target(arch, 132, "test"), (heads + 2 * kv_heads) * dim, block, strides, tensor_copies=arch >= 90)


def compiled_shared(made, tiles, arch):
    tile = made.decode_tiles.tile
    desc = f"tensordesc<bf16[1, 1, {tile}, {made.dim_pad}]>" if made.copied(tile) else "constexpr"
    types = ["*bf16", "*bf16", "*bf16", desc, desc, "*i32", "*i32", "*fp32", "*fp32", "i32", "i32"]
    kernel = made.prefix.launcher(tiles).compile(types, arch)
    assert kernel.metadata.shared * tiles.per_sm <= SHARED_LIMIT[arch], "so many programs do not fit a multiprocessor"
    return kernel


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block"), [(32, 8, 128, 64), (9, 3, 64, 16), (4, 1, 256, 64)])
def test_shared_prefix_kernel(heads, kv_heads, dim, block, arch):
    made = layout(arch, heads, kv_heads, dim, block)
    kernel = compiled_shared(made, made.prefix.tiles(), arch)
    assert ("cp.async.bulk.tensor" in kernel.asm["ptx"]) == made.copied(made.decode_tiles.tile)
    assert ("wgmma" in kernel.asm["ptx"]) == (arch >= 90)


@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_around_it(arch):
    made = layout(arch, 32, 8, 128, 64)
    decode = ["*bf16"] * 3 + ["*i32"] * 2 + ["*fp32"] * 4 + ["*bf16", "i32", "i32", "i32"]
    launches = [
        (made.decode_launcher(shared=True), decode),
        (made.combine_launcher(64, shared=True)[1], ["*fp32", "*fp32", "*i32", "*fp32", "*fp32", "*bf16", "i32", "i32"]),
        (made.combine_launcher(1, shared=False)[1], ["*fp32", "*fp32", "*i32", "*fp32", "*fp32", "*bf16", "i32", "i32"]),
        (made.plan_launcher(256, shared=True), ["*i32", "*i32", "*i32", "*i32", "i32", "i32", "i32"]),
    ]
    for launcher, types in launches:
        assert launcher.compile(types, arch).metadata.shared <= SHARED_LIMIT[arch]


def test_programs_are_all_at_work_at_once():
    """A second turn of a few programs would double the time."""
    made = layout(90, 32, 8, 128, 64)
    for rows in (2, 8, 64, 100, 128, 256):
        tiles, splits = made.prefix.tiles(), made.prefix.splits(rows)
        programs = 8 * -(-rows * 4 // tiles.pairs) * splits
        assert programs <= tiles.per_sm * 132 or splits == 1
        assert programs > tiles.per_sm * 132 // 2 or splits == MAX_SHARED_SPLITS, (rows, programs)
    assert made.prefix.tiles() == SharedTiles(64, 4, 3, 2) and made.prefix.splits(256) == 2


@pytest.mark.parametrize(
    ("tokens", "longest_query", "longest", "chosen"),
    [
        (8192, 8192, 8192, True),  # a long prompt
        (512, 512, 512, False),  # a short one
        (8192, 128, 2176, True),  # short ones behind a long prefix
        (8192, 128, 256, False),  # ... behind none
        (512, 128, 2176, False),  # too few to fill the card
        (8192, 64, 2176, False),  # half of each tile would be empty
    ],
)
def test_who_takes_a_prompt(tokens, longest_query, longest, chosen):
    made, none = layout(90, 32, 8, 128, 64), torch.empty(0)
    batch = AttentionBatch(none, none, none, none, longest_query, longest, 64, 0)
    assert made.specialises(batch, tokens) == chosen
