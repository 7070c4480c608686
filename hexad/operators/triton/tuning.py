"""Which kernel serves a product of M rows with a weight [out, in]: a shipped table by device and shape, and a rule for what it lacks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

CAPABILITIES = {"NVIDIA H200": 90}  # of the cards in the table
BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # rows; above the last the library's GEMM serves


@dataclass(frozen=True)
class Choice:
    """One kernel and its tiles. `kind` "library" has none."""

    kind: str  # library | gemv | warp | skinny | stream
    block_n: int = 0
    block_k: int = 0
    warps: int = 4
    stages: int = 1
    block_m: int = 0
    split: int = 1  # stream: programs that share the inputs
    prefetch: int = 0  # columns asked for before the predecessor is done


LIBRARY = Choice("library")


@cache
def table() -> dict[str, dict[str, dict[str, list]]]:
    """device name -> "op,out,in" -> rows -> fields of Choice."""
    text = files("hexad.operators.triton").joinpath("tuning.json").read_text()
    loaded: dict[str, dict[str, dict[str, list]]] = json.loads(text)
    return loaded


def tuned_cards(capability: int) -> list[str]:
    """Names of the cards of one compute capability that the table has."""
    return [name for name in table() if CAPABILITIES[name] == capability]


def bucket(rows: int) -> int | None:
    """The smallest bucket that holds `rows`, None above the last."""
    return next((size for size in BUCKETS if size >= rows), None)


def choose(device: str, op: str, out_features: int, in_features: int, rows: int, *, copies: bool) -> Choice:
    """The kernel for one bucket of rows: from the table, else by rule. `copies`: the card has the bulk tensor copy engine."""
    entry = table().get(device, {}).get(f"{op},{out_features},{in_features}", {}).get(str(rows))
    return Choice(*entry) if entry is not None else rule(op, out_features, in_features, rows, copies=copies)


def rule(op: str, out_features: int, in_features: int, rows: int, *, copies: bool) -> Choice:
    """What held for the shapes that were measured. Own kernels start while their predecessor ends, which the library's do not."""
    width = out_features // 2 if op == "gated_linear" else out_features
    if rows == 1:
        return Choice("gemv", 2, 2048, 4)
    if not copies or width % 128 or in_features % 256:
        return LIBRARY
    if rows > 16:
        return Choice("stream", 64, 128, 4, 4, rows, 1, 1024) if 48 * 64 <= width <= 65536 else LIBRARY
    if width <= 6144:
        return Choice("skinny", 32 if width > 2048 else 16, 256, 4, 6, 16, prefetch=2048)
    return Choice("stream", 128, 128, 4, 3, 16, 1, 512)
