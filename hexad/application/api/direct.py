"""The short way of a stream's bytes: from the callback that reads the engine's news to the connection, without a task in between.

A chunk of one token that goes the long way (a future, a task, four generators, ASGI's `send` through every middleware) costs several times
what its bytes cost. The long way stays for what may wait or end: first and last chunks, errors, slow readers.
"""

from __future__ import annotations

from typing import Any, Final

EXTENSION: Final = "hexad.direct"  # among the ASGI scope's extensions


class DirectBody:
    """Parts of a chunked response's body, written at once. Made by the protocol for each request."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: Any) -> None:
        """`cycle`: uvicorn's state of one request and its response."""
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        """The head is out, the end is not, the caller is there and keeps up: `write` may be called."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding and not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete))

    def write(self, part: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


def direct_body(scope: Any) -> DirectBody | None:
    """That of the request with this ASGI scope; None: the server has no such thing."""
    found = scope.get("extensions", {}).get(EXTENSION)
    return found if isinstance(found, DirectBody) else None
