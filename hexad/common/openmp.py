"""How long OpenMP threads spin before they sleep. Read by the runtime when it is loaded: to be set before torch is imported. No torch."""

from __future__ import annotations

import os
import sys

SPIN_COUNT = "20000"  # some tens of microseconds: longer than the gaps between operators of a step


def calm_openmp() -> bool:
    """Let waiting threads sleep after a short spin, unless the environment says otherwise; False if torch is loaded already.

    The default spins for milliseconds: on a machine that has other work, two threads then run many times slower than one.
    """
    if "torch" in sys.modules:
        return False
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    return True
