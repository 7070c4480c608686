"""Reading a JSON body: every way in which it can be malformed is a 400 with a reason."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from starlette.requests import Request

from hexad.common.errors import OverloadedError, PayloadTooLargeError, RequestError

MAX_VALUES = 1_000_000
BODIES_AT_ONCE = 8  # of the largest size
RETRY_S = 2.0


class BodyRoom:
    """Bounds the memory that bodies take before they are parsed, over all callers. Event-loop bound."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0

    async def read(self, request: Request) -> bytes:
        """The whole body; `request` does not keep it.

        Raises:
            OverloadedError: the bodies of all callers together are too much.
        """
        chunks, size = [], 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                self._held_bytes += len(chunk)
                if self._held_bytes > self._max_bytes:
                    what = f"the bodies that are being received have more than {self._max_bytes:,} bytes together"
                    raise OverloadedError(f"{what}: try again later, or send less", retry_after_s=RETRY_S)
                chunks.append(chunk)
            return b"".join(chunks)
        finally:
            self._held_bytes -= size


async def read_object(request: Request, room: BodyRoom) -> dict[str, Any]:
    """The request's body as a JSON object.

    Raises:
        RequestError: not UTF-8, not JSON, nested too deeply, or not an object.
        OverloadedError: no room for it at the moment.
    """
    return parse_object(await room.read(request))


def parse_object(data: bytes) -> dict[str, Any]:
    """`data` as a JSON object. NaN and infinities pass, so that the check of ranges can name their field."""
    if not data:
        raise _malformed("the body is empty: send a JSON object")
    if data.count(b",") > MAX_VALUES:  # each value costs up to a hundred times its bytes in memory
        raise PayloadTooLargeError(f"the body has more than {MAX_VALUES:,} commas: send less")
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise _malformed("the body is nested too deeply") from None
    except msgspec.MsgspecError as error:
        value = _lenient(data, error)
    if not isinstance(value, dict):
        raise _malformed(f"the body is a JSON {_kind(value)}: send an object")
    return value


def _lenient(data: bytes, error: Exception) -> Any:
    """What the strict parser refuses but a caller's JSON library may write: NaN, Infinity, numbers out of range."""
    try:
        value = json.loads(data)
        json.dumps(value, ensure_ascii=False).encode()  # lone surrogates parse, but are no text
    except UnicodeError:
        raise _malformed("the body is not valid UTF-8 text") from None
    except RecursionError:
        raise _malformed("the body is nested too deeply") from None
    except ValueError:
        raise _malformed(f"the body is not valid JSON: {error}") from None
    return value


def _kind(value: Any) -> str:
    return {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")


def _malformed(message: str) -> RequestError:
    return RequestError(message, code="malformed_body")
