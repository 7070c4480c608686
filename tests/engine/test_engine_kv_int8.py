"""The whole engine with int8 keys and values on tiny random models: the same tokens whatever the batch, the chunks, the cache and who is
preempted, because a token's row of a page depends on that token alone."""

from __future__ import annotations

import random

import pytest
from engine_driver import fresh_seed, generate, generate_preempted, generate_twice, make_executor, save_random, tokens

from hexad.common.params import SamplingParams
from hexad.operators.native.library import probe
from hexad.operators.registry import registry

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
NATIVE_SIZES = {"head_dim": 16, "hidden_size": 96, "intermediate_size": 96}
KINDS = {  # kind, its sizes, options of the executor, who serves the network
    "torch": ("Llama", {}, {}, "torch"),
    "torch-window": ("Qwen2", {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 1}, {}, "torch"),
    "native": ("Llama", NATIVE_SIZES, {"quantization": "int8"}, "native"),
    "native-window": ("Mistral", {**NATIVE_SIZES, "sliding_window": 12}, {"quantization": "int8"}, "native"),
}


class Case:
    """A model, prompts and what each gives alone."""

    def __init__(self, folder, name: str) -> None:
        kind, config, options, provider = KINDS[name]
        if provider == "native" and probe()[0] is None:
            pytest.skip(probe()[1])
        self.seed = fresh_seed()
        rng = random.Random(self.seed)
        save_random(folder, kind, **config)
        self.executor = make_executor(folder, kv_dtype="int8", **options)
        if provider == "native":
            assert registry.choices["decoder_stack"] == "native"
        shared = [rng.randrange(130) for _ in range(40)]
        self.prompts = [[rng.randrange(130) for _ in range(length)] for length in (1, 15, 16, 17, 70, rng.randint(1, 100))]
        self.prompts += [[*shared, rng.randrange(130)], [*shared, rng.randrange(130), 5]]
        self.expected = [tokens(generate(self.executor, [prompt], GREEDY))[0] for prompt in self.prompts]


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    made = Case(tmp_path_factory.mktemp("model"), request.param)
    yield made
    made.executor.close()


@pytest.fixture(autouse=True)
def show_seed(case):
    print(f"seed {case.seed}")


@pytest.mark.parametrize("chunk", [7, None])
def test_batched_as_alone(case, chunk):
    assert tokens(generate(case.executor, case.prompts, GREEDY, depth=2, max_prefill_tokens_per_step=chunk)) == case.expected


def test_cached_as_uncached(case):
    assert generate_twice(case.executor, case.prompts, GREEDY) == case.expected * 2


def test_preempted_as_not(case):
    assert generate_preempted(case.executor, case.prompts, GREEDY, rng=random.Random(case.seed)) == case.expected


def test_forked_choices_copy_whole_rows(case):
    """Choices of one prompt write on in copies of its last block."""
    params = SamplingParams(temperature=1.0, max_tokens=10, n=3, seed=11)
    together = tokens(generate(case.executor, [case.prompts[3]], params))
    assert tokens(generate(case.executor, [*case.prompts, case.prompts[3]], [GREEDY] * len(case.prompts) + [params])) == [
        *case.expected,
        *together,
    ]


def test_the_sums_count_the_scales(case):
    """A page is what is allocated, what the budget counts and what the model's costs say."""
    spec, block = case.executor.spec, case.executor.block_size
    budget, storage = case.executor.kv_bytes(), case.executor.runner.kv
    assert storage.nbytes == budget.page_bytes * len(storage.layers[0].k)
    groups = len(spec.kv_layer_groups)
    assert budget.page_bytes * groups == block * spec.kv_bytes_per_token("int8")
    attention = spec.attention
    assert spec.kv_bytes_per_token("int8") == spec.num_layers * 2 * attention.kv_heads * (attention.head_dim + 4)
