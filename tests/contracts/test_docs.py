"""docs/architecture.md stays true: every file it names exists, every `file:name` is defined there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
NAMED = sorted(set(re.findall(r"(hexad/[\w/]+\.py)(?::(\w+))?", TEXT)))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_architecture_names_what_exists(file: str, name: str) -> None:
    source = (ROOT / file).read_text()
    if name:
        assert re.search(rf"^\s*(async def|def|class) {name}\b", source, re.MULTILINE), f"{file} does not define {name}"


def test_all_hops_are_named() -> None:
    hops = re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)
    assert hops == [str(i) for i in range(1, 11)]
