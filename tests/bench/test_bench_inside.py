"""Startup, kernels, profile and accuracy on a tiny random model."""

import json
import math
import os
import random

import pytest
from typer.testing import CliRunner

from hexad.bench import accuracy
from hexad.bench.cli import app
from hexad.bench.startup import disk_read_bytes_s, measure_startup
from hexad.common.errors import ConfigError, HexadError

run = CliRunner()
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 320, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
DUMMY = ["-o", "load_format=dummy", "-o", "device=cpu", "-o", "threads=1", "-o", "kv_cache_memory_bytes=8000000"]


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def test_kernels_times_every_provider_that_serves(tiny, tmp_path):
    path = tmp_path / "k.json"
    done = run.invoke(app, ["kernels", "--model", str(tiny), "--device", "cpu", "--batch", "2", "--context", "32", "--seconds", "0.01",
                            "--calibration-s", "0.05", "--threads", "1", "--quiet", "--json", str(path)])  # fmt: skip
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    rows = result["metrics"]["rows"]
    assert {"linear", "add_rms_norm", "gated_act", "rope_kv_write", "paged_attention", "best_token", "draw", "token_ranks"} <= {
        r["op"] for r in rows
    }
    assert {"decode 2 x 32", "prompt 32"} <= {r["label"] for r in rows} and all(r["us"] > 0 and r["share"] > 0 for r in rows)
    by_case = {}
    for row in rows:
        by_case.setdefault((row["op"], row["label"]), []).append(row["chosen"])
    assert all(sum(chosen) == 1 for chosen in by_case.values()) and result["partial"] is False


def test_profile_accounts_for_the_step(tiny, tmp_path):
    path = tmp_path / "p.json"
    done = run.invoke(app, ["profile", "--model", str(tiny), "--batch", "3", "--input-len", "8", "--steps", "6", "--by-layer", *DUMMY,
                            "-o", "dtype=float32", "--calibration-s", "0.05", "--quiet", "--json", str(path)])  # fmt: skip
    assert done.exit_code == 0, done.output
    measured = json.loads(path.read_text())["metrics"]["3"]
    assert measured["steps"] >= 6 and 0 < measured["operators_s"] <= measured["step_s"]
    rows = {row["op"]: row for row in measured["operators"]}
    attention = rows["paged_attention"]
    assert attention["calls_per_step"] == pytest.approx(2, rel=0.35)  # one a layer; a step may be cut at either end
    weights = 4 * (2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96) + 320 * 64)
    linear_mb = sum(row["mb_per_step"] for row in measured["operators"] if "linear" in row["op"])
    assert linear_mb == pytest.approx(weights / 1e6, rel=0.5)
    assert "floor" in measured["verdict"][0] and len(measured["verdict"]) >= 2


def test_verdict_names_the_floor_to_work_on():
    from hexad.bench.facts import read_facts
    from hexad.bench.verdict import verdict
    from hexad.hardware.registry import find_device
    from hexad.models.costs import ModelCosts

    spec, stored = read_facts("llama-3.1-8b")
    costs, device = ModelCosts(spec, stored), find_device("H200")
    row = {"op": "linear", "provider": "torch", "ms_per_step": 3.5, "share_of_step": 0.9, "share_of_bound": 0.95, "binds": "bytes"}

    def words(busy, share):
        measured = {"step_s": 4e-3, "device_busy_s": busy, "batch": 1, "context": 256.0}
        return " ".join(verdict([row | {"share_of_bound": share}], measured, costs, device))

    assert "fewer bits" in words(3.9e-3, 0.95)
    assert "a better kernel" in words(3.9e-3, 0.3) and "fewer bits" not in words(3.9e-3, 0.3)
    assert words(1e-3, 0.95).count("gaps: 75%") == 1 and "at the bound" not in words(1e-3, 0.95)
    assert "at the bound" in words(3.9e-3, 0.8) and "a better kernel" not in words(3.9e-3, 0.8)
    for share in (0.62, 0.79):  # neither far nor near: both
        said = words(3.9e-3, share)
        assert "at the bound" not in said and "a better kernel" in said and "fewer bits" in said and f"{share:.0%}" in said
    assert "gaps: 15%" in words(3.4e-3, 0.95)
    row["calls_per_step"] = 30.0
    assert "fusion" not in words(3.9e-3, 0.5) and "less than 1% of its bound" in words(3.9e-3, 0.005)
    assert "fusion" in words(3.9e-3, 0.005) and "a better kernel would" not in words(3.9e-3, 0.005)


