"""`hexad bench startup` (W6): from the start of a process to its first token, with empty and with warm caches of compiled kernels.

The child (`python -m hexad.bench.startup`) reads one job from stdin, builds an engine, makes one token and prints its moments. Caches
that the engine and its libraries write are pointed at a fresh folder; the model itself is fetched before.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hexad.common.errors import HexadError

CACHE_VARIABLES = (
    "HEXAD_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME",
)  # fmt: skip
PHASES_TOLERANCE = 0.03
_CHUNK = 16 * 2**20


def measure_startup(
    model: Path,
    options: dict[str, Any],
    *,
    warm_runs: int = 2,
    timeout_s: float = 600.0,
    keep: Callable[[dict[str, Any]], None] = lambda _metrics: None,
) -> dict[str, Any]:
    """Metrics of W6: `{"ready_s": {"empty", "warm"}, "first_token_s": {...}, "phases_s": {...}}`; warm is the median of `warm_runs`.

    `outside_s` is the first token by the clock of the process that started it; phases must add up to it. `keep` hears of the metrics after
    each start.

    Raises:
        HexadError: the engine did not start (its last line is the message).
    """
    with tempfile.TemporaryDirectory(prefix="hexad-startup-") as folder:
        environment = dict(os.environ)
        for name in CACHE_VARIABLES:
            environment[name] = str(Path(folder) / name.lower())
        runs: list[dict[str, Any]] = []
        for _ in range(1 + warm_runs):
            runs.append(run_child(model, options, environment, timeout_s))
            keep(_summary(runs))
    return _summary(runs)


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The first start and the median of the others."""
    warm = sorted(runs[1:], key=lambda run: float(run["first_token_s"]))
    found: dict[str, Any] = {"ready_s": {}, "first_token_s": {}, "outside_s": {}, "phases_s": {}}
    for name, run in (("empty", runs[0]), *([("warm", warm[len(warm) // 2])] if warm else [])):
        for key in found:
            found[key][name] = run[key]
    return found


def run_child(model: Path, options: dict[str, Any], environment: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """One start in a process of its own; seconds count from before it is spawned."""
    start = time.time()
    job = json.dumps({"model": str(model), "options": options})
    command = [sys.executable, "-m", "hexad.bench.startup"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        killer = threading.Timer(timeout_s, process.kill)
        killer.start()
        try:
            line, outside_s = _last_line(process, job, start)
        except BaseException:  # an interrupt: nothing may go on behind our back
            process.kill()
            process.wait()
            raise
        finally:
            killer.cancel()
        if process.returncode or not line:
            errors.seek(0)
            raise HexadError(f"the engine did not start: {(errors.read().strip().splitlines() or ['no message'])[-1]}")
    moments = [("process", start), *json.loads(line)]
    ends = dict(moments)
    phases: dict[str, float] = {}
    for (name, begin), (_, end) in itertools.pairwise(moments):
        phases[name] = phases.get(name, 0.0) + end - begin
    return {
        "ready_s": ends["first token"] - start,
        "first_token_s": ends["end"] - start,
        "outside_s": outside_s,
        "phases_s": phases,
    }


def _last_line(process: subprocess.Popen[str], job: str, start: float) -> tuple[str, float]:
    """(the last line that the child printed, seconds from `start` to its arrival); waits for its end."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(job)
        process.stdin.close()
    last, arrived = "", 0.0
    for line in process.stdout:
        last, arrived = line.strip() or last, time.time() - start
    process.stdout.close()
    process.wait()
    return last, arrived


def check_phases(metrics: dict[str, Any]) -> list[str]:
    """A flag for each run whose phases do not add up to the clock outside."""
    words = []
    for name, outside in metrics["outside_s"].items():
        total = sum(metrics["phases_s"][name].values())
        if abs(total - outside) > PHASES_TOLERANCE * outside:
            words.append(f"{name}: phases add up to {total:.2f} s, the clock outside says {outside:.2f} s")
    return words


def load_rates(metrics: dict[str, Any], file_bytes: int, disk_bytes_s: float) -> dict[str, Any]:
    """How fast the weights were read where they were not in memory (the first start), beside what the disk delivers."""
    rate = file_bytes / max(metrics["phases_s"]["empty"]["read"], 1e-9)
    return {
        "weight_file_bytes": file_bytes,
        "disk_read_bytes_s": disk_bytes_s,
        "load_bytes_s": rate,
        "load_share_of_disk": rate / disk_bytes_s,
    }


def weight_files(model: Path) -> list[Path]:
    """The files that hold a model's weights."""
    return [model] if model.is_file() else sorted((*model.glob("*.safetensors"), *model.glob("*.gguf")))


def disk_read_bytes_s(files: Iterable[Path]) -> float | None:
    """How fast this disk delivers these files when they are not in memory; leaves them out of memory. None without files."""
    files = list(files)
    drop_from_memory(files)
    total, start = 0, time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                total += len(chunk)
    seconds = time.perf_counter() - start
    drop_from_memory(files)
    return total / seconds if total else None


def drop_from_memory(files: Iterable[Path]) -> None:
    """Ask the kernel to forget cached pages of files (a hint; needs no rights)."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def child(job: dict[str, Any]) -> None:
    """Build an engine, generate one token, print the phases and the moment at which each began."""
    moments = [("imports", time.time())]

    def report(phase: str, _detail: str) -> None:
        moments.append((phase, time.time()))

    from hexad import compose
    from hexad.common.params import SamplingParams
    from hexad.engine.plan import TokenSegment
    from hexad.llm import config_from_options
    from hexad.orchestration.messages import Submit

    report("compose", "")
    engine = compose.build(config_from_options({"model": job["model"], **job["options"]}), report)
    report("first token", "")
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.core.submit(Submit(request_id="first", prompt=(TokenSegment(tuple(range(100, 116))),), params=params))
    while engine.core.has_work():
        for output in engine.core.step().get(b"", ()):
            if output.error:
                raise HexadError(output.error)
    report("end", "")
    print(json.dumps(moments), flush=True)
    engine.core.close()


if __name__ == "__main__":
    child(json.load(sys.stdin))
