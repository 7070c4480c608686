"""A product whose tiles differ between numbers of rows reads its weight through a descriptor for each."""

import pytest
import torch

pytest.importorskip("triton")

from hexad.operators.fused import FusedLinearArgs
from hexad.operators.triton.launch import Target
from hexad.operators.triton.linear import Product
from hexad.operators.triton.tuning import Choice


def test_each_tile_size_has_its_own_descriptor() -> None:
    product = Product(FusedLinearArgs(512, 256, False, torch.bfloat16, "cuda"), "linear")
    product.on = Target(90, 132, "test")
    weight = torch.randn(256, 512).bfloat16()
    wide, narrow = Choice("stream", 128, 64, 4, 4, 64), Choice("stream", 64, 128, 4, 4, 16)
    boxes = [list(product._descriptor(weight, choice).block_shape) for choice in (wide, narrow, wide)]
    assert boxes == [[128, 64], [64, 128], [128, 64]]
