"""The commands on the simulated device: files, partial results, flags, comparison, plots."""

import json
import subprocess

import pytest
from typer.testing import CliRunner

import hexad
from hexad.bench import results, session
from hexad.bench.cli import app, engine_options
from hexad.bench.compare import differences, ratios
from hexad.bench.facts import read_facts
from hexad.bench.loads import find_load
from hexad.bench.runs import Options
from hexad.common.errors import ConfigError
from hexad.models.costs import ModelCosts

run = CliRunner()
FAKE = ["--model", "llama-3.2-1b", "-o", "device=fake", "--quiet"]
FIELDS = {"load", "model", "format", "device", "tree", "command", "versions", "calibration", "metrics"}


def bench(*args):
    result = run.invoke(app, [*args])
    assert result.exit_code == 0, result.output
    return result.output


def test_offline_writes_a_whole_result(tmp_path):
    path = tmp_path / "deep" / "r.json"
    output = bench("offline", *FAKE, "--requests", "12", "--input-len", "16", "--output-len", "8", "--json", str(path))
    result = json.loads(path.read_text())
    assert set(result) >= FIELDS and result["partial"] is False and result["kind"] == "offline"
    assert result["load"]["requests"] == 12 and result["format"] == "bfloat16" and len(result["tree"]) == 40
    assert result["metrics"]["output_tok_s"] > 0 and "output_tok_s" in output
    assert result["metrics"]["kv_footprint_bytes"] > 0 and result["metrics"]["peak_memory_bytes"] > 0


def test_several_loads_make_several_files(tmp_path):
    path = tmp_path / "r.json"
    bench("latency", *FAKE, "--load", "W2", "--load", "W7", "--input-len", "8", "--output-len", "12", "--batch", "1", "--batch", "4",
          "--json", str(path))  # fmt: skip
    single, sweep = (json.loads((tmp_path / f"r-{name}.json").read_text()) for name in ("W2", "W7"))
    assert single["metrics"]["tpot_ms"] > 0 and set(sweep["metrics"]["ms_per_step"]) == {"1", "4"}


def test_serve_without_an_address_runs_in_process(tmp_path):
    path = tmp_path / "r.json"
    bench("serve", *FAKE, "--concurrency", "2", "--concurrency", "4", "--input-len", "8", "--output-len", "6", "--json", str(path))
    metrics = json.loads(path.read_text())["metrics"]
    assert set(metrics["ttft_ms"]) == {"2", "4"} and metrics["serving"]["2"]["completed"] == 16


def test_serve_against_an_address(tmp_path, timed_server):
    server, path = timed_server(ttft_s=0.05, itl_s=0.01), tmp_path / "r.json"
    bench("serve", "--model", "llama-3.2-1b", "--base-url", server.url, "--concurrency", "2", "--output-len", "6", "--quiet",
          "-o", "device=cpu", "--calibration-s", "0.01", "--extra-body", '{"cache_salt": "x"}', "--goodput", "ttft:30",
          "--json", str(path))  # fmt: skip
    result = json.loads(path.read_text())
    assert result["engine"]["address"] == server.url
    assert result["calibration"]["kind"] == "cpu" and result["calibration"]["read_bytes_s"] > 0  # a loopback address: this machine
    assert result["floors"]["itl_ms"]["2"] > 0 and result["device"]["cores"] >= 1 and result["settings"]["goodput"]["ttft_ms"] == 30
    assert result["metrics"]["ttft_ms"]["2"]["p50"] >= 50 and result["metrics"]["goodput"]["2"] == 0
    assert server.requests[0]["cache_salt"] == "x"


def test_a_server_elsewhere_is_not_judged_and_the_result_says_why(tmp_path, timed_server, monkeypatch):
    from hexad.bench import ceilings

    monkeypatch.setattr(ceilings, "is_here", lambda url: False)
    server, path = timed_server(ttft_s=0.01, itl_s=0.001), tmp_path / "r.json"
    output = bench("serve", "--model", "llama-3.2-1b", "--base-url", server.url, "--concurrency", "1", "--output-len", "4",
                   "--json", str(path))  # fmt: skip
    result = json.loads(path.read_text())
    assert result["calibration"] is None and "another machine" in result["calibration_note"]
    assert "another machine" in output and any("could not be judged" in flag for flag in result["flags"])


