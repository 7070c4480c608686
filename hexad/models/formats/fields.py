"""Typed look-ups in a parsed JSON object that came with a model. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hexad.common.errors import ModelError

MAX_COUNT = 2**31 - 1


class Fields:
    """A JSON object; look-ups raise ModelError with file, key, value and what would be right."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self.path = path

    def __bool__(self) -> bool:
        return bool(self._values)

    def sub(self, key: str) -> Fields:
        """The object at `key`; empty if it is missing or null."""
        value = self._values.get(key)
        return Fields(value if isinstance(value, Mapping) else {}, self.path, f"{self._prefix}{key}.")

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def _wrong(self, key: str, wanted: str) -> ModelError:
        value = self._values.get(key)
        return ModelError(f"{self.path}: {self._prefix}{key} must be {wanted}, but is {str(value)[:60]!r}")

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from `least` to 2^31 - 1; null counts as missing."""
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.path}: {self._prefix}{key} is missing: not a complete configuration")
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_COUNT:
            raise self._wrong(key, f"a whole number from {least} to {MAX_COUNT}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number that is not negative; null counts as missing."""
        value = self.optional_number(key)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.path}: {self._prefix}{key} is missing: not a complete configuration")
        return default

    def optional_number(self, key: str) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or not math.isfinite(value) or value < 0:
            raise self._wrong(key, "a finite number, 0 or more")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them."""
        value = self._values.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= MAX_COUNT for i in items):
            raise self._wrong(key, "a token id or a list of them")
        return tuple(items)

    def optional_id(self, key: str, default: int | None = None) -> int | None:
        ids = self.ids(key)
        return ids[0] if ids else default
