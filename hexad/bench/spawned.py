"""A `hexad serve` process of one's own, for measuring HTTP and the engine in this process in one sitting."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from hexad.bench.standin import write_tokenizer
from hexad.common.errors import HexadError


class SpawnedServer:
    """Starts on a free port, is ready when its block begins, and is stopped when it ends."""

    def __init__(self, model: str, options: Mapping[str, Any], vocab_size: int | None = None, timeout_s: float = 600.0) -> None:
        """`vocab_size`: the model has no tokenizer, give the server one for that many ids."""
        self._model, self._options, self._vocab_size, self._timeout_s = model, options, vocab_size, timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="hexad-bench-")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the server runs)

    def __enter__(self) -> SpawnedServer:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable,
            "-m",
            "hexad",
            "serve",
            self._model,
            "--port",
            str(port),
            "--log-level",
            "warning",
            *flags(self._options),
        ]
        if self._vocab_size is not None:
            write_tokenizer(Path(self._folder.name), self._vocab_size)
            command += ["--tokenizer", self._folder.name]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait(self) -> None:
        end = time.monotonic() + self._timeout_s
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health/ready", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        raise HexadError(f"the server did not start: {lines[-1] if lines else f'exit code {self._process.poll()}'}")

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()
        self._folder.cleanup()


def flags(options: Mapping[str, Any]) -> list[str]:
    """Engine options as flags of `hexad serve`."""
    found = []
    for key, value in options.items():
        name = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            found.append(name if value else name.replace("--", "--no-", 1))
        elif value is not None:
            found += [name, str(value)]
    return found
