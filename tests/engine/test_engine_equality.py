"""The whole engine on tiny random models: the same tokens whatever the batch, the chunks, the cache, the order of launching."""

from __future__ import annotations

import random

import pytest
import torch
from engine_driver import fresh_seed, generate, generate_preempted, generate_twice, make_executor, reference_greedy, save_random, tokens

from hexad.common.params import SamplingParams

KINDS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 12}),
    "qwen2-mixed": ("Qwen2", {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}
NUM_PROMPTS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


class Case:
    """A model, prompts and what transformers generates."""

    def __init__(self, folder, name: str) -> None:
        self.seed = fresh_seed()
        rng = random.Random(self.seed)
        kind, config = KINDS[name]
        self.reference = save_random(folder, kind, **config)
        self.executor = make_executor(folder)
        shared = [rng.randrange(130) for _ in range(40)]
        lengths = [1, 2, 15, 16, 17, 90] + [rng.randint(1, 100) for _ in range(NUM_PROMPTS - 8)]
        self.prompts = [[rng.randrange(130) for _ in range(length)] for length in lengths]
        self.prompts += [[*shared, rng.randrange(130)], [*shared, rng.randrange(130), 5]]
        self.expected = [reference_greedy(self.reference, prompt, GREEDY.max_tokens) for prompt in self.prompts]


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    made = Case(tmp_path_factory.mktemp("model"), request.param)
    yield made
    made.executor.close()


@pytest.fixture(autouse=True)
def show_seed(case):
    print(f"seed {case.seed}")


def test_alone(case):
    for prompt, expected in zip(case.prompts, case.expected, strict=True):
        assert tokens(generate(case.executor, [prompt])) == [expected]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
def test_batch(case, chunk, depth):
    results = generate(case.executor, case.prompts, GREEDY, depth=depth, max_prefill_tokens_per_step=chunk)
    assert tokens(results) == case.expected


@pytest.mark.parametrize("depth", [1, 2])
def test_small_budget_and_few_slots(case, depth):
    results = generate(case.executor, case.prompts, GREEDY, depth=depth, max_num_seqs=3, max_num_batched_tokens=9)
    assert tokens(results) == case.expected


@pytest.mark.parametrize("depth", [1, 2])
def test_prefix_cache(case, depth):
    assert generate_twice(case.executor, case.prompts, GREEDY, depth=depth) == case.expected * 2


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption(case, depth):
    assert generate_preempted(case.executor, case.prompts, GREEDY, depth=depth, rng=random.Random(case.seed)) == case.expected


def test_choices_share_a_prompt(case):
    prompt, same = case.prompts[5], 0
    for seed in (11, 12, 13):
        params = SamplingParams(temperature=1.0, max_tokens=10, n=3, seed=seed)
        together = tokens(generate(case.executor, [prompt], params))
        assert len({tuple(choice) for choice in together}) > 1
        crowded = generate(case.executor, [*case.prompts, prompt], [GREEDY] * NUM_PROMPTS + [params], max_prefill_tokens_per_step=7)
        assert tokens(crowded[:NUM_PROMPTS]) == case.expected
        same += tokens(crowded[NUM_PROMPTS:]) == together
    assert same >= 2  # other batches round a logit's last bit otherwise, and a draw at a border moves


def test_logprobs_equal_transformers(case):
    prompt = case.prompts[6]
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2)
    result = generate(case.executor, [*case.prompts[:3], prompt], [GREEDY] * 3 + [params], max_prefill_tokens_per_step=13)[3]
    ids = prompt + result.tokens
    with torch.no_grad():
        expected = case.reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    entries = result.prompt_logprobs + result.logprobs
    assert len(result.prompt_logprobs) == len(prompt) and len(entries) == len(ids)
    assert entries[0] is None
    for position in range(1, len(ids)):
        entry, row = entries[position], expected[position - 1]
        assert entry.token_id == ids[position]
        assert entry.logprob == pytest.approx(float(row[ids[position]]), abs=1e-4)
        assert abs(entry.rank - 1 - int((row > row[ids[position]]).sum())) <= int(((row - row[ids[position]]).abs() < 1e-4).sum())
        assert len(entry.top) == (2 if position < len(prompt) else 3)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(len(entry.top)).values.tolist(), abs=1e-4)
