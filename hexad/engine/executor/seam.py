"""Seam 2: the executor, between the core loop and the machines that compute. No torch.

Contract
- One thread calls an executor: the core loop's. Calls come in this order: `load`, `kv_bytes`, `allocate`, then any number of
  `execute`, then `close` (which is allowed at any time and is idempotent).
- `execute(plan)` launches the forward pass and returns at once where the device allows it. Up to `depth` handles may be in flight;
  the core never exceeds it. Handles are sampled in the order of their plans.
- `handle.sample(masks)` launches sampling and returns a pending result. It may be called before the tokens of earlier steps are
  known to the host. `masks` maps the rid of each `masked` row to its packed bit mask (vocabulary bits, 32 a word, little endian).
- `pending.done()` never blocks; `pending.wait()` blocks and returns the result, or raises if the executor as a whole failed. A
  failure of one request is not an exception: it is `RowResult.error`.
- Executors keep no scheduling state: what they know of a request came in plans and is dropped when a plan says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from hexad.engine.plan import KVBudget, KVLayout, StepPlan, StepResult

Masks = Mapping[int, bytes]


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What loading did: sizes in bytes, phases in seconds, choices in words."""

    device: str  # "cpu", "cuda:0 (NVIDIA H200)", ...
    dtype: str
    weight_bytes: int
    phases_s: dict[str, float]  # "import", "read", "prepare", ...
    operators: dict[str, str]  # op -> provider chosen


class PendingResult(Protocol):
    """The result of one step, on its way back to the host."""

    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> StepResult:
        """Block until the result is there.

        Raises:
            TimeoutError: it did not arrive in `timeout_s`.
            EngineDeadError: the executor failed as a whole.
        """
        ...


class StepHandle(Protocol):
    """One step in flight."""

    step_id: int

    def sample(self, masks: Masks | None = None) -> PendingResult: ...

    def drafts(self) -> Mapping[int, tuple[int, ...]]:
        """Drafts proposed after this step, by rid (empty without a proposer)."""
        ...


class Executor(Protocol):
    """Where steps are computed: this process, several processes, or several machines."""

    depth: int  # how many handles may be in flight

    def load(self) -> LoadReport: ...

    def kv_bytes(self) -> KVBudget: ...

    def allocate(self, layout: KVLayout) -> None: ...

    def execute(self, plan: StepPlan) -> StepHandle: ...

    def close(self) -> None: ...
