"""After `hexad warm` an engine compiles nothing: Triton's cache is the same before and after its first tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
ENGINE = """
import sys
from hexad import LLM, SamplingParams
with LLM(sys.argv[1], load_format="dummy", max_num_seqs=40, max_model_len=2048, kv_cache_memory_bytes=2**28, device="cuda") as llm:
    for lengths in ([5], [3, 700, 40], [1500, 9, 9, 9], [17] * 40):
        prompts = [{"prompt_token_ids": [i % 500 + 1 for i in range(n)]} for n in lengths]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    for filters in ({}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.05}, {"top_p": 0.9, "min_p": 0.05}):
        llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 3, SamplingParams(temperature=0.8, max_tokens=4, ignore_eos=True, **filters))
"""


def cached(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("arch", [[], ["--arch"]], ids=["this card", "named"])
def test_a_start_after_warming_compiles_nothing(tmp_path, arch):
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(model / "tokenizer.json"))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    options = [str(model), "--load-format", "dummy", "--max-num-seqs", "40", "--max-model-len", "2048"]
    if arch:
        options += ["--arch", "sm_{}{}".format(*torch.cuda.get_device_capability())]
    warmed = subprocess.run([sys.executable, "-m", "hexad", "warm", *options], env=environment, capture_output=True, text=True, timeout=200)
    assert warmed.returncode == 0, warmed.stderr
    before = cached(cache)
    assert any(name.endswith(".cubin") for name in before)
    started = subprocess.run([sys.executable, "-c", ENGINE, str(model)], env=environment, capture_output=True, text=True, timeout=200)
    assert started.returncode == 0, started.stderr[-2000:]
    added = sorted(cached(cache) - before)
    assert not [name for name in added if name.endswith((".cubin", ".so"))], added
