"""Weights rounded while they are read: how far they move, what is refused, and that a network computes with exactly those numbers."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from model_files import save_llama

from hexad.common.errors import ConfigError, WeightsError
from hexad.models.build import build_model
from hexad.models.catalog import read_spec
from hexad.models.formats.handles import PlainHandle
from hexad.models.inputs import ForwardInputs
from hexad.models.loader import open_weights
from hexad.models.quant.packed import PackedScheme
from hexad.models.quant.rounding import QUANTIZATIONS, RoundedHandle, round_rows, rounded_format, unpack_rows
from hexad.models.served import ROUNDED, check_quantization
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.packed import INT8_ROWS

FORMATS = sorted({*QUANTIZATIONS.values(), INT8_ROWS})


@pytest.fixture
def make() -> torch.Generator:
    seed = time.time_ns() % 2**31
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def steps(values: torch.Tensor, format_name: str) -> torch.Tensor:
    """The distance between neighbouring codes, for each number, had scales no rounding of their own."""
    if format_name == INT8_ROWS:
        return (values.abs().amax(1, keepdim=True) / 127).expand_as(values)
    groups = values.reshape(-1, 32)
    if format_name == "q4_0":
        step = groups.abs().amax(1, keepdim=True) / 8
    else:
        step = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / 15
    return step.expand_as(groups).reshape(values.shape)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("size", [1e-6, 0.02, 1.0, 1e4])
def test_numbers_move_by_half_a_step_at_most(format_name: str, size: float, make) -> None:
    values = torch.randn(19, 96, generator=make) * size
    values[3] = 0
    values[4, 40] = 50 * size  # an outlier
    values[5] = values[5].abs() + size  # nothing near zero
    found = unpack_rows(round_rows(values, format_name), format_name)
    step = steps(values, format_name)
    # +8 in 4 symmetric bits is one whole step away; float16 holds scales to one part in 2048, and small ones to 2^-25
    allowed = step * (1.01 if format_name == "q4_0" else 0.51) + values.abs() * 2**-10 + 128 * 2**-25
    assert (found - values).abs().le(allowed).all()
    assert found[3].abs().max() == 0
    assert (found - values).abs().mean() < 0.3 * step.mean() + 128 * 2**-25


def test_refusals() -> None:
    assert tuple(QUANTIZATIONS) == ROUNDED
    check_quantization(None, "cuda")
    for name in QUANTIZATIONS:
        check_quantization(name, "cpu")
    with pytest.raises(ConfigError, match=r"did you mean 'int8'.*int4_g32"):
        check_quantization("int9", "cpu")
    with pytest.raises(ConfigError, match=r"cuda.*--device cpu"):
        check_quantization("int8", "cuda")
    values = torch.ones(70, 32)
    values[69, 3] = float("nan")
    with pytest.raises(WeightsError, match="'w' holds infinities or NaN"):
        RoundedHandle(PlainHandle("w", "float32", values), "q4_0").raw()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_every_plain_type_is_rounded(stored, make) -> None:
    values = torch.randn(5000, 64, generator=make).to(stored)  # more rows than are rounded at once
    for format_name in FORMATS:
        handle = RoundedHandle(PlainHandle("w", str(stored).removeprefix("torch."), values), format_name)
        rows, found = handle.raw()
        assert found == format_name and torch.equal(rows, round_rows(values.float(), format_name))
        assert torch.equal(handle.load(), unpack_rows(rows, format_name))


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    spec, count = model.spec, len(ids)
    pages = [
        KVPages(*(torch.zeros(1, 32, spec.attention.kv_heads, spec.attention.head_dim) for _ in range(2))) for _ in range(spec.num_layers)
    ]
    batch = AttentionBatch(
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.arange(count),
        count,
        count,
        32,
        0,
    )
    with torch.inference_mode():
        return model.logits(model.forward(ForwardInputs(ids, torch.arange(count), (batch,)), pages))


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


class Replaced:
    """A store whose matrices are what rounding leaves of them."""

    def __init__(self, store, quantization: str) -> None:
        self._store, self._quantization = store, quantization

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def get(self, name: str):
        handle = self._store.get(name)
        if handle.view.dim() != 2:
            return handle
        kept = rounded_format(self._quantization, handle.shape[1], is_table=name in ("model.embed_tokens.weight", "lm_head.weight"))
        return replace(handle, view=RoundedHandle(handle, kept).load().to(torch.float64), order=None)


@pytest.mark.parametrize("providers", [None, {"packed_linear": "torch"}])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_network_computes_with_the_rounded_numbers(quantization: str, providers, tmp_path, make) -> None:
    """Hidden size 48 is not whole groups of 32 (8 bits instead), the MLP's 96 is."""
    save_llama(tmp_path, time.time_ns() % 2**31, hidden_size=48, intermediate_size=96)
    spec = read_spec(tmp_path)
    cpu = torch.device("cpu")
    ids = torch.randint(0, spec.vocab_size, (20,), generator=make)
    found = build_model(spec, open_weights(tmp_path, spec), torch.float32, cpu, providers, quantization=quantization)
    plain = {"packed_linear": "torch", "decoder_stack": "torch"}
    expected = build_model(spec, Replaced(open_weights(tmp_path, spec), quantization), torch.float32, cpu, plain)
    wanted = logits(expected, ids)
    assert distance(logits(found, ids), wanted) < 1e-4
    exact = build_model(spec, open_weights(tmp_path, spec), torch.float32, cpu, plain)
    assert distance(logits(exact, ids), wanted) > 1e-3
    if providers is None and hasattr(found.layers[0].mlp.down, "packed"):  # there is a native library
        assert found.layers[0].mlp.down.packed.source == QUANTIZATIONS[quantization]
        assert found.weight_bytes < exact.weight_bytes / 2


def test_a_tied_table_is_kept_once(make) -> None:
    scheme = PackedScheme(None, "int4_g32", ("table",))
    handle = PlainHandle("table", "float32", torch.randn(64, 64, generator=make))
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    embedding, head = scheme.embedding(handle, **options), scheme.linear([handle], None, **options)
    assert head.nbytes == 0
    ids = torch.tensor([5, 63])
    rows = RoundedHandle(handle, INT8_ROWS).load()
    assert torch.allclose(embedding.apply(ids), rows[ids])
    assert torch.allclose(head.apply(rows[ids]), rows[ids] @ rows.T, rtol=1e-4, atol=1e-4)
