"""Waiting OpenMP threads sleep soon, unless the user said otherwise."""

import subprocess
import sys

CODE = "import os; from hexad.common.openmp import calm_openmp; {before}print(calm_openmp(), os.environ.get('GOMP_SPINCOUNT'))"


def run(before: str = "", **environment: str) -> str:
    env = {"PATH": "/usr/bin:/bin", **environment}
    code = CODE.format(before=before)
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_spin_count_is_set_once_and_never_over_the_users() -> None:
    assert run() == "True 20000"
    assert run(GOMP_SPINCOUNT="7") == "True 7"
    assert run(OMP_WAIT_POLICY="active") == "True None"
    assert run(before="import sys; sys.modules['torch'] = None; ") == "False None"
