"""A head with more rows than the tokenizer has ids, through the composed engine: padding is never drawn, listed or accepted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_driver import fresh_seed, save_random
from safetensors.torch import load_file, save_file
from whole_engine import NUM_IDS, NUM_ROWS, save_tokenizer

from hexad import LLM, SamplingParams
from hexad.common.errors import RequestError


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("padded")
    save_random(folder, vocab_size=NUM_ROWS, hidden_size=64, num_attention_heads=4)
    save_tokenizer(folder, random.Random(fresh_seed()))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][NUM_IDS:] *= 20.0  # the largest logits, of either sign, are those of padding
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with LLM(str(folder), dtype="float32", device="cpu", kv_cache_memory_bytes=2**24) as made:
        yield made


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_b24_padding_rows_are_never_drawn_by_the_composed_engine(llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, n=4, max_tokens=50, logprobs=20, prompt_logprobs=20, ignore_eos=True)
    results = llm.generate(["x", "another one"], params)
    for result in results:
        listed = [token for entry in (result.prompt_logprobs or [])[1:] if entry for token, _ in entry.top]
        for choice in result.outputs:
            assert max(choice.token_ids) < NUM_IDS
            listed += [token for entry in choice.logprobs or [] for token, _ in entry.top]
        assert listed and max(listed) < NUM_IDS
    assert torch.isfinite(torch.tensor([entry.logprob for choice in results[0].outputs for entry in choice.logprobs or []])).all()


def test_b14_ids_of_padding_are_refused_by_the_composed_engine(llm: LLM) -> None:
    for params in (SamplingParams(logit_bias={NUM_IDS: 1.0}), SamplingParams(stop_token_ids=(NUM_IDS,))):
        with pytest.raises(RequestError, match=f"0 to {NUM_IDS - 1}"):
            llm.generate("x", params)
    with pytest.raises(RequestError):
        llm.generate([NUM_IDS], SamplingParams(max_tokens=1))
    assert len(llm.generate([NUM_IDS - 1], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
