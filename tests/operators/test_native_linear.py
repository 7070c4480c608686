"""Native products of packed weights against float64, for every instruction set, format and tail shape."""

from __future__ import annotations

import time

import pytest
import torch
from native_library import block_of, isas, random_rows, use

from hexad.common.errors import WeightsError
from hexad.operators.native.library import GATED, SOURCES, STORE, PackedWeight

ROWS = (1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 31, 33, 50)


@pytest.fixture
def make():
    seed = time.time_ns() % 2**31
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def random_int(make, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (1,), generator=make))


def error(found: torch.Tensor, expected: torch.Tensor, least: float | torch.Tensor = 1e-30) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp_min(float(least)))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("source", SOURCES)
def test_products_agree_with_float64(isa: str, source: str, make, monkeypatch) -> None:
    use(monkeypatch, isa)
    step = block_of(source)
    for rows, columns in (
        (1, max(32, step)),
        (random_int(make, 17, 90), step * random_int(make, 1, 96 // step + 2)),
        (64, 5 * max(32, step)),
    ):
        stored, weight = random_rows(make, source, rows, columns)
        packed = PackedWeight(source, rows, columns)
        cut = random_int(make, 0, rows)
        packed.fill(0, stored[:cut].contiguous())
        packed.fill(cut, stored[cut:].contiguous())
        bias = torch.randn(rows, generator=make)
        for count in ROWS:
            if count == ROWS[-1]:
                packed.set_bias(bias)
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(count, columns, generator=make).to(dtype)
                expected = x.double() @ weight.T + (bias.double() if count == ROWS[-1] else 0)
                halves, plain = dtype == torch.bfloat16 and "bf16" in isa.replace("amx", "amx bf16"), source in ("bfloat16", "float32")
                tiles = halves and isa == "amx" and count >= (4 if plain else 5)  # weights are rounded to bfloat16, as plain ones would be
                words = halves and not tiles and not plain  # activations are rounded to 1 / 32767 of a group's largest
                size = 0.1 * (x.double().abs() @ weight.T.abs()).norm()  # sums that cancel are not to be had exactly
                found = packed.linear(x, torch.float32)
                assert error(found, expected, size) < (1.2e-2 if tiles else 3e-4 if words else 1e-5), (rows, columns, count, dtype)
                assert error(packed.linear(x, torch.bfloat16), expected, size) < 2e-2


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("activation", range(4))
def test_gated_products(isa: str, activation: int, make, monkeypatch) -> None:
    use(monkeypatch, isa)
    act = [
        torch.nn.functional.silu,
        torch.nn.functional.gelu,
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        torch.nn.functional.relu,
    ][activation]
    half = 16 * random_int(make, 1, 5)
    stored, weight = random_rows(make, "q4_1", 2 * half, 96)
    packed = PackedWeight("q4_1", 2 * half, 96)
    packed.fill(0, stored)
    bias = torch.randn(2 * half, generator=make)
    packed.set_bias(bias)
    for count in (1, 3, 6, 40):
        x = torch.randn(count, 96, generator=make)
        gate, up = (x.double() @ weight.T + bias.double()).chunk(2, dim=-1)
        expected = act(gate) * up
        assert error(packed.linear(x, torch.float32, GATED, activation), expected) < 1e-5
        found = packed.linear(x.bfloat16(), torch.float32, GATED, activation)
        assert error(found, expected) < 2e-2


@pytest.mark.parametrize("isa", isas())
def test_rows_of_a_table(isa: str, make, monkeypatch) -> None:
    use(monkeypatch, isa)
    for source in set(SOURCES) - {"float32"}:
        columns = max(64, block_of(source))
        stored, weight = random_rows(make, source, 37, columns)
        packed = PackedWeight(source, 37, columns)
        packed.fill(0, stored)
        ids = torch.randint(0, 37, (9,), generator=make)
        assert torch.allclose(packed.rows(ids, torch.float32).double(), weight[ids], rtol=1e-6, atol=1e-7)
        with pytest.raises(AssertionError, match="outside the vocabulary"):
            packed.rows(torch.tensor([37]), torch.float32)


def test_threads_change_nothing(make, monkeypatch) -> None:
    """Every chunk is computed by one thread: the number of threads moves no bit."""
    stored, _ = random_rows(make, "q4_1", 200, 64)
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 40):
            x = torch.randn(count, 64, generator=make).to(dtype)
            found = []
            for threads in (1, 2, 3, 7):
                use(monkeypatch, isas()[-1], threads)
                packed = PackedWeight("q4_1", 200, 64)
                packed.fill(0, stored)
                found.append(packed.linear(x, torch.float32, STORE))
            assert all(torch.equal(found[0], other) for other in found[1:])


def test_pinned_threads_change_nothing(make, monkeypatch) -> None:
    """Nor does a core that there is not."""
    stored, _ = random_rows(make, "q4_1", 200, 64)
    x = torch.randn(9, 64, generator=make)
    found = []
    library = use(monkeypatch, isas()[-1], 3)
    try:
        for cores in ((), (0, 0, 0), (0, 1), (0, 9_999, -1), ()):
            library.set_cores(cores)
            packed = PackedWeight("q4_1", 200, 64)
            packed.fill(0, stored)
            found.append(packed.linear(x, torch.float32))
    finally:
        library.set_cores(())
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_row_does_not_see_its_neighbours(make, monkeypatch) -> None:
    for isa in isas():
        use(monkeypatch, isa)
        stored, _ = random_rows(make, "q8_0", 48, 64)
        packed = PackedWeight("q8_0", 48, 64)
        packed.fill(0, stored)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(20, 64, generator=make).to(dtype)
            clean = packed.linear(x, torch.float32)
            x[3] = float("nan")
            dirty = packed.linear(x, torch.float32)
            kept = [row for row in range(20) if row != 3]
            assert dirty[3].isnan().all() and torch.equal(clean[kept], dirty[kept])


@pytest.mark.parametrize("isa", isas())
def test_rows_in_several_formats(isa: str, make, monkeypatch) -> None:
    """Parts of any height one below the other, each in its own format, with a bias over all of them."""
    use(monkeypatch, isa)
    sources = [name for name in SOURCES if name != "float32"]
    for _ in range(4):
        parts = []
        for _ in range(random_int(make, 2, 5)):
            source, rows = sources[random_int(make, 0, len(sources) - 1)], random_int(make, 1, 70)
            parts.append((source, rows, *random_rows(make, source, rows, 256)))
        packed = None
        for source, rows, stored, _weight in parts:
            part = PackedWeight(source, rows, 256)
            part.fill(0, stored)
            if packed is None:
                packed = part
            else:
                packed.append(part)
        weight = torch.cat([weight for *_, weight in parts])
        bias = torch.randn(weight.shape[0], generator=make)
        packed.set_bias(bias)
        for count in (1, 4, 7, 33):
            x = torch.randn(count, 256, generator=make)
            expected = x.double() @ weight.T + bias.double()
            assert error(packed.linear(x, torch.float32), expected) < 1e-5, ([part[:2] for part in parts], count)
            assert error(packed.linear(x.bfloat16(), torch.bfloat16), expected) < 2e-2


@pytest.mark.parametrize("isa", isas())
def test_a_gate_and_an_up_in_formats_of_their_own(isa: str, make, monkeypatch) -> None:
    use(monkeypatch, isa)
    half = 16 * random_int(make, 1, 5)
    (gate, gate_weight), (up, up_weight) = random_rows(make, "q4_k", half, 256), random_rows(make, "q6_k", half, 256)
    packed, below = PackedWeight("q4_k", half, 256), PackedWeight("q6_k", half, 256)
    packed.fill(0, gate)
    below.fill(0, up)
    packed.append(below)
    bias = torch.randn(2 * half, generator=make)
    packed.set_bias(bias)
    for count in (1, 3, 20):
        x = 0.1 * torch.randn(count, 256, generator=make)
        gates, ups = x.double() @ gate_weight.T + bias[:half].double(), x.double() @ up_weight.T + bias[half:].double()
        expected = torch.nn.functional.silu(gates) * ups
        assert error(packed.linear(x, torch.float32, GATED, 0), expected) < 1e-5
        assert error(packed.linear(x.bfloat16(), torch.bfloat16, GATED, 0), expected) < 3e-2


def test_rows_that_do_not_fit_are_refused(make, monkeypatch) -> None:
    use(monkeypatch, isas()[-1])
    for source in SOURCES:
        columns = max(64, block_of(source))
        stored, _ = random_rows(make, source, 20, columns)
        packed = PackedWeight(source, 20, columns)
        for first, rows, message in (
            (0, stored[:, :-1], "takes"),
            (1, stored, "outside"),
            (-1, stored[:3], "outside"),
            (0, stored[0], "takes"),
        ):
            with pytest.raises(WeightsError, match=message):
                packed.fill(first, rows)
        if block_of(source) > 1:
            with pytest.raises(WeightsError, match="whole blocks"):
                PackedWeight(source, 20, columns + 1)