def test_the_default_model_is_that_of_serve_and_is_said(capsys):
    from hexad.bench.command import chosen_model
    from hexad.common.config import DEFAULT_MODEL

    assert chosen_model(None) == DEFAULT_MODEL and DEFAULT_MODEL in capsys.readouterr().err
    assert chosen_model("x") == "x" and not capsys.readouterr().err
    for command in ("offline", "latency", "serve", "startup", "kernels", "profile", "accuracy"):
        text = run.invoke(app, [command, "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).output
        line = next(line for line in text.splitlines() if "--model" in line)
        assert DEFAULT_MODEL in text and "required" not in line


def test_an_address_needs_a_model_unless_it_serves_the_default(timed_server, monkeypatch):
    spec, stored = read_facts("llama-3.2-1b")
    monkeypatch.setattr(session, "read_facts", lambda model: (spec, stored))
    assert session.served_default(timed_server(models=("llama-3.2-1b.gguf",)).url, None, None) == session.DEFAULT_MODEL
    with pytest.raises(ConfigError, match=r"--base-url needs --model.*'other'.*--model llama-3.1-8b"):
        session.served_default(timed_server(models=("other",)).url, None, None)


@pytest.mark.parametrize(
    ("url", "here"),
    [("http://127.0.0.1:8000/v1", True), ("http://[::1]:8000", True), ("http://localhost:1", True), ("http://192.0.2.7:8000", False),
     ("http://127.8.0.1", True), ("http://no-such-host.invalid", False)],
)  # fmt: skip
def test_which_addresses_are_of_this_machine(url, here):
    from hexad.bench.ceilings import is_here

    assert is_here(url) is here


def test_streams_that_get_more_than_memory_delivers_are_flagged():
    spec, stored = read_facts("llama-3.1-8b")
    calibration = {"kind": "gpu", "device": "NVIDIA H200", "read_bytes_s": 4.48e12, "gemm_flops_s": {"bf16": 684e12}}

    def flags(rate):
        result = {"calibration": calibration, "metrics": {"output_tok_s": {"16": rate}}}
        return session.impossible_times(result, find_load("W9").scaled(concurrency=[16]), ModelCosts(spec, stored))

    assert flags(3_000.0) == [] and "impossible" in flags(9_000.0)[0]  # 16 tokens of 16 GB in 1.8 ms


def test_an_interrupt_leaves_a_valid_partial_file(tmp_path, scripted_face, monkeypatch):
    monkeypatch.setattr(session.Target, "face", lambda self, vocab_size: scripted_face(interrupt_at=8))
    path = tmp_path / "r.json"
    result = run.invoke(app, ["serve", "--model", "llama-3.2-1b", "--calibration-s", "0", "--quiet", "--json", str(path)])
    assert result.exit_code == 130
    saved = json.loads(path.read_text())  # each after a warm-up: 1, 16, 64 streams whole, 256 cut in the middle
    assert saved["partial"] is True and set(saved["metrics"]["ttft_ms"]) == {"1", "16", "64", "256"}
    assert saved["metrics"]["serving"]["256"]["completed"] == 1024


def test_duration_measures_a_steady_state(tmp_path):
    path = tmp_path / "r.json"
    bench("offline", *FAKE, "--duration-s", "2", "--input-len", "8", "--output-len", "16", "--requests", "8", "--json", str(path))
    metrics = json.loads(path.read_text())["metrics"]
    assert 1.6 <= metrics["steady_s"] < 30 and metrics["output_tok_s"] > 0  # four fifths of the time, more on a busy machine


def test_impossible_times_are_flagged():
    spec, stored = read_facts("llama-3.1-8b")
    calibration = {"kind": "gpu", "device": "NVIDIA H200", "read_bytes_s": 4.48e12, "gemm_flops_s": {"bf16": 684e12}}
    costs = ModelCosts(spec, stored)

    def flags(tpot_ms):
        return session.impossible_times({"calibration": calibration, "metrics": {"tpot_ms": tpot_ms}}, find_load("W2"), costs)

    assert flags(4.89) == []
    assert "impossible" in flags(2.0)[0] and "GB/s" in flags(2.0)[0]  # 15 GB in 2 ms


def test_tree_hash_is_that_of_git(tmp_path):
    package = tmp_path / "hexad"
    (package / "sub" / "__pycache__").mkdir(parents=True)
    (package / "sub-file.py").write_text("x = 1\n")
    (package / "sub" / "b.py").write_text("y = 2\n")
    (package / "sub" / "__pycache__" / "b.pyc").write_bytes(b"no")
    script = package / "run.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)

    def git(*args):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *identity, *args], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    git("add", "-A")
    git("commit", "-qm", "x")
    assert results.tree_hash(package) == git("rev-parse", "HEAD:hexad")


def test_tree_hash_of_the_package_changes_with_a_file(tmp_path):
    assert len(results.tree_hash()) == 40
    (tmp_path / "a.py").write_text("1")
    before = results.tree_hash(tmp_path)
    (tmp_path / "a.py").write_text("2")
    assert results.tree_hash(tmp_path) != before


def result_of(**changes):
    made = {"kind": "latency", "load": {"name": "W2"}, "model": "m", "format": "f", "device": {"name": "d"}, "partial": False,
            "metrics": {"tpot_ms": 4.0, "output_tok_s": {"1": 100.0}}}  # fmt: skip
    return made | changes


def test_compare_prints_ratios_and_says_which_is_better():
    rows = {r["metric"]: r for r in ratios(result_of(), result_of(metrics={"tpot_ms": 2.0, "output_tok_s": {"1": 50.0}}))}
    assert rows["tpot_ms"]["ratio"] == 0.5 and rows["tpot_ms"]["better"] is True
    assert rows["output_tok_s.1"]["better"] is False
    assert {r["better"] for r in ratios(result_of(), result_of())} == {None}


def config_of(**changes):
    config = {"model": {"model": "a", "max_model_len": 512, "dtype": "float32", "quantization": None},
              "cache": {"kv_cache_dtype": "float32"}, "device": {"threads": 2},
              "scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 512},
              "parallel": {"tensor_parallel_size": 1}}  # fmt: skip
    for key, value in changes.items():
        section = next(name for name in config if key in config[name])
        config[section][key] = value
    return {"engine": {"face": "in process", "config": config}}


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_num_seqs", 16), ("max_num_batched_tokens", 256), ("max_model_len", 256), ("dtype", "bfloat16"), ("quantization", "int8"),
     ("kv_cache_dtype", "int8"), ("threads", 1), ("tensor_parallel_size", 2)],
)  # fmt: skip
def test_compare_refuses_other_engine_options_and_names_them(key, value):
    lines = differences(result_of(**config_of()), result_of(**config_of(**{key: value})))
    assert len(lines) == 1 and key in lines[0] and str(value) in lines[0] and f"-o {key}=" in lines[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"load": {"name": "W2", "requests": 9}}, ["load.requests", "9", "--requests"]),
        ({"load": {"name": "W2", "input_tokens": [64]}}, ["load.input_tokens", "64", "--input-len"]),
        ({"settings": {"seed": 3}}, ["settings.seed", "3", "--seed"]),
        ({"settings": {"options": {"kv_cache_memory_bytes": 5}}}, ["kv_cache_memory_bytes", "5", "-o kv_cache_memory_bytes=5"]),
        ({"duration_s": 5.0}, ["duration_s", "5.0", "null", "--duration-s"]),
        ({"device": {"name": "d", "cores": 4}}, ["device.cores", "4", "2"]),
        ({"engine": {"face": "http"}}, ["engine.face", "http", "in process"]),
    ],
)
def test_compare_refuses_other_settings_and_says_what_to_do(change, words):
    base = result_of(load={"name": "W2", "requests": 8, "input_tokens": [128]}, duration_s=None, settings={"seed": 0, "options": {}},
                     device={"name": "d", "cores": 2}, engine={"face": "in process"})  # fmt: skip
    (line,) = differences(base, {**base, **change, "load": base["load"] | change.get("load", {})})
    assert all(word in line for word in words), line