def test_startup_separates_phases_and_caches(tiny):
    options = {"load_format": "dummy", "device": "cpu", "threads": 1, "kv_cache_memory_bytes": 8_000_000}
    metrics = measure_startup(tiny, options, warm_runs=1)
    for name in ("empty", "warm"):
        assert 0 < metrics["ready_s"][name] < metrics["first_token_s"][name]
        assert sum(metrics["phases_s"][name].values()) == pytest.approx(metrics["first_token_s"][name], abs=0.01)
        assert {"process", "imports", "read", "first token"} <= set(metrics["phases_s"][name])


def test_startup_says_why_it_failed(tmp_path):
    with pytest.raises(HexadError, match="gone"):
        measure_startup(tmp_path / "gone", {}, warm_runs=0)


def test_disk_rate_counts_the_bytes(tmp_path):
    (tmp_path / "w.gguf").write_bytes(os.urandom(2**20))
    assert disk_read_bytes_s([tmp_path / "w.gguf"]) > 1e6
    assert disk_read_bytes_s([]) is None


def positions_from(logits):
    """Positions of a [n, vocabulary] array of logits whose own token is 0."""
    found = []
    for row in logits:
        norm = math.log(sum(math.exp(x) for x in row))
        ordered = sorted(enumerate(row), key=lambda pair: -pair[1])[: accuracy.TOP]
        found.append(accuracy.Position(0, row[0] - norm, [(token, x - norm) for token, x in ordered]))
    return found


def test_coarse_kl_is_exact_for_small_vocabularies_and_a_lower_bound_for_large_ones():
    seed = random.randrange(2**32)
    print("seed", seed)
    generator = random.Random(seed)
    for size in (5, accuracy.TOP, 200):
        a, b = ([generator.gauss(0, 2) for _ in range(size)] for _ in range(2))
        (p,), (q,) = positions_from([a]), positions_from([b])
        norms = [math.log(sum(math.exp(x) for x in row)) for row in (a, b)]
        true = sum(math.exp(x - norms[0]) * ((x - norms[0]) - (y - norms[1])) for x, y in zip(a, b, strict=True))
        found = accuracy.coarse_kl(p, q)
        if size <= accuracy.TOP:
            assert found == pytest.approx(true, rel=1e-6, abs=1e-9)
        else:
            assert -1e-9 <= found <= true + 1e-9
        assert accuracy.coarse_kl(p, p) == pytest.approx(0.0, abs=1e-9)


def test_agreement_is_counted_with_and_without_ties():
    sure, tie, other = [5.0, 0.0, 0.0], [1.0, 0.95, 0.0], [0.95, 1.0, 0.0]
    found = accuracy.compare_positions([positions_from([sure, tie])], [positions_from([sure, other])])
    assert found["top1_agreement"] == 0.5 and found["top1_agreement_clear"] == 1.0 and found["kl_max"] < 0.01


def test_perplexity_of_a_uniform_model_is_its_vocabulary():
    assert accuracy.perplexity([positions_from([[0.0] * 7] * 5)]) == pytest.approx(7.0)


def test_windows_cover_the_text_once():
    assert accuracy.cut(range(10), 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert accuracy.cut(range(9), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # one token predicts nothing
    assert accuracy.cut(range(10), 4, 5) == [[0, 1, 2, 3]]
    with pytest.raises(ConfigError):
        accuracy.cut(range(10), 1)


def test_runs_are_saved_and_unlike_ones_refused(tmp_path):
    windows = [positions_from([[1.0, 2.0], [0.0, 1.0]])]
    accuracy.save_run(tmp_path / "s.json", accuracy.Saved("m", "f", [[1, 0, 0]], windows))
    saved = accuracy.load_run(tmp_path / "s.json")
    assert accuracy.compare_positions(saved.positions, windows)["top1_agreement"] == 1.0
    with pytest.raises(ConfigError, match="other tokens"):
        accuracy.compare_positions(saved.positions, [windows[0][:1]])
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="--save"):
        accuracy.load_run(tmp_path / "bad.json")


def test_corpus_is_prose_of_some_length(tmp_path):
    assert len(accuracy.corpus_text().split()) > 1_300
    (tmp_path / "t.txt").write_text("mine")
    assert accuracy.corpus_text(tmp_path / "t.txt") == "mine"


def test_transformers_reference_agrees_with_itself(tiny):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tiny))
    model.save_pretrained(tiny)
    scorer = accuracy.TransformersScorer(tiny)
    windows = [[5, 6, 7, 8, 9], [1, 2, 3]]
    scores = scorer.score(windows)
    assert [len(w) for w in scores] == [4, 2] and [p.token_id for p in scores[0]] == [6, 7, 8, 9]
    assert accuracy.perplexity(scores) == pytest.approx(320, rel=0.3)  # random weights know nothing
    assert accuracy.compare_positions(scores, scorer.score(windows))["kl_max"] < 1e-5


