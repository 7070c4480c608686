"""docs/performance.md shows what the saved files say, and its floors are those that the code computes."""

import json
import re
from pathlib import Path

import pytest

from hexad.bench.facts import read_facts
from hexad.bench.floors import load_floor
from hexad.bench.loads import find_load
from hexad.bench.results import is_result
from hexad.bench.tables import BEGIN, END, insert, markdown
from hexad.common.errors import ConfigError
from hexad.hardware.registry import find_device
from hexad.models.costs import ModelCosts

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "performance.md").read_text()
SHAPES = {"Llama-3.1-8B": "llama-3.1-8b", "Qwen3-30B-A3B": "qwen3-30b-a3b"}
FORMATS = {"bf16": None, "fp8 W8A8": "fp8", "fp8 W8A8, KV fp8": "fp8", "int4 g128": "int4"}


def saved_results():
    found = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if is_result(result):
            found[path.stem] = result
    return found


def test_results_table_is_made_from_the_saved_files():
    shown = TEXT.partition(BEGIN)[2].partition(END)[0].strip()
    results = saved_results()
    assert shown == (markdown(results) if results else "")


def test_floor_table_is_what_the_code_computes():
    number = r"([\d.,]+)"
    cells = [r"([\w.-]+)", r"([\w ,]+)", number, number, f"{number} / {number}", number, f"{number} / {number}"]
    rows = re.findall(r"^\| " + r" \| ".join(cells) + r" \|$", TEXT, re.MULTILINE)
    assert len(rows) == 5
    for model, form, *shown in rows:
        shape = SHAPES.get(model, "llama-3-70b-awq" if form == "int4 g128" else "llama-3-70b-fp8")
        spec, stored = read_facts(shape)
        costs = ModelCosts(spec, FORMATS[form] or stored, "fp8" if "KV" in form else "auto")
        floors = {name: load_floor(costs, find_device("H200"), find_load(name)) for name in ("W1", "W2", "W3", "W4", "W7")}
        computed = [
            floors["W1"]["total_s"], floors["W2"]["tpot_ms"], floors["W3"]["ttft_ms"]["512"], floors["W3"]["ttft_ms"]["8192"],
            floors["W4"]["output_tok_s"], floors["W7"]["ms_per_step"]["8"], floors["W7"]["ms_per_step"]["256"],
        ]  # fmt: skip
        assert [float(s.replace(",", "")) for s in shown] == [pytest.approx(value, rel=0.006) for value in computed], model


def test_every_bench_command_is_documented():
    import typer

    from hexad.bench.cli import app

    for name in typer.main.get_command(app).commands:
        assert f"hexad bench {name}" in TEXT, name


def test_a_document_without_marks_is_refused():
    assert insert(f"a {BEGIN} old {END} b", "new") == f"a {BEGIN}\nnew\n{END} b"
    with pytest.raises(ConfigError, match="marks"):
        insert("nothing", "new")
