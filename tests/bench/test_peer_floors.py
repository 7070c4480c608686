"""The floors that measured engines were compared with, row by row: each must come out of config.json and the device registry alone.

The expected numbers were computed independently, by hand, from the formula in `hexad/bench/floors.py` for one H200.
"""

import pytest

from hexad.bench.facts import read_facts
from hexad.bench.floors import load_floor
from hexad.bench.loads import find_load
from hexad.hardware.registry import find_device
from hexad.models.costs import ModelCosts

H200 = find_device("H200")
B8, B70, AWQ, MOE = "llama-3.1-8b", "llama-3-70b-fp8", "llama-3-70b-awq", "qwen3-30b-a3b"

# model, weight format (None: its own), KV type, load, changes to the load, metric, expected
ROWS = [
    (B8, None, "auto", "W1", {}, "total_s", 20.9),
    (B8, None, "auto", "W2", {}, "tpot_ms", 3.36),
    (B8, None, "auto", "W3", {}, "ttft_ms.512", 10.6),
    (B8, None, "auto", "W3", {}, "ttft_ms.8192", 192.9),
    (B8, None, "auto", "W4", {}, "output_tok_s", 14_580),
    (B8, None, "auto", "W5", {}, "total_s.cold", 1.20),
    (B8, None, "auto", "W5", {}, "total_s.cached", 1.15),
    (B8, None, "auto", "W7", {}, "ms_per_step.8", 3.40),
    (B8, None, "auto", "W7", {}, "ms_per_step.256", 7.06),
    (B8, "fp8", "auto", "W1", {}, "total_s", 13.3),
    (B8, "fp8", "auto", "W2", {}, "tpot_ms", 1.80),
    (B8, "fp8", "auto", "W3", {}, "ttft_ms.512", 5.5),
    (B8, "fp8", "auto", "W3", {}, "ttft_ms.8192", 111.4),
    (B8, "fp8", "auto", "W4", {}, "output_tok_s", 23_900),
    (B8, "fp8", "auto", "W7", {}, "ms_per_step.8", 1.84),
    (B8, "fp8", "auto", "W7", {}, "ms_per_step.256", 4.52),
    (B70, None, "fp8", "W1", {}, "total_s", 86.0),
    (B70, None, "fp8", "W2", {}, "tpot_ms", 15.77),
    (B70, None, "fp8", "W3", {}, "ttft_ms.512", 53),
    (B70, None, "fp8", "W3", {}, "ttft_ms.8192", 969),
    (B70, None, "fp8", "W4", {}, "output_tok_s", 3_503),
    (AWQ, None, "auto", "W2", {}, "tpot_ms", 8.43),
    (AWQ, None, "auto", "W4", {}, "output_tok_s", 3_560),
    (AWQ, None, "auto", "W1", {"requests": 300}, "output_tok_s", 1_535),
    (MOE, None, "auto", "W2", {}, "tpot_ms", 1.36),
    (MOE, None, "auto", "W4", {}, "decode_step_ms", 13.5),
]


@pytest.mark.parametrize(
    ("model", "weight_format", "kv_dtype", "load", "changes", "metric", "expected"),
    ROWS,
    ids=[f"{r[0]}-{r[1] or 'own'}-{r[3]}-{r[5]}" for r in ROWS],
)
def test_floor_agrees_within_three_percent(model, weight_format, kv_dtype, load, changes, metric, expected):
    spec, stored = read_facts(model)
    floors = load_floor(ModelCosts(spec, weight_format or stored, kv_dtype), H200, find_load(load).scaled(**changes))
    value = floors
    for part in metric.split("."):
        value = value[part]
    assert value == pytest.approx(expected, rel=0.03)


def test_more_sequences_do_not_move_a_floor_that_arithmetic_binds():
    spec, stored = read_facts(B8)
    costs = ModelCosts(spec, stored)
    few, many = (load_floor(costs, H200, find_load("W1"), n)["total_s"] for n in (256, 512))
    assert few == pytest.approx(many, rel=0.001)  # at batch 256 the products, not the weights, take the time


def test_every_load_but_startup_has_a_floor_for_what_it_reports():
    spec, stored = read_facts("llama-3.2-1b")
    for name in ("W1", "W2", "W3", "W4", "W5", "W7", "W8", "W9"):
        load = find_load(name)
        floors = load_floor(ModelCosts(spec, stored), H200, load)
        wanted = {metric.split()[0] for metric in load.report} - {"goodput"}
        assert wanted <= set(floors), f"{name} reports {wanted}, floors are {set(floors)}"
    assert load_floor(ModelCosts(spec, stored), H200, find_load("W6")) == {}
