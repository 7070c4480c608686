"""One server for the tests that only ask questions."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2 as httpx
import pytest
from api_stub import Running, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client
