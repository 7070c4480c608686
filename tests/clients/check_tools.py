"""lm-eval over both endpoints with tasks that need no network, and schemathesis over the OpenAPI document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TASKS = Path(__file__).parent / "lm_eval_tasks"


NO_TOKENIZER = "tokenized_requests=False,tokenizer_backend=None"


def lm_eval(url: str, key: str, out: Path, kind: str, path: str, task: str, *flags: str, tokenizer: str = NO_TOKENIZER) -> dict[str, float]:
    """Scores of one task."""
    args = f"model=hexad,base_url={url}{path},num_concurrent=2,max_retries=1,{tokenizer}"
    command = [sys.executable, "-m", "lm_eval", "--model", kind, "--model_args", args, "--include_path", str(TASKS), "--tasks", task]
    env = {**os.environ, "OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "hf")}
    command += ["--output_path", str(out), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=TASKS, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    result = next(out.rglob("results_*.json"))
    return dict(json.loads(result.read_text())["results"][task])


def test_lm_eval_log_likelihoods(url: str, key: str, tokenizer: Path, tmp_path: Path) -> None:
    """Multiple choice by `echo` with `logprobs`, prompts as ids and as text."""
    for requests in ("True", "False"):
        by = f"tokenizer={tokenizer},tokenized_requests={requests}"
        out = tmp_path / requests
        scores = lm_eval(url, key, out, "local-completions", "/v1/completions", "hexad_choice", tokenizer=by)
        assert scores["acc,none"] == 1.0


def test_lm_eval_chat(url: str, key: str, tmp_path: Path) -> None:
    scores = lm_eval(url, key, tmp_path, "local-chat-completions", "/v1/chat/completions", "hexad_generate", "--apply_chat_template")
    assert scores["contains,none"] >= 0.5


def test_schemathesis(url: str, key: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", url + "/openapi.json", "-H", f"Authorization: Bearer {key}"]
    flags = ["--checks", "not_a_server_error", "--max-examples", "40", "--workers", "2", "--request-timeout", "120"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=900, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4_000:]
