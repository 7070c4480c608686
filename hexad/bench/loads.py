"""The standard loads W1 to W9: how many requests of which lengths, and what is reported. Every number can be scaled."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hexad.common.errors import ConfigError

_FILE = Path(__file__).parent / "data" / "loads.json"


@dataclass(frozen=True)
class Load:
    """One load. Lists have one entry per point of the sweep; a load sweeps at most one of them."""

    name: str
    what: str
    requests: int = 1
    input_tokens: tuple[int, ...] = ()
    output_tokens: int = 1
    shared_prefix_tokens: int = 0
    batch: tuple[int, ...] = ()
    concurrency: tuple[int, ...] = ()
    report: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Longest prompt, shared prefix included."""
        return self.shared_prefix_tokens + max(self.input_tokens, default=0)

    @property
    def total_len(self) -> int:
        """Longest sequence."""
        return self.prompt_tokens + self.output_tokens

    @property
    def fixed(self) -> dict[str, str]:
        """Numbers that make the load what it is, and why."""
        found = {}
        if self.name == "W2":
            found["requests"] = "is a single stream (--repeats says how often)"
        if self.name == "W3":
            found["output_tokens"] = "measures prefill alone"
        return found

    def scaled(
        self,
        *,
        requests: int | None = None,
        input_tokens: Sequence[int] | None = None,
        output_tokens: int | None = None,
        shared_prefix_tokens: int | None = None,
        batch: Sequence[int] | None = None,
        concurrency: Sequence[int] | None = None,
    ) -> Load:
        """A copy with the given numbers in place of the standard ones; those that would make it another load (`fixed`) stay."""
        requests = None if "requests" in self.fixed else requests
        output_tokens = None if "output_tokens" in self.fixed else output_tokens
        return replace(
            self,
            requests=self.requests if requests is None else requests,
            input_tokens=tuple(input_tokens) if input_tokens else self.input_tokens,
            output_tokens=self.output_tokens if output_tokens is None else output_tokens,
            shared_prefix_tokens=self.shared_prefix_tokens if shared_prefix_tokens is None else shared_prefix_tokens,
            batch=tuple(batch) if batch and self.batch else self.batch,
            concurrency=tuple(concurrency) if concurrency and self.concurrency else self.concurrency,
        )

    def as_dict(self) -> dict[str, Any]:
        """What a result file records: the numbers that make two runs alike."""
        return {
            "name": self.name, "requests": self.requests, "input_tokens": list(self.input_tokens), "output_tokens": self.output_tokens,
            "shared_prefix_tokens": self.shared_prefix_tokens, "batch": list(self.batch), "concurrency": list(self.concurrency),
        }  # fmt: skip


def _read(name: str, entry: dict[str, Any]) -> Load:
    lengths = entry.get("input_tokens", ())
    return Load(
        name=name,
        what=entry["what"],
        requests=entry.get("requests", 1),
        input_tokens=tuple(lengths) if isinstance(lengths, list) else (lengths,),
        output_tokens=entry.get("output_tokens", 1),
        shared_prefix_tokens=entry.get("shared_prefix_tokens", 0),
        batch=tuple(entry.get("batch", ())),
        concurrency=tuple(entry.get("concurrency", ())),
        report=tuple(entry["report"]),
    )


def all_loads() -> dict[str, Load]:
    """The standard loads by name."""
    return {name: _read(name, entry) for name, entry in json.loads(_FILE.read_text()).items() if isinstance(entry, dict)}


def find_load(name: str) -> Load:
    """The load called `name` (case does not matter).

    Raises:
        ConfigError: no such load.
    """
    loads = all_loads()
    if name.upper() not in loads:
        raise ConfigError(f"there is no load {name!r}: known are {', '.join(loads)}")
    return loads[name.upper()]


def random_prompts(count: int, length: int, vocab_size: int, seed: int, shared: Sequence[int] = ()) -> list[list[int]]:
    """`count` prompts of `length` random ids after the `shared` ones. Low ids (special tokens in most vocabularies) are left out."""
    generator = random.Random(seed)
    low = min(1_000, vocab_size // 4)
    return [[*shared, *(generator.randrange(low, vocab_size) for _ in range(length))] for _ in range(count)]
