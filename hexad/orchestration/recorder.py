"""Records step plans and their results to a file, to be replayed offline by `replay`. No torch.

A trace is a sequence of frames: four bytes of length (big endian), then msgpack of one record; `TraceHeader` first. A trace that was
cut short (the process died) is valid up to its last whole frame.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from hexad.engine.plan import KVLayout, StepPlan, StepResult

log = logging.getLogger("hexad.recorder")

TRACE_VERSION = 1


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """What the plans were made for."""

    version: int
    layout: KVLayout


class Planned(msgspec.Struct, frozen=True, tag="plan"):
    """A plan was made and handed to the executor."""

    plan: StepPlan


class Retired(msgspec.Struct, frozen=True, tag="result"):
    """The result of the oldest plan in flight came back."""

    result: StepResult


Record = TraceHeader | Planned | Retired


class PlanRecorder:
    """Appends to one file; an observer of the core loop's steps, called from its thread. A full disk ends the trace, not the service."""

    def __init__(self, path: Path | str, layout: KVLayout) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._file: BinaryIO | None = Path(path).open("wb")  # noqa: SIM115
        self._write(TraceHeader(version=TRACE_VERSION, layout=layout))

    def on_plan(self, plan: StepPlan) -> None:
        """A plan was made; call it before the next result is taken in."""
        self._write(Planned(plan))

    def on_result(self, plan: StepPlan, result: StepResult, elapsed_s: float = 0.0) -> None:
        """The oldest plan's result came back; call it before the next plan is made."""
        self._write(Retired(result))

    def stats(self) -> Mapping[str, float]:
        """Nothing: the recorder has no numbers of its own."""
        return {}

    def close(self) -> None:
        """Flush and close; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> PlanRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, record: Record) -> None:
        if self._file is None:
            return
        frame = self._encoder.encode(record)
        try:
            self._file.write(len(frame).to_bytes(4, "big") + frame)
        except OSError as error:  # serving goes on without the trace
            log.warning("the plan trace ends here: %s", error)
            self._file = None


def read_trace(path: Path | str) -> Iterator[Record]:
    """The records of a trace, the header first; stops at a frame that was cut short.

    Raises:
        ValueError: not a trace, or one of another version.
    """
    decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
    first = True
    with Path(path).open("rb") as file:
        while len(size := file.read(4)) == 4:
            frame = file.read(int.from_bytes(size, "big"))
            if len(frame) < int.from_bytes(size, "big"):
                break
            try:
                record = decoder.decode(frame)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path} is not a plan trace: {error}") from None
            if first and not (isinstance(record, TraceHeader) and record.version == TRACE_VERSION):
                raise ValueError(f"{path} is not a plan trace of version {TRACE_VERSION}")
            first = False
            yield record
    if first:
        raise ValueError(f"{path} is empty: not a plan trace")
