"""The whole engine on a card: greedy tokens of a tiny random Llama equal those of `transformers` in float32, with and without graphs,
asynchronous scheduling and company; in bfloat16 the engine equals itself."""

from __future__ import annotations

import os
import time

import pytest
import torch

pytest.importorskip("msgspec")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from hexad import LLM, SamplingParams  # noqa: E402

TOKENS = 24
OPTIONS = {"max_model_len": 512, "max_num_seqs": 64, "kv_cache_memory_bytes": 2**28, "device": os.environ.get("HEXAD_TEST_DEVICE", "cuda")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(folder, prompts, expected greedy tokens of each)."""
    seed = time.time_ns() % 2**31
    print("seed", seed)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, head_dim=64, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().double()
    folder = tmp_path_factory.mktemp("llama")
    prompts = [torch.randint(0, 512, (int(n),)).tolist() for n in torch.randint(1, 200, (20,))]
    expected = []
    with torch.no_grad():
        for prompt in prompts:
            ids = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, use_cache=True)
            expected.append(tuple(ids[0, len(prompt) :].tolist()))
    model.float().save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    return str(folder), prompts, expected


def generate(folder, prompts, params=None, **options):
    params = params or SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(folder, **OPTIONS, **options) as llm:
        return [tuple(result.outputs[0].token_ids) for result in llm.generate([{"prompt_token_ids": p} for p in prompts], params)]


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("eager", [False, True])
def test_float32_greedy_equals_transformers(checkpoint, eager, block_size):
    folder, prompts, expected = checkpoint
    assert generate(folder, prompts, dtype="float32", enforce_eager=eager, block_size=block_size) == expected


def test_float32_chunked_and_synchronous(checkpoint):
    folder, prompts, expected = checkpoint
    got = generate(folder, prompts, dtype="float32", max_num_batched_tokens=64, async_scheduling=False, enable_prefix_caching=False)
    assert got == expected


def test_one_by_one_equals_the_batch(checkpoint):
    folder, prompts, expected = checkpoint
    with LLM(folder, **OPTIONS, dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        for prompt, tokens in list(zip(prompts, expected, strict=True))[:5]:
            assert tuple(llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids) == tokens


def test_seeded_sampling_is_the_same_in_graphs_and_without(checkpoint):
    folder, prompts, _expected = checkpoint
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=TOKENS, ignore_eos=True, frequency_penalty=0.5)
    assert generate(folder, prompts, params, dtype="float32") == generate(folder, prompts, params, dtype="float32", enforce_eager=True)


def test_bfloat16_runs_in_graphs(checkpoint):
    folder, prompts, expected = checkpoint
    got = generate(folder, prompts, dtype="bfloat16")
    same = sum(a == b for got_one, one in zip(got, expected, strict=True) for a, b in zip(got_one, one, strict=True))
    assert same > 0.3 * TOKENS * len(prompts)  # a random network's logits nearly tie: most sequences part somewhere
