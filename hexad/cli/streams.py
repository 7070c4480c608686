"""Standard streams that may be closed, full, or read by nobody: a server does not end for that."""

from __future__ import annotations

import os
import sys

STDOUT = 1


def open_standard_streams() -> None:
    """Point those of the three that are closed to nothing: the next file opened would take the place, and libraries rely on the numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def say(text: str) -> None:
    """Print a line at once. If nobody can read it, this and all that follows goes nowhere."""
    try:
        print(text, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, STDOUT)
        os.close(nowhere)
        sys.stdout.flush()
