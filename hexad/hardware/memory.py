"""How a device's memory is shared between weights, working space and keys and values. Plain arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from hexad.common.errors import OutOfMemoryError

GIB = 2**30


@dataclass(frozen=True)
class MemoryBudget:
    """One device's memory, in bytes. `kv_bytes` is what remains for keys and values (negative: the rest does not fit)."""

    total_bytes: int
    utilization: float  # share of the total that may be used
    weight_bytes: int
    workspace_bytes: int  # activations, logits, graphs, the runtime's context

    @property
    def usable_bytes(self) -> int:
        return int(self.total_bytes * self.utilization)

    @property
    def kv_bytes(self) -> int:
        return self.usable_bytes - self.weight_bytes - self.workspace_bytes

    @property
    def fits(self) -> bool:
        """Weights and working space fit, with something left."""
        return self.kv_bytes > 0

    def blocks(self, page_bytes: int) -> int:
        """How many KV pages fit."""
        return max(self.kv_bytes, 0) // page_bytes

    def sequences(self, kv_bytes_per_sequence: int) -> int:
        """How many sequences of that many KV bytes fit."""
        return max(self.kv_bytes, 0) // max(kv_bytes_per_sequence, 1)

    def check(self) -> None:
        """Raises OutOfMemoryError with the sum when nothing is left for keys and values."""
        if not self.fits:
            raise OutOfMemoryError(
                f"weights take {self.weight_bytes / GIB:.2f} GiB and working space {self.workspace_bytes / GIB:.2f} GiB, but "
                f"{self.utilization:.0%} of the device's {self.total_bytes / GIB:.2f} GiB is {self.usable_bytes / GIB:.2f} GiB: "
                "use a smaller weight format, more devices (tensor parallelism) or a higher gpu_memory_utilization"
            )


def workspace_bytes(
    *, kind: str, hidden: int, intermediate: int, vocab_size: int, batched_tokens: int, sequences: int, activation_bytes: int = 2
) -> int:
    """An estimate of working space: activations of one step, float32 logits of the sampled rows, and the runtime's own context."""
    activations = batched_tokens * (4 * hidden + 3 * intermediate) * activation_bytes
    logits = sequences * vocab_size * (4 + activation_bytes)
    runtime = int(1.0 * GIB) if kind != "cpu" else int(0.3 * GIB)  # CUDA context, graphs and library workspaces; interpreter and torch
    return activations + logits + runtime
