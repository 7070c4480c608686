"""Sizes that decode graphs are captured for."""

from __future__ import annotations

from hexad.engine.graphs import MAX_DECODE_ROWS, MIN_WIDTH, row_bucket, width_bucket


def test_rows_are_rounded_up_and_waste_little() -> None:
    for rows in range(1, MAX_DECODE_ROWS + 1):
        bucket = row_bucket(rows)
        assert bucket >= rows
        assert row_bucket(bucket) == bucket
        assert bucket - rows <= max(rows // 4, 7)
    assert len({row_bucket(rows) for rows in range(1, MAX_DECODE_ROWS + 1)}) < 50
    assert [row_bucket(rows) for rows in (1, 2, 3, 5, 9)] == [1, 2, 4, 8, 16]


def test_width_never_exceeds_the_table() -> None:
    for most in (3, 64, 65, 132, 2048):
        for blocks in range(1, most + 1):
            assert blocks <= width_bucket(blocks, most) <= most
    assert width_bucket(1, 132) == MIN_WIDTH
