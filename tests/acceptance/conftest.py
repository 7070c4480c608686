"""Helpers of other areas that these tests build on."""

from __future__ import annotations

import sys
from pathlib import Path

for area in ("engine", "orchestration", "cli"):
    folder = str(Path(__file__).parents[1] / area)
    if folder not in sys.path:
        sys.path.append(folder)