def test_names_of_files_and_results_of_before_a_field_are_alike():
    assert not differences(result_of(**config_of()), result_of(**config_of(model="b")))
    old = result_of(**config_of())
    del old["engine"]["config"]["parallel"]  # its default in the other: that is what ran
    assert not differences(old, result_of(**config_of()))
    assert differences(old, result_of(**config_of(tensor_parallel_size=2)))


def test_only_figures_with_a_direction_are_judged():
    numbers = {"ttft_ms": {"1": {"p50": 1.0, "std": 1.0}}, "kv_footprint_bytes": 1, "weight_bytes": 1, "repeats": 3, "context": 1.0,
               "serving": {"1": {"std_ttft_ms": 1.0, "mean_ttft_ms": 1.0, "completed": 4, "output_throughput": 1.0}},
               "idle_share": 0.1}  # fmt: skip
    doubled = json.loads(json.dumps(numbers), parse_float=lambda x: 2 * float(x), parse_int=lambda x: 2 * int(x))
    judged = {r["metric"]: r["better"] for r in ratios(result_of(metrics=numbers), result_of(metrics=doubled)) if r["better"] is not None}
    assert judged == {"ttft_ms.1.p50": False, "serving.1.mean_ttft_ms": False, "serving.1.output_throughput": True, "idle_share": False}


