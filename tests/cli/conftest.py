"""One model folder and one server process for the tests that only ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_model import ServerProcess, make_model, served


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[ServerProcess]:
    with served(tiny) as process:
        yield process
