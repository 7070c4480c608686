"""Numbers as people write them: 32k, 4GiB."""

from __future__ import annotations

import re

from hexad.common.errors import ConfigError

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)[bB]?")
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str, key: str) -> int:
    """An integer: `k m g t` are powers of 1000, `K M G T` and `Ki Mi Gi Ti` of 1024; a final B is allowed (and makes K a 1000: 4GB).

    Raises:
        ConfigError: anything else; names `key`.
    """
    match = _NUMBER.fullmatch(text.strip().replace("_", ""))
    if match is None:
        raise ConfigError(f"{key} = {text!r}: use a whole number, or one with a unit such as 32k, 4GiB")
    number, unit, binary = match.groups()
    decimal = not binary and (unit.islower() or text.strip()[-1:] in "bB")
    value = float(number) * (1000 if decimal else 1024) ** _POWER[unit.lower()]
    if value != int(value):
        raise ConfigError(f"{key} = {text!r}: that is {value:g}, not a whole number")
    return int(value)


def show_bytes(count: float) -> str:
    """1.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
