import json

import pytest
from typer.testing import CliRunner

from hexad.bench import planning
from hexad.bench.facts import read_facts
from hexad.cli.plan import app
from hexad.common.errors import ConfigError
from hexad.hardware.registry import find_device
from hexad.models.served import check_quantization, weight_format_served

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
        (["llama-3.1-8b", "--device", "H200", "--concurrency", "0"], "Invalid value"),
        (["llama-3.1-8b", "--device", "H200", "--gpu-memory-utilization", "2"], "Invalid value"),
        (["llama-3.1-8b", "--device", "H200", "--efficiency", "0"], "Invalid value"),
        (["/nowhere/at/all", "--device", "H200"], "nowhere"),
    ],
)
def test_mistakes_exit_with_two_and_a_value_that_would_work(args, message):
    result = run.invoke(app, args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())  # typer's boxes fold


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


def served(*args):
    made = plan_of(*args)
    rows = {row["format"]: row for row in made["formats"]}
    assert all(row["served_note"] for row in rows.values())
    return made, rows


def test_the_plan_says_which_formats_are_served_there():
    _, gpu = served("llama-3.1-8b", "--device", "H200")
    assert {name for name, row in gpu.items() if row["served"]} == {"bfloat16", "float16", "float32"}
    assert gpu["int4_g32"]["served_note"] == "--quantization is for CPUs"
    assert gpu["int4_g32"]["fits"] and gpu["int4_g32"]["bytes_per_rank"] < gpu["bfloat16"]["bytes_per_rank"]  # marked, not hidden
    made, _ = served("llama-3-70b-fp8", "--device", "H200")
    assert not made["weights"]["served"] and made["weights"]["served_note"] == "checkpoints in it are not read yet"


@pytest.mark.parametrize("kind", ["cpu", "gpu", "npu"])
@pytest.mark.parametrize("name", ["int8", "int4_g32", "int4_g32_zp"])
def test_plans_and_the_loader_say_the_same_of_rounded_weights(kind, name):
    spec, _ = read_facts("llama-3.1-8b")
    promised = weight_format_served(spec, name, kind).served
    try:
        check_quantization(name, {"cpu": "cpu", "gpu": "cuda", "npu": "npu"}[kind])
    except ConfigError:
        assert not promised
    else:
        assert promised


def test_formats_of_other_places():
    spec, _ = read_facts("llama-3.1-8b")
    assert weight_format_served(spec, "q4_k+q6_k", "cpu").served and not weight_format_served(spec, "q4_k+q6_k", "gpu").served
    assert not weight_format_served(spec, "bfloat16", "npu").served
    assert not weight_format_served(spec, "int4-g32", "cpu").served
    assert weight_format_served(spec, "bfloat16", "gpu", devices=2).note == "models are not split over devices yet"
    mixture, _ = read_facts("qwen3-30b-a3b")
    assert weight_format_served(mixture, "bfloat16", "gpu").note == "the model is a mixture of experts: dense models are supported"


def test_human_output_says_why_a_format_is_not_served():
    text = " ".join(run.invoke(app, ["llama-3.1-8b", "--device", "H200"]).output.split())
    assert "not served there by this version: int8, int4_g32, int4_g32_zp: --quantization is for CPUs" in text
    text = " ".join(run.invoke(app, ["llama-3-70b-fp8", "--device", "L40S"]).output.split())
    assert "this version does not serve it there: checkpoints in it are not read yet" in text and "int4 (not served yet)" in text
    assert "devices that would: 2 (not served yet)" in text
