"""What a load needs of whatever it measures: an engine in this process, or an address. Also the loop that drives a load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hexad.bench.records import Record

Prompt = Sequence[int]
Tick = Callable[[int, int], None]  # (requests finished, output tokens so far); called often, must be cheap


def no_tick(_finished: int, _tokens: int) -> None:
    """Progress that nobody watches."""


class Face(Protocol):
    """Something that answers prompts. `info()` is JSON-able: what a result file says of it."""

    vocab_size: int

    def run(
        self,
        prompts: Sequence[Prompt],
        output_tokens: int,
        *,
        concurrency: int | None = None,
        duration_s: float | None = None,
        request_rate: float | None = None,
        tick: Tick = no_tick,
    ) -> list[Record]:
        """Answer `prompts` greedily, each with exactly `output_tokens` tokens (end of sequence ignored).

        All at once, or at most `concurrency` at a time, or arriving at random at `request_rate` a second. With `duration_s`, prompts are
        repeated (with changed ids) until the time is over; what is unfinished then is cut off and its record has `end_s` 0.
        Raises KeyboardInterrupt only after leaving nothing running; `records` then holds what was finished.
        """
        ...

    @property
    def records(self) -> list[Record]:
        """Records of the latest `run`, complete or not."""
        ...

    def info(self) -> dict[str, Any]: ...

    def close(self) -> None: ...
