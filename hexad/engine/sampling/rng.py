"""Counter-based randomness: a pure function of (seed, choice, position, purpose), so it depends neither on the batch nor on the past.

The host mixes seed, choice and purpose into a 64-bit key, once per request. A draw is splitmix64's output at `key + position * GOLDEN`
(Steele, Lea, Flood 2014): seventeen element-wise integer operations on the device, exact and equal on every device. A Philox block would
cost a hundred kernel launches for the same purpose.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a random number is for: two purposes at one position never share one."""

    DRAW = 0  # the token itself
    ACCEPT = 1  # whether a draft token stands
    RESIDUAL = 2  # the token drawn in place of a rejected draft


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def mix(value: int) -> int:
    """splitmix64's finaliser on an unsigned 64-bit integer."""
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def row_key(seed: int, choice: int, purpose: Purpose = Purpose.DRAW) -> int:
    """The key of one choice and purpose, as a signed 64-bit integer. `seed` may be any integer; it is taken modulo 2^64."""
    key = mix((seed + _GOLDEN) & _MASK)
    key = mix((key + (choice + 1) * _GOLDEN) & _MASK)
    return _signed(mix((key + (purpose + 1) * _GOLDEN) & _MASK))


def bits(keys: Tensor, positions: Tensor) -> Tensor:
    """64 random bits for each (key, position): [R] int64."""
    z = torch.add(keys, positions, alpha=_signed(_GOLDEN))
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _signed(_MIX_1)  # the masks turn arithmetic shifts into logical ones
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _signed(_MIX_2)
    return z ^ ((z >> 31) & (2**33 - 1))


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) with 53 random bits for each (key, position): [R] float64."""
    return ((bits(keys, positions) >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53
