"""Tables and lines for a terminal of any width: texts fold, numbers are never cut; columns that do not fit follow in a second table.

Where the output is no terminal nothing folds: whoever reads it there (a pager, grep) has no width.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_UNBOUNDED = 10_000
_LEAST_TEXT = 16  # columns of a text that folds
_BORDERS = 3  # of one column; one more for the table


@dataclass(frozen=True)
class Column:
    """A heading; `text` may fold, anything else is a number and stays whole, at the right."""

    name: str
    text: bool = False


def number(value: float) -> str:
    """Whole where it is large, with three decimals or three digits where it is not, never with an exponent."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    decimals = (
        0 if size >= 10_000 or value == int(value) else 1 if size >= 1_000 else 3 if size >= 0.1 else 2 - math.floor(math.log10(size))
    )
    return f"{value:,.{decimals}f}"


def console() -> Any:
    """A rich console on stdout as wide as the terminal (or COLUMNS), without a limit where there is none."""
    from rich.console import Console

    bounded = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(soft_wrap=not bounded, width=None if bounded else _UNBOUNDED)


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[Any]], where: Any = None, *, keys: int = 1) -> None:
    """Print cells (strings, or rich texts) under `columns`. The first `keys` columns lead every part of a table that is too wide."""
    from rich.console import Console

    where = where or console()
    for chosen in parts(columns, rows, where.width, keys):
        table, needed = _table([columns[i] for i in chosen], [[row[i] for i in chosen] for row in rows])
        out = where if needed <= where.width else Console(file=where.file, width=needed)
        out.print(table, soft_wrap=False)


def parts(columns: Sequence[Column], rows: Sequence[Sequence[Any]], width: int, keys: int = 1) -> list[list[int]]:
    """Indices of the columns of each table that it takes to stay within `width`."""
    least = [_least(column, [row[i] for row in rows]) + _BORDERS for i, column in enumerate(columns)]
    lead = list(range(keys))
    found, used = [lead.copy()], 1 + sum(least[:keys])
    for i in range(keys, len(columns)):
        if used + least[i] > width and len(found[-1]) > keys:
            found.append(lead.copy())
            used = 1 + sum(least[:keys])
        found[-1].append(i)
        used += least[i]
    return found


def _natural(column: Column, cells: Sequence[Any]) -> int:
    return max(len(line) for cell in (column.name, *cells) for line in str(cell).split("\n"))


def _least(column: Column, cells: Sequence[Any]) -> int:
    natural = _natural(column, cells)
    if not column.text:
        return natural
    return min(natural, max(_LEAST_TEXT, len(column.name)))


def _table(columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> tuple[Any, int]:
    """(the table, the columns it needs at least)."""
    from rich.table import Table
    from rich.text import Text

    table, needed = Table(), 1
    for i, column in enumerate(columns):
        least = _least(column, [row[i] for row in rows])
        needed += least + _BORDERS
        if column.text:
            table.add_column(column.name, overflow="fold", min_width=least)
        else:
            table.add_column(column.name, no_wrap=True, justify="right", min_width=least)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table, needed
