"""Tables at any width: each number stands whole in the output, and nothing is cut with an ellipsis."""

import io
import json
import random
import re

import pytest
from typer.testing import CliRunner

from hexad.cli.columns import Column, number, parts, print_table

WIDTHS = [40, 60, 80, 120, None]
run = CliRunner()


def invoke(app, args, width):
    result = run.invoke(app, args, env={"COLUMNS": str(width) if width else ""})
    assert result.exit_code == 0, result.output
    assert "…" not in result.output
    return result.output


def test_random_tables_keep_their_numbers():
    from rich.console import Console

    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(50):
        columns = [Column("name", text=True)] + [Column(f"c{i}", text=rng.random() < 0.3) for i in range(rng.randrange(1, 9))]
        rows = [[str(rng.randrange(10 ** rng.randrange(1, 14))) for _ in columns] for _ in range(4)]
        width = rng.randrange(20, 130)
        out = io.StringIO()
        print_table(columns, rows, Console(file=out, width=width))
        lines = out.getvalue().splitlines()
        for row in rows:
            for column, cell in zip(columns, row, strict=True):
                assert column.text or re.search(rf"(?<!\d){cell}(?!\d)", out.getvalue()), (seed, width, cell)
        assert "…" not in out.getvalue(), seed
        if all(len(part) > 2 for part in parts(columns, rows, width)):
            assert max(map(len, lines)) <= width, seed


def test_columns_that_do_not_fit_follow_with_the_first_one():
    columns, rows = [Column("a", text=True), Column("b"), Column("c")], [["x", "1" * 12, "2" * 12]]
    assert parts(columns, rows, 80) == [[0, 1, 2]]
    assert parts(columns, rows, 30) == [[0, 1], [0, 2]]
    assert parts([*columns, Column("d")], [[*rows[0], "3" * 12]], 40, keys=2) == [[0, 1, 2], [0, 1, 3]]


@pytest.mark.parametrize("width", WIDTHS)
def test_plan(width):
    from hexad.cli.plan import app

    args = ["llama-3.1-8b", "--device", "H200", "--concurrency", "128", "--load", "W4"]
    made = json.loads(invoke(app, [*args, "--json"], width))
    text = invoke(app, args, width)
    for row in [made["prefill"], *made["decode"]]:
        assert all(f"{row[name]:.3f}" in text for name in ("ms", "weights_ms", "compute_ms", "kv_ms", "attention_ms"))
        assert f"{row['tok_s']:,.0f}" in text
    assert all(f"{row['sequences']:,}" in text and f"{row['decode_ms']:.2f}" in text for row in made["formats"])


@pytest.mark.parametrize("width", WIDTHS)
def test_doctor(width):
    from hexad.cli.doctor import app

    result = run.invoke(app, [], env={"COLUMNS": str(width) if width else ""})
    assert result.exit_code in (0, 1) and "instruction" in result.output and "…" not in result.output
    if width is None:
        assert len(result.output.splitlines()) == len({line.strip() for line in result.output.splitlines()})  # nothing folds


@pytest.mark.parametrize("width", WIDTHS)
def test_compare_and_table(width, tmp_path):
    from hexad.bench.cli import app

    for name, factor in (("a", 1), ("b", 2)):
        result = {"kind": "latency", "load": {"name": "W2"}, "model": "m", "format": "f", "device": {"name": "d"}, "partial": False,
                  "metrics": {"kv_footprint_bytes": 116_844_920_832 * factor,
                              "ttft_ms": {"8192": {"p50": 1234.5678 * factor}}}}  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    paths = [str(tmp_path / f"{name}.json") for name in "ab"]
    text = invoke(app, ["compare", *paths], width)
    assert all(value in text for value in ("116,844,920,832", "233,689,841,664", "1,234.6", "2,469.1", "2.000x"))
    assert "worse" in text and text.count("worse") == 1
    assert "| 1,234.6 |" in invoke(app, ["table", paths[0]], width)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_operators(width, monkeypatch, capsys):
    from hexad.bench import analysis

    monkeypatch.setenv("COLUMNS", str(width) if width else "")
    row = {"op": "decoder_stack_with_a_long_name", "provider": "native_avx512_amx", "calls_per_step": 1234.0, "ms_per_step": 12.345,
           "share_of_step": 0.987, "mb_per_step": 98765.4, "share_of_bound": 0.621, "binds": "bytes"}  # fmt: skip
    analysis._table(analysis._PROFILE, [row])
    text = capsys.readouterr().out
    assert all(value in text for value in ("1,234", "12.35", "0.987", "98,765", "0.621")) and "…" not in text


@pytest.mark.parametrize(
    ("value", "text"), [(3.0, "3"), (0.00012, "0.000120"), (12.3456, "12.346"), (1234.56, "1,234.6"), (1e11, "100,000,000,000")]
)
def test_numbers_are_whole(value, text):
    assert number(value) == text
