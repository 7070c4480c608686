"""Content that is a string or a list of typed blocks, as the newer APIs write it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hexad.common.errors import RequestError, UnsupportedError


def text_of(content: Any, param: str, types: Sequence[str]) -> str:
    """The text of `content`: itself, or its blocks (of one of `types`, the first is the usual one) as lines.

    Raises:
        RequestError: something else; `param` says where.
        UnsupportedError: a block of another type.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{param} must be a string or a list of blocks of type {types[0]}", param=param, code="invalid_type")
    return "\n".join(_texts(content, param, types))


def _texts(content: Sequence[Any], param: str, types: Sequence[str]) -> Iterator[str]:
    for index, block in enumerate(content):
        where = f"{param}.{index}"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RequestError(f"{where} must be an object with a type", param=where, code="invalid_type")
        if block["type"] not in types:
            raise UnsupportedError(f"{where} has type {block['type'][:40]!r}: this model reads blocks of type {types[0]} only", param=where)
        if not isinstance(block.get("text"), str):
            raise RequestError(f"{where}.text must be a string", param=f"{where}.text", code="invalid_type")
        yield block["text"]