def test_device_times_go_to_the_operator_that_launched_the_kernel():
    """By the time of the launch, whoever launched it: kernels that torch's operators did not launch count as well."""
    from types import SimpleNamespace

    from hexad.bench.profile import OpTime, device_times

    def event(device, start, duration, correlation, name):
        values = {
            "device_type": f"DeviceType.{device}",
            "start_ns": start,
            "duration_ns": duration,
            "correlation_id": correlation,
            "name": name,
        }
        return SimpleNamespace(**{key: (lambda value=value: value) for key, value in values.items()})

    events = [
        event("CPU", 100, 50, 0, "hexad::linear/triton"),
        event("CPU", 110, 3, 0, "aten::mm"),
        event("CPU", 111, 1, 1, "cudaLaunchKernelExC"),
        event("CPU", 140, 1, 2, "cuLaunchKernelEx"),
        event("CUDA", 500, 40_000, 1, "gemm"),
        event("CUDA", 41_000, 2_000, 2, "finish_kernel"),
        event("CPU", 200, 20, 0, "hexad::rms_norm/triton"),
        event("CPU", 205, 1, 3, "cuLaunchKernelEx"),
        event("CUDA", 43_000, 1_000, 3, "rms_norm_kernel"),
        event("CUDA", 500, 44_000, 0, "hexad::linear/triton"),  # the range on the device, gaps included
        event("CPU", 300, 1, 4, "cudaLaunchKernel"),
        event("CUDA", 44_000, 7_000, 4, "index_kernel"),  # outside operators
        event("CUDA", 51_000, 3_000, 5, "Memcpy HtoD"),  # its launch was not seen
    ]
    times = {name: OpTime(*name.split("/")) for name in ("linear/triton", "rms_norm/triton")}
    profiler = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
    busy_s = device_times(profiler, times)
    assert times["linear/triton"].seconds == pytest.approx(42e-6) and times["rms_norm/triton"].seconds == pytest.approx(1e-6)
    assert busy_s == pytest.approx(53e-6)


