"""docs/server.md is true: its tables are what the code says, and every flag, metric, endpoint, field and error is in them."""

from __future__ import annotations

import re

from api_stub import StubEngine, make_state
from server_docs import PAGE, TABLE, TABLES, written

from hexad.application.api.app import build_app
from hexad.application.api.schema import ChatRequest, CompletionRequest
from hexad.cli.settings import flag_name
from hexad.common.config import HexadConfig
from hexad.common.metric_table import METRICS

TEXT = PAGE.read_text()
KEYS = list(HexadConfig.keys())


def test_tables_are_what_the_code_says() -> None:
    assert written(TEXT) == TEXT, "docs/server.md is old: run python scripts/server_docs.py"
    assert {match[2] for match in TABLE.finditer(TEXT)} == set(TABLES)


async def test_everything_is_named() -> None:
    for key in KEYS:
        assert f"`{flag_name(key)}`" in TEXT, key
    for metric in METRICS:
        assert f"`{metric.name}`" in TEXT, metric.name
    for name in {*ChatRequest.model_fields, *CompletionRequest.model_fields}:
        assert f"`{name}`" in TEXT, name
    app = build_app(make_state(StubEngine()))
    for route in app.routes:
        path = route.path.replace("{model_id:path}", "{id}")
        for method in getattr(route, "methods", None) or ["WebSocket"]:
            assert method == "HEAD" or f"`{method} {path}`" in TEXT, (method, path)


def test_every_code_that_an_error_is_raised_with_is_in_the_table() -> None:
    codes = {match[1] for path in (PAGE.parents[1] / "hexad").rglob("*.py") for match in re.finditer(r'\bcode="(\w+)"', path.read_text())}
    assert {"quarantined", "model_not_found", "malformed_body"} <= codes
    assert [code for code in codes - {"startup_failed"} if f"| `{code}` |" not in TEXT] == []  # that one ends the process


def test_the_prose_speaks_of_flags_that_exist() -> None:
    known = {flag_name(key) for key in KEYS} | {"--config"}
    prose = TABLE.sub("", TEXT)
    assert set(re.findall(r"`(--[a-z-]+)", prose)) <= known
