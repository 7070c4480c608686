"""The fused decoder layer computes what the plain one does (composite operators forced through their torch references)."""

from __future__ import annotations

import time

import pytest
import torch

from hexad.models.layers import fused
from hexad.operators.fused import FusedLinearArgs
from hexad.operators.load import load_operators
from hexad.operators.registry import registry


class Linear:
    """A linear layer with composites from the torch references."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def _args(self, activation: str = "") -> FusedLinearArgs:
        rows, columns = self.weight.shape
        return FusedLinearArgs(columns, rows, False, self.weight.dtype, "cpu", activation=activation)

    def apply(self, x):
        return x @ self.weight.T

    def gated(self, activation):
        call = registry.reference("gated_linear", self._args(activation))
        return lambda x: call(x, (self.weight, None))

    def adding(self):
        call = registry.reference("linear_add", self._args())
        return lambda x, residual: call(x, residual, (self.weight, None))


class Recorder:
    """An attention whose mixing is a fixed linear map: enough to see that the pieces are composed in the right order."""

    def __init__(self, mix: torch.Tensor) -> None:
        self.mix = mix

    def attend(self, qkv, positions, batch, kv, last=None):
        return qkv @ self.mix


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_fused_layer_equals_the_formula(activation: str) -> None:
    load_operators()
    seed = time.time_ns() % 2**31
    print("seed", seed)
    make = torch.Generator().manual_seed(seed)
    hidden, width, tokens = 32, 48, 5

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64).float()

    qkv, out, gate_up, down = random(96, hidden), random(hidden, 64), random(2 * width, hidden), random(hidden, width)
    input_norm, post_norm, mix, h = random(hidden), random(hidden), random(96, 64), random(tokens, hidden)
    attention = Recorder(mix)
    attention.qkv, attention.out = Linear(qkv), Linear(out)
    mlp = type("M", (), {"gated": True, "activation": activation, "gate_up": Linear(gate_up), "down": Linear(down)})()

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    layer = fused.fuse(norm, attention, mlp, input_norm, post_norm)
    assert layer is not None
    expected = h + (norm(h, input_norm) @ qkv.T @ mix) @ out.T
    gate, up = (norm(expected, post_norm) @ gate_up.T).chunk(2, -1)
    act = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    expected = expected + (act * up) @ down.T
    got = layer(h.clone(), torch.arange(tokens), None, None)
    assert (got - expected).norm() / expected.norm() < 1e-5


def test_a_format_without_composites_is_not_fused() -> None:
    linear = type("L", (), {"gated": lambda *_: None, "adding": lambda *_: None})()
    attention = type("A", (), {"qkv": linear, "out": linear})()
    mlp = type("M", (), {"gated": True, "activation": "silu", "gate_up": linear, "down": linear})()
    assert fused.fuse(lambda x, _w: x, attention, mlp, torch.ones(1), torch.ones(1)) is None
