import json

import pytest
from typer.testing import CliRunner

from hexad.bench import planning
from hexad.bench.facts import read_facts
from hexad.cli.plan import app
from hexad.common.errors import ConfigError
from hexad.hardware.registry import find_device

run = CliRunner()


def plan_of(*args):
    result = run.invoke(app, [*args, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_plan_says_what_fits_and_what_binds():
    made = plan_of("llama-3.1-8b", "--device", "H200", "--context", "8192")
    assert made["weights"]["bytes"] == 16_060_522_496 and made["kv"]["bytes_per_token"] == 131_072
    assert made["fits"] and made["sequences"]["fit"] == made["memory"]["kv_bytes"] // (8192 * 131_072)
    single, batch = made["decode"]
    assert single["binds"] == "weights" and batch["binds"] == "kv" and made["prefill"]["binds"] == "compute"
    assert made["device"]["read_bytes_s"]["source"]


def test_plan_offers_what_would_fit():
    made = plan_of("llama-3-70b-fp8", "--device", "L40S", "--quantization", "bfloat16")
    assert not made["fits"] and made["sequences"]["fit"] == 0
    fitting = {row["format"] for row in made["formats"] if row["fits"]}
    assert "int4" in fitting and "bfloat16" not in fitting
    assert made["tp_that_fits"] == 4  # 141 GB of weights on 48 GB cards


def test_tensor_parallel_makes_room():
    made = plan_of("llama-3-70b-fp8", "--device", "L40S", "-tp", "4")
    assert made["fits"] and made["weights"]["bytes_per_rank"] * 4 == pytest.approx(made["weights"]["bytes"])
    assert made["decode"][0]["link_ms"] > 0


def test_replicas_for_a_target_load():
    slow = plan_of("llama-3.1-8b", "--device", "H200", "--target-load", "20:512:256", "--efficiency", "1")["replicas"]
    fast = plan_of("llama-3.1-8b", "--device", "H200", "--target-load", "200:512:256", "--efficiency", "0.5")["replicas"]
    # 1,000 such requests take 20.9 s at the floor: 47.8 a second
    assert slow["requests_s_per_replica"] == pytest.approx(47.8, rel=0.02) and slow["needed"] == 1
    assert fast["needed"] == 9 and fast["needed_at_floor"] == 5


def test_against_a_result(tmp_path):
    result = {
        "load": {"name": "W2", "requests": 1, "input_tokens": [128], "output_tokens": 256},
        "metrics": {"tpot_ms": 4.89, "ttft_ms": 12.4},
    }
    path = tmp_path / "r.json"
    path.write_text(json.dumps(result))
    rows = {row["metric"]: row for row in plan_of("llama-3.1-8b", "--device", "H200", "--against", str(path))["against"]}
    assert rows["tpot_ms"]["share_of_floor"] == pytest.approx(0.69, abs=0.01)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["llama-3.1-8b", "--device", "H201"], "H200"),
        (["llama-3.1-8b", "--device", "H200", "-tp", "5"], "attention heads"),
        (["llama-3.1-8b", "--device", "H200", "--context", "999999"], "131,072"),
        (["llama-3.1-8b", "--device", "H200", "--target-load", "many"], "12.5:512:256"),
        (["llama-3.1-8b", "--device", "H200", "--quantization", "int5"], "int4"),
        (["llama-3.1-8b", "--device", "H200", "--load", "W99"], "W1"),
        (["/nowhere/at/all", "--device", "H200"], "nowhere"),
    ],
)
def test_mistakes_exit_with_two_and_a_value_that_would_work(args, message):
    result = run.invoke(app, args)
    assert result.exit_code == 2
    assert message in result.output


def test_human_output_names_the_limits():
    result = run.invoke(app, ["llama-3.1-8b", "--device", "H200", "--load", "W4", "--target-load", "5:128:128"])
    assert result.exit_code == 0
    assert "replicas: 1" in result.output and "floor of W4" in result.output


def test_more_context_never_fits_more_sequences():
    spec, stored = read_facts("llama-3.1-8b")
    device = find_device("A100")
    fits = [
        planning.make_plan(planning.PlanRequest(spec, device, context=c, stored_format=stored))["sequences"]["fit"]
        for c in (512, 4096, 65536)
    ]
    assert fits == sorted(fits, reverse=True) and fits[-1] >= 1


def test_bad_target_is_refused():
    with pytest.raises(ConfigError, match="above zero"):
        planning.Target.parse("0:1:1")
