"""What several API processes tell each other of requests that were inside when the engine died: a file each, in a directory of theirs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

Strikes = Mapping[bytes, tuple[int, float]]  # content -> (deaths, when the latest was)


class Notice(msgspec.Struct, frozen=True):
    """One process's knowledge. Times are of the machine's monotonic clock."""

    strikes: dict[str, tuple[int, float]]
    cleared: dict[str, float]  # ended well at that time: strikes from before do not count


_decode = msgspec.json.Decoder(Notice).decode


class StrikeBoard:
    """One process's place on the board. Files of processes that have ended stay."""

    def __init__(self, directory: Path, index: int) -> None:
        self._directory = directory
        self._own = directory / f"{index}.json"
        self._cleared: dict[str, float] = {}
        self._seen = -1  # the directory's time of change
        self._others: dict[bytes, int] = {}
        directory.mkdir(mode=0o700, exist_ok=True)

    def publish(self, strikes: Strikes, cleared: bytes | None = None) -> None:
        """Tell the siblings our strikes; `cleared` has just ended well."""
        if cleared is not None:
            self._cleared[cleared.hex()] = time.monotonic()
        partial = self._own.with_suffix(".partial")
        notice = Notice({key.hex(): struck for key, struck in strikes.items()}, self._cleared)
        with contextlib.suppress(OSError):  # the directory goes with the parent
            partial.write_bytes(msgspec.json.encode(notice))
            os.replace(partial, self._own)

    def others(self) -> dict[bytes, int]:
        """Deaths by content, as the siblings have seen them."""
        with contextlib.suppress(OSError):
            changed = self._directory.stat().st_mtime_ns
            if changed != self._seen:
                self._others, self._seen = self._read(), changed
        return self._others

    def _read(self) -> dict[bytes, int]:
        notices = []
        for path in self._directory.glob("*.json"):
            if path != self._own:
                with contextlib.suppress(OSError, msgspec.DecodeError):
                    notices.append(_decode(path.read_bytes()))
        counts: dict[bytes, int] = {}
        for notice in notices:
            for key, (deaths, last_s) in notice.strikes.items():
                if not any(other.cleared.get(key, 0.0) > last_s for other in (*notices, Notice({}, self._cleared))):
                    counts[bytes.fromhex(key)] = counts.get(bytes.fromhex(key), 0) + deaths
        return counts