def test_profile_and_kernels_are_drawn(tiny, tmp_path):
    pytest.importorskip("matplotlib")
    from hexad.bench.report import operator_shares

    path = tmp_path / "p.json"
    done = run.invoke(app, ["profile", "--model", str(tiny), "--batch", "2", "--input-len", "8", "--steps", "4", "--by-layer", *DUMMY,
                            "--calibration-s", "0.05", "--quiet", "--json", str(path)])  # fmt: skip
    assert done.exit_code == 0, done.output
    groups = operator_shares(json.loads(path.read_text()))
    assert list(groups) == ["batch 2"] and any("paged_attention" in label for label, _ in groups["batch 2"])
    row = {"op": "linear", "label": "qkv 1"}
    rows = [row | {"chosen": True, "share": 0.9}, row | {"chosen": False, "share": 0.2}]
    assert operator_shares({"kind": "kernels", "metrics": {"rows": rows}}) == {"linear": [("linear qkv 1", 0.9)]}
    done = run.invoke(app, ["report", str(path), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "p-share-of-bound.png").stat().st_size > 1000


def test_startup_command_checks_phases_and_disk(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HEXAD_NATIVE_ISA", "off")  # building it takes long, and the caches are empty
    path = tmp_path / "s.json"
    rest = ["--warm-runs", "0", "--calibration-s", "0.02", "--quiet", "--json", str(path)]
    done = run.invoke(app, ["startup", "--model", str(tiny), *DUMMY, *rest])
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    assert result["metrics"]["outside_s"]["empty"] >= result["metrics"]["first_token_s"]["empty"] > 0
    assert result["calibration"]["kind"] == "cpu" and result["flags"] == []


def test_phases_that_do_not_add_up_are_flagged():
    from hexad.bench.startup import check_phases, load_rates

    metrics = {"outside_s": {"empty": 10.0, "warm": 5.0}, "phases_s": {"empty": {"read": 4.0, "end": 5.9}, "warm": {"read": 4.0}}}
    assert check_phases(metrics) == ["warm: phases add up to 4.00 s, the clock outside says 5.00 s"]
    rates = load_rates(metrics, 8_000_000_000, 2.5e9)
    assert rates["load_bytes_s"] == 2e9 and rates["load_share_of_disk"] == pytest.approx(0.8)


def test_idle_time_is_told_by_launch():
    from types import SimpleNamespace

    from hexad.bench.spans import Span, device_spans
    from hexad.bench.trace import flags, idle, middle

    spans = [Span(0, 100, 1, "a"), Span(90, 150, 1, "b"), Span(160, 200, 1, "c"), Span(240, 300, 2, "a"), Span(250, 260, 3, "copy")]
    found = idle(reversed(spans))
    assert found["span_s"] == pytest.approx(300e-9) and found["busy_s"] == pytest.approx(250e-9)
    assert found["within_launches_s"] == pytest.approx(10e-9) and found["between_launches_s"] == pytest.approx(40e-9)
    assert found["longest_gap_us"] == pytest.approx(0.04) and found["launches"] == 3
    assert idle([])["span_s"] == 0.0 and middle([]) == []
    assert [s.start_ns for s in middle([Span(i * 10, i * 10 + 10, i, "k") for i in range(10)], 0.2)] == [20, 30, 40, 50, 60, 70, 80]

    def event(device, start, duration, name):
        call = {"device_type": f"DeviceType.{device}", "start_ns": start, "duration_ns": duration, "correlation_id": 7, "name": name}
        return SimpleNamespace(**{key: (lambda value=value: value) for key, value in call.items()})

    events = [
        event("CPU", 0, 5, "cudaGraphLaunch"),
        event("CUDA", 3, 4, "gemm"),
        event("CUDA", 0, 9, "hexad::linear"),
        event("CUDA", 8, 0, "mark"),
    ]
    profiler = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
    assert device_spans(profiler) == [Span(3, 7, 7, "gemm")]
    measured = {"batch": 256, "idle_between_launches_share": 0.04, "step_ms": 10.0, "step_ms_traced": 12.0, "launches": 9}
    assert "saw nothing" in flags(measured | {"launches": 0})[0]
    assert len(flags(measured)) == 2 and flags(measured | {"idle_between_launches_share": 0.02, "step_ms_traced": 11.0}) == []


@pytest.mark.parametrize("streams", [False, True])
def test_windows_of_steps(tiny, streams, monkeypatch):
    from hexad.bench import profile
    from hexad.bench.inprocess import InProcess

    monkeypatch.setenv("HEXAD_NATIVE_ISA", "off")
    calls = []
    face = InProcess(str(tiny), {"load_format": "dummy", "device": "cpu", "threads": 1, "kv_cache_memory_bytes": 8_000_000})
    try:
        run_window = profile.stream_window if streams else profile.decode_window
        measured = run_window(face, 3, 9, 8, lambda: calls.append("begin"), lambda: calls.append("end"))
    finally:
        face.close()
    assert calls == ["begin", "end"] and 8 <= measured["steps"] < 10 and measured["wall_s"] > 0 and measured["batch"] == 3


def test_events_of_the_profiler_have_what_a_trace_reads():
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(4).sum()
    events = list(profiler.profiler.kineto_results.events())
    assert events
    for event in events:
        for name in ("device_type", "start_ns", "duration_ns", "correlation_id", "name"):
            getattr(event, name)()


def test_trace_needs_a_gpu(tiny):
    done = run.invoke(app, ["profile", "--model", str(tiny), "--trace", *DUMMY])
    assert done.exit_code == 2 and "--trace" in done.output
