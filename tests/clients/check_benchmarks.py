"""The load generators guidellm and aiperf, each in an environment of its own: what they count must be what the server counted."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

NUM_REQUESTS = 6
OUTPUT_TOKENS = 8


def run(command: list[str], home: Path) -> None:
    """Run a tool without network; its cache, settings and droppings go to `home`."""
    env = {**os.environ, "HF_HOME": str(home / "hf"), "HOME": str(home), "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=home, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4_000:]


def served(url: str, key: str) -> dict[str, float]:
    """Counters of the server: requests that ended by their length, and tokens generated."""
    request = urllib.request.Request(url + "/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = dict.fromkeys(("request_success_total", "generation_tokens_total"), 0.0)
    for line in lines:
        name, _, rest = line.partition("{")
        short = name.removeprefix("hexad:")
        if name.startswith("hexad:") and short in found and ("finished_reason" not in rest or 'finished_reason="length"' in rest):
            found[short] += float(rest.rpartition(" ")[2])
    return found


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(url: str, key: str, tokenizer: Path, guidellm: Path, tmp_path: Path, endpoint: str) -> None:
    before, report = served(url, key), tmp_path / "report.json"
    command = [str(guidellm), "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={url},model=hexad,api_key={key},request_format={endpoint}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    run([*command, "--output", f"kind=json,path={report}"], tmp_path)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests: dict[str, list[Any]] = benchmark["requests"]
    assert not requests["errored"], requests["errored"]
    # It may end before it has taken in the answer of the other stream: then one is neither successful nor incomplete.
    assert benchmark["scheduler_state"]["created_requests"] == NUM_REQUESTS
    assert len(requests["successful"]) >= NUM_REQUESTS - 1, benchmark["scheduler_state"]
    for request in requests["successful"]:
        assert request["output_tokens"] == OUTPUT_TOKENS
        assert request["prompt_tokens"] >= 32
        assert 0 < request["time_to_first_token_ms"] < 1e3 * request["request_latency"] + 1
    after = served(url, key)
    num_served = len(requests["successful"])
    assert after["request_success_total"] - before["request_success_total"] >= num_served
    assert after["generation_tokens_total"] - before["generation_tokens_total"] >= num_served * OUTPUT_TOKENS


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf(url: str, key: str, tokenizer: Path, aiperf: Path, tmp_path: Path, endpoint: str) -> None:
    out = tmp_path / "out"
    command = [str(aiperf), "profile", "--model", "hexad", "--url", url, "--api-key", key, "--endpoint-type", endpoint, "--streaming"]
    command += ["--tokenizer", str(tokenizer), "--concurrency", "2", "--request-count", str(NUM_REQUESTS), "--ui", "none"]
    command += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", str(OUTPUT_TOKENS)]
    command += ["--extra-inputs", "ignore_eos:true", "--output-artifact-dir", str(out)]
    run(command, tmp_path)
    found = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS
    assert not found["error_summary"]
    assert found["usage_completion_tokens"]["min"] == found["usage_completion_tokens"]["max"] == OUTPUT_TOKENS
    assert abs(found["output_sequence_length"]["avg"] - OUTPUT_TOKENS) <= 1  # it encodes the text anew, which may merge tokens
    if endpoint == "completions":  # in a chat the template adds its own
        assert found["usage_prompt_tokens_diff_pct"]["max"] == 0
    assert 0 < found["time_to_first_token"]["avg"] < found["request_latency"]["avg"]
