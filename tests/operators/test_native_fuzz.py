"""Packed data that no file should hold: random bytes for blocks, NaN and infinite scales, rows cut short. Nothing is read or written
outside its memory (AddressSanitizer sees it, tests/operators/sanitize_native.sh), and a bad row spoils its own output alone.

HEXAD_FUZZ_ROUNDS: how many random cases each test draws for an instruction set (default 6).
"""

from __future__ import annotations

import os
import time

import pytest
import torch
from native_library import block_of, isas, random_rows, use

from hexad.common.errors import WeightsError
from hexad.operators.native.library import GATED, SOURCES, PackedWeight

FUZZ_ROUNDS = int(os.environ.get("HEXAD_FUZZ_ROUNDS", "6"))
PACKED = [name for name in SOURCES if name not in ("bfloat16", "float32")]


@pytest.fixture
def make() -> torch.Generator:
    seed = time.time_ns() % 2**31
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def draw(make: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (1,), generator=make))


def choose(make: torch.Generator, among):
    return among[draw(make, 0, len(among) - 1)]


def noise(make: torch.Generator, source: str, rows: int, columns: int) -> torch.Tensor:
    """Stored rows of random bytes: any scale, NaN and infinity too."""
    stored, _ = random_rows(make, source, rows, columns)
    raw = stored.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=make, dtype=torch.uint8))
    if draw(make, 0, 2) == 0:
        raw[draw(make, 0, rows - 1)] = 0xFF  # NaN wherever a scale is
    return stored


def random_case(make: torch.Generator) -> tuple[str, int, int]:
    source = choose(make, list(SOURCES))
    block = block_of(source)
    columns = block * draw(make, 1, 3 if block == 256 else 7) if block > 1 else draw(make, 1, 150)
    return source, draw(make, 1, 80), columns


@pytest.mark.parametrize("isa", isas())
def test_random_bytes_stay_in_their_memory(isa: str, make, monkeypatch) -> None:
    for round_index in range(FUZZ_ROUNDS):
        use(monkeypatch, isa, 1 + round_index % 3)
        source, rows, columns = random_case(make)
        packed = PackedWeight(source, rows, columns)
        stored = noise(make, source, rows, columns)
        cut = draw(make, 0, rows)
        packed.fill(cut, stored[cut:].clone())
        packed.fill(0, stored[:cut].clone())
        if draw(make, 0, 1):
            packed.set_bias(torch.full((rows,), float("inf")))
        ids = torch.randint(0, rows, (5,), generator=make)
        assert packed.rows(ids, choose(make, [torch.float32, torch.bfloat16])).shape == (5, columns)
        for count in (1, 2, 3, 4, draw(make, 5, 70)):
            x = torch.randn(count, columns, generator=make).to(choose(make, [torch.float32, torch.bfloat16]))
            if draw(make, 0, 3) == 0:
                x[0, draw(make, 0, columns - 1)] = float("inf")
            assert packed.linear(x, choose(make, [torch.float32, torch.bfloat16])).shape == (count, rows)
            if rows % 32 == 0:
                assert packed.linear(x, torch.bfloat16, GATED, draw(make, 0, 3)).shape == (count, rows // 2)


@pytest.mark.parametrize("isa", isas())
def test_random_parts_stay_in_their_memory(isa: str, make, monkeypatch) -> None:
    """Rows in several formats, one of them noise."""
    for round_index in range(FUZZ_ROUNDS):
        use(monkeypatch, isa, 1 + round_index % 3)
        packed = None
        for _ in range(draw(make, 2, 8)):
            source = choose(make, [name for name in SOURCES if name != "float32"])
            rows = choose(make, [draw(make, 1, 40), 16, 32])
            part = PackedWeight(source, rows, 256)
            part.fill(0, noise(make, source, rows, 256))
            if packed is None:
                packed = part
            else:
                packed.append(part)
        for count in (1, 5, draw(make, 6, 40)):
            x = torch.randn(count, 256, generator=make).to(choose(make, [torch.float32, torch.bfloat16]))
            assert packed.linear(x, choose(make, [torch.float32, torch.bfloat16])).shape == (count, packed.out_features)
            if packed.out_features % 32 == 0:
                assert packed.linear(x, torch.float32, GATED, 0).shape == (count, packed.out_features // 2)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("source", PACKED)
def test_a_bad_row_spoils_its_own_output_alone(isa: str, source: str, make, monkeypatch) -> None:
    use(monkeypatch, isa)
    columns = max(64, block_of(source))
    stored, _ = random_rows(make, source, 48, columns)
    bad = stored.clone()
    row = draw(make, 0, 47)
    bad[row] = 0xFF  # each half of it is NaN
    clean, dirty = (PackedWeight(source, 48, columns) for _ in range(2))
    clean.fill(0, stored)
    dirty.fill(0, bad)
    kept = [i for i in range(48) if i != row]
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 3, 20):
            x = torch.randn(count, columns, generator=make).to(dtype)
            expected, found = clean.linear(x, torch.float32), dirty.linear(x, torch.float32)
            assert torch.equal(found[:, kept], expected[:, kept])
            assert found[:, row].isnan().all()
    assert dirty.rows(torch.tensor([row]), torch.float32).isnan().all()


@pytest.mark.parametrize("source", SOURCES)
def test_rows_cut_short_are_refused(source: str, make, monkeypatch) -> None:
    use(monkeypatch, isas()[-1])
    columns = max(64, block_of(source))
    stored, _ = random_rows(make, source, 5, columns)
    packed = PackedWeight(source, 5, columns)
    for _ in range(FUZZ_ROUNDS):
        width = draw(make, 0, stored.shape[1] - 1)
        with pytest.raises(WeightsError, match="takes"):
            packed.fill(0, stored[:, :width])
    with pytest.raises(WeightsError, match="takes"):
        packed.fill(0, torch.cat((stored, stored), dim=1))
    with pytest.raises(WeightsError, match="outside"):
        packed.fill(draw(make, 1, 2**40), stored)
