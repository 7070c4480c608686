"""SmolLM2-135M against transformers with the same dequantised weights. One model of each in float32 for the whole file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from engine_driver import allocate, fresh_seed, generate, make_executor

from hexad.common.config import DEFAULT_MODEL
from hexad.common.errors import ModelError
from hexad.common.params import SamplingParams
from hexad.models.inputs import ForwardInputs
from hexad.models.sources import fetch
from hexad.models.tokenizer import Tokenizer
from hexad.operators.batch import AttentionBatch

LONG = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TEXTS = (
    "The capital of France is", "def quicksort(items):", "Once upon a time, in a village by the sea,", "Water boils at",
    "1, 1, 2, 3, 5, 8,", "Dear Sir or Madam,", "The three laws of thermodynamics are", "To make bread you need", "In 1969,",
    "import numpy as np\n", "Photosynthesis is", "My favourite colour is", "Q: What is 12 times 12?\nA:", "The largest planet",
    "Die Hauptstadt von Deutschland ist", "<html><head><title>", "SELECT name FROM users WHERE", "She opened the door and",
    "A prime number is", "Breaking news:",
)  # fmt: skip


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return fetch(DEFAULT_MODEL).path
    except ModelError as error:
        pytest.fail(f"the default model is not here and cannot be fetched: {error}")


@pytest.fixture(scope="module")
def executor(path):
    threads = torch.get_num_threads()
    made = make_executor(path, num_blocks=400)
    yield made
    made.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference(path):
    """transformers' own network with the weights that transformers itself reads from the GGUF file."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = path if path.is_file() else next(path.glob("*.gguf"))
    config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.init, "normal_", lambda tensor, *args, **kwargs: tensor)  # every weight is overwritten below
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"], strict=False)
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def prompts(path) -> list[list[int]]:
    tokenizer = Tokenizer.from_files(path)
    return [list(tokenizer.encode(text)) for text in TEXTS]


@pytest.fixture(scope="module")
def generated(executor, prompts) -> list[list[int]]:
    """64 greedy tokens of all prompts: one batch of 20, prompts in chunks, asynchronous."""
    return [result.tokens for result in generate(executor, prompts, LONG, num_blocks=400, max_prefill_tokens_per_step=7)]


def test_logits_of_200_tokens(executor, reference):
    rng = random.Random(fresh_seed())
    ids = [rng.randrange(executor.spec.vocab_size) for _ in range(200)]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    allocate(executor, 400)
    positions = torch.arange(200)
    table = torch.randperm(400)[:13]
    batch = AttentionBatch(
        query_start=torch.tensor([0, 200], dtype=torch.int32),
        seq_lens=torch.tensor([200], dtype=torch.int32),
        block_table=table.int().unsqueeze(0),
        slots=table[positions // 16] * 16 + positions % 16,
        max_query_len=200,
        max_seq_len=200,
        block_size=16,
        num_decodes=0,
    )
    model = executor.runner.model
    with torch.inference_mode():
        got = model.logits(model.forward(ForwardInputs(torch.tensor(ids), positions, (batch,)), executor.runner.kv.layers))
    off = (got - expected).abs() / expected.abs().max()
    assert float(off.mean()) < 1e-5 and float(off.max()) < 1e-3  # random ids: one row in thousands is ill-conditioned


def test_64_greedy_tokens_of_20_prompts(reference, prompts, generated):
    """Greedy decoding of the reference is these ids if, after each of their prefixes, its best token is the next one."""
    for prompt, ids in zip(prompts, generated, strict=True):
        assert len(ids) == 64
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 64, None])
def test_batch_of_16(executor, prompts, generated, chunk, depth):
    results = generate(executor, prompts[:16], SHORT, depth=depth, num_blocks=400, max_prefill_tokens_per_step=chunk)
    assert [result.tokens for result in results] == [ids[:12] for ids in generated[:16]]


def test_alone(executor, prompts, generated):
    for prompt, ids in list(zip(prompts, generated, strict=True))[:4]:
        assert generate(executor, [prompt], SHORT, num_blocks=400)[0].tokens == ids[:12]


def test_bfloat16_says_paris(path, prompts):
    """The serving dtype is another rounding, not another model."""
    executor = make_executor(path, dtype="bfloat16", num_blocks=100)
    try:
        text = Tokenizer.from_files(path).decode(generate(executor, prompts[:1], SHORT, num_blocks=100)[0].tokens)
        assert "Paris" in text
    finally:
        executor.close()
