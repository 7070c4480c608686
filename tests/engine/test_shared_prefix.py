"""How many keys the decode rows of a step have in common."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from hexad.engine import batch_state
from hexad.engine.batch_state import _shared_len

MIN_SHARED_READS = 8_192


@pytest.fixture(autouse=True)
def small_batches_count(monkeypatch):
    monkeypatch.setattr(batch_state, "MIN_SHARED_READS", MIN_SHARED_READS)


def test_common_blocks_are_counted_and_the_newest_key_never_is() -> None:
    seed = time.time_ns() % 2**31
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        block, rows = rng.choice([16, 64]), rng.randint(2, 40)
        common = rng.randint(0, 60)
        lengths = np.array([common * block + rng.randint(1, 5 * block) for _ in range(rows)], np.int64)
        width = int(-(-lengths.max() // block))
        table = np.arange(rows * width, dtype=np.int32).reshape(rows, width) + 1000
        table[:, :common] = np.arange(common)
        got = _shared_len(table, lengths, block)
        assert got in (0, common * block)
        assert (got > 0) == ((rows - 1) * common * block >= MIN_SHARED_READS)


def test_equal_tables_share_all_but_the_last_block() -> None:
    table = np.tile(np.arange(40, dtype=np.int32), (64, 1))
    assert _shared_len(table, np.full(64, 640, np.int64), 16) == 624
    assert _shared_len(table[:1], np.full(1, 640, np.int64), 16) == 0
    assert _shared_len(table[:0], np.zeros(0, np.int64), 16) == 0
