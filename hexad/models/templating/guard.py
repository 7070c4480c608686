"""Keeps control tokens' names inside messages from becoming control tokens. No torch.

Before rendering, each such name in the caller's strings is replaced by a placeholder; after rendering, every name that is left comes from
the template. A string that begins or ends inside a name gets an empty placeholder there, so that two strings cannot form one together.
The placeholder's character occurs nowhere in the caller's strings.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Guard:
    """One tokenizer's control tokens. Immutable."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted({n for n in names if n}, key=len, reverse=True)
        self._index = {name: i for i, name in enumerate(self._names)}
        self._pattern = re.compile("|".join(map(re.escape, self._names))) if self._names else None
        self._heads = {n[:k] for n in self._names for k in range(1, len(n))}
        self._tails = {n[k:] for n in self._names for k in range(1, len(n))}
        self._longest = max((len(n) for n in self._names), default=0)

    def protect(self, value: Any) -> tuple[Any, Protected | None]:
        """(the value with placeholders, how to undo them); the value itself and None if nothing needs protection."""
        pattern = self._pattern
        if pattern is None or not any(self._is_risky(s) for s in _strings(value)):
            return value, None
        mark = _unused_character(value)
        return _mapped(value, lambda text: self._marked(text, mark)), Protected(self._names, pattern, mark)

    def _is_risky(self, text: str) -> bool:
        assert self._pattern is not None
        return self._pattern.search(text) is not None or self._ends_inside(text) or self._begins_inside(text)

    def _ends_inside(self, text: str) -> bool:
        return any(text[-k:] in self._heads for k in range(1, min(self._longest, len(text) + 1)))

    def _begins_inside(self, text: str) -> bool:
        return any(text[:k] in self._tails for k in range(1, min(self._longest, len(text) + 1)))

    def _marked(self, text: str, mark: str) -> str:
        assert self._pattern is not None
        before = mark * 2 if self._begins_inside(text) else ""
        after = mark * 2 if self._ends_inside(text) else ""
        return before + self._pattern.sub(lambda m: f"{mark}{self._index[m[0]]}{mark}", text) + after


class Protected:
    """What was rendered from protected strings can be read with it."""

    def __init__(self, names: list[str], pattern: re.Pattern[str], mark: str) -> None:
        self._names = names
        self._control = pattern
        escaped = json.dumps(mark)[1:-1]  # a template may write ASCII-only JSON
        self._placeholder = re.compile(f"(?:{re.escape(mark)}|{re.escape(escaped)})(\\d*)(?:{re.escape(mark)}|{re.escape(escaped)})")

    def plain(self, text: str) -> str:
        """The text with the caller's own words put back."""
        return self._placeholder.sub(lambda m: self._names[int(m[1])] if m[1] else "", text)

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """(text, whether it is a control token that the template wrote), in order."""
        at = 0
        for match in self._control.finditer(text):
            if match.start() > at:
                yield self.plain(text[at : match.start()]), False
            yield match[0], True
            at = match.end()
        if at < len(text):
            yield self.plain(text[at:]), False


def _strings(value: Any) -> Iterator[str]:
    """Every string in nested lists and objects, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


def _unused_character(value: Any) -> str:
    """A private-use character that no string holds; drawn at random, so that nobody can occupy them all."""
    while True:
        mark = chr(random.SystemRandom().randrange(0x100000, 0x10FFFD))
        if not any(mark in text for text in _strings(value)):
            return mark
