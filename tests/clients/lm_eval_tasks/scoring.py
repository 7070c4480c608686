"""How generated answers are scored."""

from __future__ import annotations

from typing import Any


def contains(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"contains": float(doc["answer"].lower() in results[0].lower())}
