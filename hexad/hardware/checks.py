"""What a machine needs to serve models, checked: each finding has a status and, when something is missing, the command that mends it.

Package versions come from their metadata; torch is imported only by `check_torch`, in a child process, so that a broken installation is
a finding and not a crash.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hexad.hardware.machine import Machine
from hexad.hardware.memory import GIB

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """One line of `hexad doctor`."""

    name: str
    status: str  # ok | warn (works, but slower or without a feature) | fail (will not work)
    detail: str
    fix: str | None = None  # a command or a step


def run_checks(machine: Machine) -> list[Finding]:
    """Every check, in the order in which problems should be solved."""
    return [
        _python(),
        *_packages(),
        *check_torch(machine),
        _instruction_sets(machine),
        _compiler(),
        _quota(machine),
        _memory(machine),
        _shared_memory(),
        _open_files(),
        *(_writable(name, path) for name, path in cache_folders().items()),
    ]


def cache_folders() -> dict[str, Path]:
    """Folders that Hexad and its libraries write compiled kernels and weights to."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return {
        "cache": Path(os.environ.get("HEXAD_CACHE", home / "hexad")),
        "triton cache": Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")),
        "temporary files": Path(tempfile.gettempdir()),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", OK, version)


def _packages() -> list[Finding]:
    found = []
    for package in ("torch", "numpy", "safetensors", "gguf", "tokenizers", "jinja2", "fastapi", "uvicorn", "msgspec", "pyzmq"):
        version = _version(package)
        if version is None:
            found.append(Finding(package, FAIL, "not installed", f"pip install {package}"))
    if not found:
        found.append(Finding("required packages", OK, "all installed"))
    optional = {
        "huggingface_hub": ("models from the hub (hf:)", "pip install 'hexad[hub]'"),
        "matplotlib": ("plots of `hexad bench report`", "pip install 'hexad[bench]'"),
    }
    for package, (use, command) in optional.items():
        version = _version(package)
        found.append(Finding(package, OK, version) if version else Finding(package, WARN, f"not installed: no {use}", command))
    return found


_TORCH_PROBE = (
    "import torch; p = torch.cuda.is_available();"
    "print(torch.__version__, torch.version.cuda or '-', int(p), torch.cuda.get_device_capability() if p else '-', sep='|')"
)


def check_torch(machine: Machine) -> list[Finding]:
    """Does torch import, and does its CUDA build fit the driver?"""
    try:
        run = subprocess.run([sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Finding("torch", FAIL, f"importing it failed: {error}", "pip install --force-reinstall torch")]
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        return [Finding("torch", FAIL, f"importing it failed: {last}", "pip install --force-reinstall torch")]
    version, cuda, available, capability = run.stdout.strip().splitlines()[-1].split("|")
    findings = [Finding("torch", OK, f"{version}, CUDA build {cuda}")]
    if machine.gpus:
        findings.append(_cuda(machine, cuda, available == "1", capability))
        findings.append(_triton())
    return findings


def _cuda(machine: Machine, cuda: str, available: bool, capability: str) -> Finding:
    driver = f"driver {machine.driver_version} (CUDA up to {machine.driver_cuda})"
    if cuda == "-":
        return Finding(
            "cuda",
            FAIL,
            f"{len(machine.gpus)} GPUs, but torch is a CPU build",
            "reinstall torch with the CUDA build pytorch.org names",
        )
    if not available:
        fix = f"install a torch built for CUDA {machine.driver_cuda} or older, or a newer driver"
        return Finding("cuda", FAIL, f"torch built for CUDA {cuda} does not run with {driver}", fix)
    return Finding("cuda", OK, f"{driver}, torch built for {cuda}, compute capability {capability}")


def _triton() -> Finding:
    version = _version("triton")
    return (
        Finding("triton", OK, version)
        if version
        else Finding("triton", WARN, "not installed: GPU kernels fall back to torch", "pip install triton")
    )


def _instruction_sets(machine: Machine) -> Finding:
    sets = machine.processor.instruction_sets
    if machine.processor.architecture in ("x86_64", "AMD64") and "avx2" not in sets:
        return Finding("instruction sets", WARN, "no AVX2: the CPU path is slow", "use a newer machine")
    return Finding("instruction sets", OK, ", ".join(sets) or "unknown")


def _compiler() -> Finding:
    found = next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None)
    if found:
        return Finding("c++ compiler", OK, found)
    return Finding("c++ compiler", WARN, "none found: CPU kernels that are built on the spot fall back to torch", "apt-get install g++")


def _quota(machine: Machine) -> Finding:
    processor = machine.processor
    if processor.quota_cores and processor.quota_cores < (processor.cores_physical or 1) and not os.environ.get("OMP_NUM_THREADS"):
        detail = f"the container may use {processor.quota_cores:.1f} of the machine's processors, libraries start one thread for each"
        return Finding("cpu quota", WARN, detail, f"export OMP_NUM_THREADS={max(1, int(processor.quota_cores))}")
    return Finding("cpu quota", OK, f"{processor.cores} cores usable")


def _memory(machine: Machine) -> Finding:
    free = machine.processor.memory_available_bytes
    detail = f"{free / GIB:.1f} of {machine.processor.memory_bytes / GIB:.1f} GiB free"
    gpus = "".join(
        f"; GPU {g.index} {g.name}: {g.memory_free_bytes / GIB:.1f} of {g.memory_bytes / GIB:.1f} GiB free" for g in machine.gpus
    )
    low = free < GIB or any(g.memory_free_bytes < g.memory_bytes // 2 for g in machine.gpus)
    fix = "stop other programs, or lower --gpu-memory-utilization" if low else None
    return Finding("memory", WARN if low else OK, detail + gpus, fix)


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("shared memory", OK, "no /dev/shm on this system")
    size = shutil.disk_usage(path).total
    if size < GIB:
        return Finding(
            "shared memory",
            WARN,
            f"/dev/shm has {size / 2**20:.0f} MiB: several GPUs need more",
            "docker run --shm-size=8g (or --ipc=host)",
        )
    return Finding("shared memory", OK, f"/dev/shm {size / GIB:.1f} GiB")


def _open_files() -> Finding:
    try:
        import resource
    except ImportError:
        return Finding("open files", OK, "no limit on this system")
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < soft < 4096:
        return Finding("open files", WARN, f"limit {soft}: each stream takes one", "ulimit -n 65536")
    return Finding("open files", OK, f"limit {soft}")


def _writable(name: str, path: Path) -> Finding:
    existing = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    if not os.access(existing, os.W_OK):
        variable = {"cache": "HEXAD_CACHE", "triton cache": "TRITON_CACHE_DIR"}.get(name, "TMPDIR")
        return Finding(name, FAIL, f"{path} cannot be written", f"export {variable}=/a/writable/folder")
    free = shutil.disk_usage(existing).free
    if free < 2 * GIB:
        return Finding(name, WARN, f"{path}: {free / GIB:.1f} GiB free", "free some space, or move it with its environment variable")
    return Finding(name, OK, f"{path}: {free / GIB:.0f} GiB free")
