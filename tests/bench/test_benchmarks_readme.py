"""benchmarks/README.md names files that are there, commands that exist, and every file of results/."""

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import typer

FOLDER = Path(__file__).parents[2] / "benchmarks"
TEXT = (FOLDER / "README.md").read_text()
TABLE = re.findall(r"^\| (`.*?) \| (.*?) \|$", TEXT, re.MULTILINE)


def test_results_and_what_made_them():
    patterns = [pattern for files, _ in TABLE for pattern in re.findall(r"`(.+?)`", files)]
    files = [path.name for path in (FOLDER / "results").iterdir()]
    assert patterns and all(any(fnmatch(name, pattern) for name in files) for pattern in patterns)
    assert [name for name in files if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_scripts_are_there():
    named = re.findall(r"`((?:cpu|gpu)/[\w.]+|\w+\.(?:sh|py))", TEXT)
    assert len(named) >= 8 and [name for name in named if not (FOLDER / name).is_file()] == []


def test_commands_take_their_options():
    from hexad.bench.cli import app

    commands = typer.main.get_command(app).commands
    lines = re.findall(r"^hexad bench (.*)$", TEXT, re.MULTILINE)
    assert len(lines) == 9
    for line in lines:
        name, *arguments = shlex.split(line)
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert [word for word in arguments if word.startswith("-") and word not in known] == [], line
