"""The counter-based generator: known values, uniformity, independence of seeds, choices, positions and purposes."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from hexad.engine.sampling.rng import Purpose, bits, mix, row_key, uniform


def test_bits_are_splitmix64_of_the_key_and_position():
    """Tensor arithmetic equals the definition in Python integers, sign bits and wrap-around included."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    keys = [rng.randrange(-(2**63), 2**63) for _ in range(200)] + [0, -1, 2**63 - 1, -(2**63)]
    positions = [rng.randrange(2**31) for _ in keys]
    got = bits(torch.tensor(keys), torch.tensor(positions)).tolist()
    for key, position, value in zip(keys, positions, got, strict=True):
        assert value % 2**64 == mix((key + position * 0x9E3779B97F4A7C15) % 2**64)


def test_splitmix64_known_sequence():
    """The published generator seeded with 1234567 (state advanced before the output)."""
    golden = 0x9E3779B97F4A7C15
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [mix((1234567 + (i + 1) * golden) % 2**64) for i in range(5)] == wanted


def streams(count):
    base = random.SystemRandom().randrange(2**48)
    print(f"base seed {base}")
    position = torch.arange(count)
    yield "positions", uniform(torch.full((count,), row_key(base, 0)), position)
    yield "seeds", uniform(torch.tensor([row_key(base + i, 0) for i in range(count)]), torch.full((count,), 7))
    yield "choices", uniform(torch.tensor([row_key(base, i) for i in range(count)]), torch.full((count,), 7))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_uniform_and_uncorrelated_along_every_axis(which):
    count = 20_000
    _, values = list(streams(count))[which]
    u = values.numpy()
    assert u.min() >= 0 and u.max() < 1
    kolmogorov = np.abs(np.sort(u) - np.arange(count) / count).max()
    assert kolmogorov < 2.5 / math.sqrt(count)
    for lag in (1, 2, 16):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 5 / math.sqrt(count)
    table, _, _ = np.histogram2d(u[:-1], u[1:], bins=10)
    expected = (count - 1) / 100
    assert ((table - expected) ** 2 / expected).sum() < 99 + 6 * math.sqrt(198)


def test_neighbouring_keys_are_independent_at_equal_positions():
    count = 20_000
    position = torch.arange(count)
    reference = uniform(torch.full((count,), row_key(42, 0)), position).numpy()
    for key in (row_key(43, 0), row_key(42, 1), row_key(42, 0, Purpose.ACCEPT), row_key(42, 0, Purpose.RESIDUAL), row_key(-1, 0)):
        other = uniform(torch.full((count,), key), position).numpy()
        assert abs(np.corrcoef(reference, other)[0, 1]) < 5 / math.sqrt(count)


def test_seeds_are_taken_modulo_2_to_64():
    assert row_key(-1, 0) == row_key(2**64 - 1, 0)
    assert len({row_key(s, c, p) for s in range(50) for c in range(16) for p in Purpose}) == 50 * 16 * 3
