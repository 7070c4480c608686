"""Counters of several API processes as one page: each writes what it has counted to a file once a second, any of them adds up all."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import msgspec

from hexad.common.metrics import MetricsRegistry, OwnSample

EVERY_S = 1.0
_decode = msgspec.json.Decoder(list[OwnSample]).decode


class SharedMetrics:
    """This process's place in a directory that its siblings share. Files of processes that have ended stay: counters never fall."""

    def __init__(self, directory: Path, index: int) -> None:
        self._directory = directory
        self._own = directory / f"{index}.json"

    def write(self, registry: MetricsRegistry) -> None:
        """Publish what `registry` has counted."""
        partial = self._own.with_suffix(".partial")
        with contextlib.suppress(OSError):  # the directory goes with the parent
            partial.write_bytes(msgspec.json.encode(registry.own_samples()))
            os.replace(partial, self._own)

    def read(self, registry: MetricsRegistry) -> None:
        """Take in what the siblings have published."""
        samples: list[OwnSample] = []
        for path in self._directory.glob("*.json"):
            if path != self._own:
                with contextlib.suppress(OSError, msgspec.DecodeError):
                    samples.extend(_decode(path.read_bytes()))
        registry.set_others(samples)

    async def keep_writing(self, registry: MetricsRegistry) -> None:
        """Until cancelled."""
        try:
            while True:
                self.write(registry)
                await asyncio.sleep(EVERY_S)
        finally:
            self.write(registry)
