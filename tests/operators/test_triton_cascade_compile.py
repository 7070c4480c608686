"""The kernels of a shared prefix compile for Ampere, Ada and Hopper. No GPU needed."""

import pytest
import torch

pytest.importorskip("triton")

from hexad.operators.args import AttentionArgs
from hexad.operators.triton import attention
from hexad.operators.triton.launch import Target

SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448}  # bytes a program may use


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block"), [(32, 8, 128, 64), (9, 3, 64, 16), (4, 1, 256, 64)])
def test_shared_prefix_kernels(heads, kv_heads, dim, block, arch):
    args = AttentionArgs(heads, kv_heads, dim, dim**-0.5, None, None, block, torch.bfloat16, torch.bfloat16, "cuda")
    strides = (2 * block * kv_heads * dim, kv_heads * dim, dim, 1)
    layout = attention._Layout(args, Target(arch, 132, "test"), (heads + 2 * kv_heads) * dim, block, strides, tensor_copies=arch >= 90)
    launches = [
        (layout.shared_launcher(), ["*bf16", "*bf16", "*bf16", "*i32", "*i32", "*fp32", "*fp32", "i32", "i32"]),
        (layout.combine_launcher(64, shared=True), ["*fp32", "*fp32", "*i32", "*fp32", "*fp32", "*bf16", "i32", "i32"]),
        (layout.combine_launcher(1, shared=False), ["*fp32", "*fp32", "*i32", "*fp32", "*fp32", "*bf16", "i32", "i32"]),
        (layout.plan_launcher(256, shared=True), ["*i32", "*i32", "*i32", "*i32", "i32", "i32", "i32"]),
    ]
    for launcher, types in launches:
        assert launcher.compile(types, arch).metadata.shared <= SHARED_LIMIT[arch]