@pytest.mark.parametrize(
    "change", [{"model": "n"}, {"format": "g"}, {"load": {"name": "W3"}}, {"device": {"name": "e"}}, {"partial": True}]
)
def test_compare_refuses_unlike_runs(change, tmp_path):
    assert differences(result_of(), result_of(**change)) and not differences(result_of(), result_of())
    for name, value in (("a", result_of()), ("b", result_of(**change))):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    refused = run.invoke(app, ["compare", *paths])
    assert refused.exit_code == 2 and "unlike runs" in refused.output
    assert "1.000x" in bench("compare", *paths, "--force")


def test_report_draws_curves_and_bars(tmp_path):
    sweep = result_of(load={"name": "W9"}, metrics={"ttft_ms": {str(c): {"p50": c, "p99": 2 * c} for c in (1, 16, 64)},
                                                   "output_tok_s": {"1": 1.0, "16": 9.0, "64": 20.0}},
                      floors={"output_tok_s": {"1": 2.0, "16": 20.0, "64": 40.0}})  # fmt: skip
    for name, value in (("before", sweep), ("after", sweep), ("single", result_of())):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    bench("report", *(str(tmp_path / f"{n}.json") for n in ("before", "after", "single")), "--out", str(tmp_path / "png"))
    names = {path.name: path.read_bytes()[:4] for path in (tmp_path / "png").iterdir()}
    assert set(names) == {"W9-ttft_ms.png", "W9-output_tok_s.png", "W2-summary.png", "W2-output_tok_s.png"}
    assert set(names.values()) == {b"\x89PNG"}


def test_report_of_nothing_says_so(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(result_of(metrics={})))
    assert run.invoke(app, ["report", str(tmp_path / "a.json"), "--out", str(tmp_path)]).exit_code == 2
    (tmp_path / "b.json").write_text("{")
    assert "cannot be read" in run.invoke(app, ["report", str(tmp_path / "b.json")]).output


