"""The attack scripts and the model folder without weights, for tests in this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "cli"), str(ROOT / "tests" / "application")]

from firing import Watched  # noqa: E402
from tiny_model import make_model, served  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Watched]:
    """A server on the instant fake device, as the scripts see it."""
    with served(tiny, "--log-level", "error") as process:
        yield Watched(process.url, process.process.pid)
