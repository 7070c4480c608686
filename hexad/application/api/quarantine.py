"""Requests that were inside when the engine process died, by content: the third death in a row condemns them.

A request that ends well is cleared, so that an innocent one that is often running is never refused; one that kills the engine never ends
well.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from hexad.application.api.strike_board import StrikeBoard
from hexad.common.errors import RequestError
from hexad.orchestration.messages import Submit
from hexad.orchestration.stream import RequestStream

MAX_STRIKES = 3
MAX_SUSPECTS = 1_024
MEMORY_S = 3_600.0  # after this long without another death a suspect is forgotten


class Quarantine:
    """Counts deaths by content. While nobody is suspected, a check costs nothing."""

    def __init__(self, board: StrikeBoard | None = None) -> None:
        """`board`: what other API processes over the same engine have seen counts too."""
        self._board = board
        self._strikes: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # content -> (deaths, when the latest was)
        self._watched: list[tuple[bytes, RequestStream]] = []  # suspects that run again

    def check(self, submit: Submit) -> bytes | None:
        """The content's key if it is suspected, for `watch`.

        Raises:
            RequestError: it has been there at too many deaths.
        """
        others = self._board.others() if self._board is not None else {}
        if not self._strikes and not others:
            return None
        self._sweep()
        key = content_key(submit)
        strikes = self._strikes.get(key, (0, 0.0))[0] + others.get(key, 0)
        if strikes >= MAX_STRIKES:
            raise RequestError(
                f"the engine process died each of the {strikes} times that this request ran: it is not run again; change it",
                code="quarantined",
            )
        return key if strikes else None

    def watch(self, key: bytes | None, stream: RequestStream) -> None:
        """A suspect runs again as `stream`."""
        if key is not None:
            self._watched.append((key, stream))

    def strike(self, lost: Iterable[Submit]) -> None:
        """The engine died, and these requests were inside."""
        self._sweep()
        now_s = time.monotonic()
        for key in {content_key(submit) for submit in lost}:
            strikes, _ = self._strikes.pop(key, (0, 0.0))
            self._strikes[key] = (strikes + 1, now_s)
        while len(self._strikes) > MAX_SUSPECTS:
            self._strikes.popitem(last=False)
        if self._board is not None:
            self._board.publish(self._strikes)

    def _sweep(self) -> None:
        """Clear those that have ended well, forget those of long ago."""
        for key, stream in self._watched:
            if stream.finished:
                self._strikes.pop(key, None)
                if self._board is not None:
                    self._board.publish(self._strikes, key)
        self._watched = [(key, stream) for key, stream in self._watched if not stream.ended]
        oldest_s = time.monotonic() - MEMORY_S
        while self._strikes and next(iter(self._strikes.values()))[1] < oldest_s:
            self._strikes.popitem(last=False)


def content_key(submit: Submit) -> bytes:
    """What makes two requests the same work: prompt, options (not the seed), adapter."""
    params = msgspec.structs.replace(submit.params, seed=None)
    return hashlib.sha256(msgspec.msgpack.encode((submit.prompt, params, submit.adapter_id))).digest()
