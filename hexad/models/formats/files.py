"""Small JSON files of a model folder. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from hexad.common.errors import ModelError

MAX_JSON_BYTES = 64 * 2**20


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a model's file; None if there is no such file.

    Raises:
        ModelError: too large, not JSON, or not an object.
    """
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: {path.stat().st_size:,} bytes; a configuration has at most {MAX_JSON_BYTES:,}")
        value = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error}): fetch it again") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: should be a JSON object, but is {type(value).__name__}")
    return value
