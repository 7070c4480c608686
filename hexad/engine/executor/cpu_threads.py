"""The threads that compute on a CPU: how many, and on which cores."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hexad.hardware.cores import pin_this_thread
from hexad.operators.native.library import probe

_PARALLEL = 2**20  # elements that torch divides among its threads


def start_threads(threads: int, cores: Sequence[int]) -> None:
    """Call on the thread that will compute. `cores`: one for each thread, or none.

    The native pool's threads take a core each, this thread the first. Torch's share all of them: they inherit what this thread may use
    when they start, which is why they start before it keeps to one core.
    """
    torch.set_num_threads(threads)
    if not cores:
        return
    library, _ = probe()
    if library is not None:
        library.set_cores(cores)
    pin_this_thread(cores)
    torch.ones(_PARALLEL).add_(1)
    pin_this_thread(cores[:1])
