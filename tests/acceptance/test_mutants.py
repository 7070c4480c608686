"""Bugs planted on purpose are noticed by the suite; and the script that plants them notices when they are not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "mutants.py"


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(900)
def test_every_planted_bug_is_killed() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert done.stdout.count("killed") >= 5


def test_a_survivor_and_a_text_that_is_gone_are_failures(mutants: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    test = ("tests/orchestration/test_output_stop.py::test_an_earlier_start_is_waited_for",)
    harmless = mutants.Mutant("harmless", "hexad/orchestration/stop.py", "class StopMatcher:", "class StopMatcher:  # same", test)
    untested = mutants.Mutant("untested", "hexad/orchestration/stop.py", "class StopMatcher:", "class StopMatcher:  # same", ("none.py",))
    gone = mutants.Mutant("gone", "hexad/orchestration/stop.py", "no such text", "", test)
    for mutant, code in ((harmless, 1), (untested, 1), (gone, 2)):
        monkeypatch.setattr(mutants, "MUTANTS", (mutant,))
        assert mutants.main([]) == code, mutant.name
