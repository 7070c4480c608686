"""Logging of every process: set up by one call, as text for people or JSON lines for machines. Never prompts or generated text."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

ACCESS_LOGGER = "hexad.access"
_FIELDS = "hexad_fields"  # attribute of a LogRecord: what `access` adds


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the record's own fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        entry.update(getattr(record, _FIELDS, {}))
        return json.dumps(entry, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """`12:30:59 INFO hexad.engine: message key=value ...`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, _FIELDS, {})
        line = super().format(record)
        return line + "".join(f" {key}={value}" for key, value in fields.items()) if fields else line


def set_up(level: str = "info", form: Literal["text", "json"] = "text", *, process: str = "main") -> None:
    """Send the log of this process to stderr. `process` names it in JSON lines ("api", "engine", ...). May be called again."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)  # libraries speak up only when something is wrong
    logging.getLogger("hexad").setLevel(level.upper())
    logging.captureWarnings(True)


def access(
    *,
    request_id: str,
    method: str,
    path: str,
    status: int,
    duration_s: float,
    model: str = "",
    prompt_tokens: int = 0,
    completion_tokens: int = 0,
    cached_tokens: int = 0,
    finish_reason: str = "",
    client: str = "",
    **more: str | int | float,
) -> None:
    """The one access record of an HTTP request. Takes sizes and outcomes, never content."""
    fields: dict[str, str | int | float] = {"request_id": request_id, "status": status, "duration_s": round(duration_s, 6)}
    optional: dict[str, str | int | float] = {
        "model": model,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "cached_tokens": cached_tokens,
        "finish_reason": finish_reason,
        "client": client,
        **more,
    }
    fields.update({key: value for key, value in optional.items() if value})
    logging.getLogger(ACCESS_LOGGER).info("%s %s", method, path, extra={_FIELDS: fields})


def _timestamp(created_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created_s)) + f".{int(created_s % 1 * 1000):03d}Z"
