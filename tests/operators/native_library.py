"""The native library with every instruction set, for tests: built once, then taken from the cache."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from hexad.operators.native import library
from hexad.operators.native.build import ALL, BuildError, cached_library


@functools.cache
def full_library():
    given = os.environ.get("HEXAD_NATIVE_LIBRARY")
    try:
        return library.Library(Path(given) if given else cached_library(ALL), "")
    except BuildError as error:
        return str(error)


@functools.cache
def isas() -> list[str]:
    found = full_library()
    return ["none"] if isinstance(found, str) else found.available()


def use(monkeypatch, isa: str, threads: int = 2):
    """Everything native runs in this instruction set until the test ends."""
    found = full_library()
    if isinstance(found, str):
        pytest.skip(f"no native library: {found}")
    monkeypatch.setattr(library, "probe", lambda: (found, ""))
    found.choose(isa)
    found.set_threads(threads)
    return found