def test_engine_options_are_read_as_json_where_they_are_json():
    assert engine_options(["max_num_seqs=4", "dtype=bfloat16", "enforce-eager=true"]) == {
        "max_num_seqs": 4, "dtype": "bfloat16", "enforce_eager": True,
    }  # fmt: skip
    with pytest.raises(ConfigError):
        engine_options(["oops"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["offline", "--model", "nowhere", "--quiet"], "nowhere"),
        (["offline", *FAKE, "--load", "W0"], "W1"),
        (["offline", *FAKE, "-o", "max_num_seq=3"], "max_num_seqs"),
        (["serve", "--model", "llama-3.2-1b", "--base-url", "http://127.0.0.1:9", "--quiet"], "does not answer"),
        (["serve", *FAKE, "--goodput", "fast"], "ttft:500"),
        (["serve", "--base-url", "localhost:8000"], "http://127.0.0.1:8000"),
        (["offline", *FAKE, "--load", "w6"], "hexad bench startup"),
        (["offline", *FAKE, "--json", "."], "is a folder"),
        (["offline", *FAKE, "--json", "/proc/x/r.json"], "/proc/x"),
        (["offline", *FAKE, "--requests", "0"], "Invalid value"),
        (["offline", *FAKE, "--duration-s", "0"], "Invalid value"),
        (["latency", *FAKE, "--batch", "0"], "Invalid value"),
        (["latency", *FAKE, "--repeats", "0"], "Invalid value"),
        (["serve", *FAKE, "--request-rate", "-1"], "Invalid value"),
        (["kernels", "--model", "llama-3.2-1b", "--dtype", "float8"], "bfloat16"),
        (["kernels", "--model", "llama-3.2-1b", "--device", "cuda:77"], "use c"),
        (["startup", "--model", "llama-3.2-1b", "--warm-runs", "-1"], "Invalid value"),
        (["profile", "--model", "llama-3.2-1b", "--steps", "0"], "Invalid value"),
    ],
)
def test_mistakes_are_messages(args, message):
    result = run.invoke(app, args)
    words = " ".join(result.output.replace("│", " ").split())  # typer's boxes fold
    assert result.exit_code in (1, 2) and message in words


def test_options_have_sane_defaults():
    assert Options().duration_s is None and Options().repeats == 3
    assert hexad.__version__ in json.dumps(results.versions())


def test_spawn_measures_the_server_and_then_this_process(tmp_path, timed_server, monkeypatch):
    from hexad.bench import spawned

    server, path = timed_server(ttft_s=0.02, itl_s=0.002), tmp_path / "r.json"

    class Stub:
        def __init__(self, model, options, vocab_size):
            self.url, self.pid = server.url, None
            assert options == {"device": "fake", "load_format": "dummy"} and vocab_size == 128256

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(spawned, "SpawnedServer", Stub)
    bench("serve", *FAKE, "--spawn", "--concurrency", "2", "--input-len", "8", "--output-len", "4", "--json", str(path))
    result = json.loads(path.read_text())
    assert result["partial"] is False and result["engine"]["face"] == "http"
    assert result["in_process"]["output_tok_s"]["2"] > 0 and 0 < result["metrics"]["http_share_of_in_process"]["2"] < 1


def test_spawned_server_says_why_it_did_not_start():
    from hexad.bench.spawned import SpawnedServer, flags
    from hexad.common.errors import HexadError

    assert flags({"max_num_seqs": 4, "enforce_eager": True, "enable_prefix_caching": False, "dtype": None}) == [
        "--max-num-seqs", "4", "--enforce-eager", "--no-enable-prefix-caching",
    ]  # fmt: skip
    with pytest.raises(HexadError, match=r"did not start.*nowhere"), SpawnedServer("nowhere-at-all/", {}):
        pass


def test_profiles_set_budgets_and_say_so(tmp_path):
    from hexad.common.config import HexadConfig
    from hexad.common.presets import PRESETS, find_preset

    for preset in PRESETS.values():
        assert set(preset.values) == set(preset.reasons)
        HexadConfig().with_values(preset.values)  # every key and value is one that the configuration takes
    options = engine_options(["max_num_batched_tokens=64"], "chat")
    assert options["max_num_batched_tokens"] == 64 and options["max_prefill_tokens_per_step"] == 1024
    with pytest.raises(ConfigError, match="chat"):
        find_preset("chats")


