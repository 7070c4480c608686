"""Where files lie that can be made or fetched again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """HEXAD_CACHE, or ~/.cache/hexad. It need not exist."""
    return Path(os.environ.get("HEXAD_CACHE") or Path.home() / ".cache" / "hexad").expanduser()
