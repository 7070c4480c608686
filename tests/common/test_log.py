"""Log lines: JSON is one object a line, access records carry sizes and never content."""

from __future__ import annotations

import json
import logging

import pytest

from hexad.common import log


@pytest.fixture(autouse=True)
def _restore() -> object:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("info", "json", process="engine")
    logging.getLogger("hexad.x").info('a "quoted" line\nbreak')
    logging.getLogger("hexad.x").debug("not shown")
    log.access(request_id="r1", method="POST", path="/v1/completions", status=200, duration_s=0.5, prompt_tokens=7)
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first["message"] == 'a "quoted" line\nbreak' and first["process"] == "engine" and first["level"] == "info"
    assert second["request_id"] == "r1" and second["status"] == 200 and second["prompt_tokens"] == 7
    assert "completion_tokens" not in second


def test_json_has_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("info", "json")
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("hexad.x").exception("failed")
    (entry,) = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert "ValueError: boom" in entry["exception"]


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("info", "text")
    log.access(request_id="r1", method="GET", path="/health", status=200, duration_s=0.001)
    assert "GET /health request_id=r1 status=200" in capsys.readouterr().err
