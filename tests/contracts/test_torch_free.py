"""What DESIGN marks "no torch" imports without it, in a fresh process, and fast (docs/architecture.md, "Floors")."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hexad

ROOT = Path(hexad.__file__).parent
FREE_PACKAGES = ["common", "orchestration", "application", "cli", "engine.speculative"]
FREE_MODULES = [
    "hexad",
    "hexad.engine.plan",
    "hexad.engine.executor.seam",
    "hexad.engine.executor.fake",
    "hexad.models.spec",
    "hexad.models.catalog",
    "hexad.models.sources",
    "hexad.models.tokenizer",
    "hexad.models.template",
    "hexad.hardware.registry",
    "hexad.hardware.roofline",
    "hexad.hardware.memory",
    "hexad.operators.registry",
    "hexad.compose",
    "hexad.llm",
]
CHECK = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n    assert 'torch' not in sys.modules, name\n"


def modules_of(package: str) -> list[str]:
    """The package itself and everything below it."""
    folder = ROOT.joinpath(*package.split("."))
    names = [m.name for m in pkgutil.walk_packages([str(folder)], f"hexad.{package}.")]
    return [f"hexad.{package}", *names]


def import_fresh(names: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", CHECK, *names], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", FREE_PACKAGES)
def test_package_imports_no_torch(package: str) -> None:
    import_fresh(modules_of(package))


@pytest.mark.parametrize("module", FREE_MODULES)
def test_module_imports_no_torch(module: str) -> None:
    import_fresh([module])


def test_inner_init_files_are_empty() -> None:
    full = [p for p in ROOT.rglob("__init__.py") if p != ROOT / "__init__.py" and p.read_text().strip()]
    assert not full, full


def test_import_hexad_loads_nothing_heavy() -> None:
    heavy = "import hexad, sys; bad = {'torch', 'numpy', 'pydantic', 'fastapi', 'tokenizers'} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", heavy], check=True, timeout=60)