def test_table_shows_floor_and_share(tmp_path):
    made = result_of(floors={"tpot_ms": 3.0, "output_tok_s": {"1": 200.0}})
    (tmp_path / "a.json").write_text(json.dumps(made))
    lines = bench("table", str(tmp_path / "a.json")).splitlines()
    assert "| m | f | W2 | TPOT, ms | 4.00 | 3.00 | 75% | a |" in lines
    assert "| m | f | W2 | output tok/s [1] | 100 | 200 | 50% | a |" in lines


def test_floors_take_careful_figures_where_the_registry_has_them():
    burst = {"kind": "gpu", "device": "NVIDIA H200", "read_bytes_s": 4.0e12, "gemm_flops_s": {"bf16": 776e12}}
    assert session.calibrated_device(burst).rate("bf16") == 684e12
    unknown = session.calibrated_device(burst | {"device": "NVIDIA B900"})
    assert unknown.rate("bf16") == 776e12 and unknown.read_bytes_s.value == 4.0e12


def test_an_interrupt_before_anything_was_measured_leaves_a_valid_file_but_not_over_another(tmp_path, monkeypatch):
    def interrupted(self, vocab_size):
        raise KeyboardInterrupt

    monkeypatch.setattr(session.Target, "face", interrupted)
    path, earlier = tmp_path / "r.json", tmp_path / "earlier.json"
    earlier.write_text("{}")
    args = ["offline", "--model", "llama-3.2-1b", "--calibration-s", "0", "--quiet"]
    result = run.invoke(app, [*args, "--json", str(path)])
    saved = json.loads(path.read_text())
    assert result.exit_code == 130 and saved["partial"] is True and saved["metrics"] == {} and "r.json" in result.output
    assert "nothing was kept" in run.invoke(app, args).output
    assert "nothing was kept" in run.invoke(app, [*args, "--json", str(earlier)]).output and earlier.read_text() == "{}"


def test_numbers_that_would_make_another_load_stay_and_that_is_said(tmp_path):
    path = tmp_path / "r.json"
    args = ["latency", *FAKE[:-1], "--load", "W2", "--load", "W3", "--requests", "2", "--input-len", "8", "--output-len", "4"]
    output = bench(*args, "--json", str(path))
    single, prefill = (json.loads((tmp_path / f"r-{name}.json").read_text()) for name in ("W2", "W3"))
    assert single["load"]["requests"] == 1 and single["load"]["output_tokens"] == 4 and single["metrics"]["tpot_ms"] >= 0
    assert prefill["load"]["output_tokens"] == 1 and prefill["load"]["requests"] == 2 and "prefill_tok_s" in prefill["metrics"]
    assert "--repeats" in output and "W3 measures prefill alone" in output


def test_a_real_interrupt_leaves_a_valid_partial_file(tmp_path):
    import signal
    import sys
    import time
    from functools import partial

    path = tmp_path / "r.json"
    command = [sys.executable, "-m", "hexad", "bench", "offline", "--model", "llama-3.2-1b", "-o", "device=fake:0.01", "--requests", "4",
               "--input-len", "8", "--output-len", "4000", "--json", str(path)]  # fmt: skip
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore interrupts
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    for _ in range(300):  # until it measures: the file is there from then on
        if path.exists():
            break
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    saved = json.loads(path.read_text())
    assert process.returncode == 130 and "interrupted" in errors
    assert saved["partial"] is True and saved["metrics"]["output_tok_s"] > 0


def test_stand_in_tokenizer_has_a_word_for_every_id(tmp_path):
    from hexad.bench.standin import write_tokenizer
    from hexad.models.tokenizer import Tokenizer

    write_tokenizer(tmp_path, 5_000)
    tokenizer = Tokenizer.from_files(tmp_path)
    assert tokenizer.vocab_size == 5_000
    words = [tokenizer.decode([i]) for i in range(1, 5_000)]
    assert len(set(words)) == 4_999 and all(3 <= len(word.strip()) <= 4 for word in words)


def test_results_show_no_keys():
    assert results.shown_options({"api_key": "sk-1", "server.api_key": "sk-2", "max_num_seqs": 3}) == {"max_num_seqs": 3}
