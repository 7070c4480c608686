"""What graphs capture, run without a card: the padded step in place of the ragged one gives the same tokens."""

from __future__ import annotations

import random

import pytest
from engine_driver import fresh_seed, generate, make_executor, save_random

from hexad.common.params import SamplingParams
from hexad.engine import runner as runner_module
from hexad.engine.graphs import Shape, StepGraphs, _Captured, shape_of

KINDS = {
    "llama": ("Llama", {}),
    "qwen2-mixed": ("Qwen2", {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 1}),
}


class UncapturedGraphs(StepGraphs):
    """Computes a captured step again in place of replaying it."""

    seen: set[Shape] = set()  # noqa: RUF012

    def _capture(self, shape: Shape) -> _Captured:
        self.seen.add(shape)
        captured = _Captured(self._frame, shape, self._device, None if shape.greedy else self._logits_of(shape.rows))

        def replay() -> None:
            for batch in captured._batches:
                batch.scratch.clear()  # a graph plans its attention anew each time, too
            captured.sampled = captured.compute()

        captured.replay = replay
        return captured


@pytest.fixture(scope="module", params=KINDS)
def executor(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    fresh_seed()
    kind, config = KINDS[request.param]
    save_random(folder, kind, **config)
    made = make_executor(folder)
    yield made
    made.close()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5, "presence_penalty": 0.4}])
def test_padded_steps_give_the_same_tokens(executor, params, monkeypatch):
    rng = random.Random(fresh_seed())
    prompts = [[rng.randrange(130) for _ in range(rng.randint(1, 70))] for _ in range(13)]
    wanted = SamplingParams(max_tokens=12, logprobs=None, **params)
    plain = [result.tokens for result in generate(executor, prompts, wanted)]
    monkeypatch.setattr(runner_module, "StepGraphs", UncapturedGraphs)
    monkeypatch.setattr(executor.runner, "use_graphs", True)
    UncapturedGraphs.seen.clear()
    assert [result.tokens for result in generate(executor, prompts, wanted, max_prefill_tokens_per_step=90)] == plain
    assert [result.tokens for result in generate(executor, prompts, wanted)] == plain
    assert [generate(executor, [prompt], wanted)[0].tokens for prompt in prompts[:4]] == plain[:4]
    shapes = UncapturedGraphs.seen
    assert {shape.decode for shape in shapes} == {True, False}
    assert {shape.greedy for shape in shapes} == {params["temperature"] == 0}


def test_long_steps_and_steps_without_draws_are_not_captured(executor, monkeypatch):
    seen = []
    original = shape_of

    def spy(host, max_blocks, *, greedy):
        shape = original(host, max_blocks, greedy=greedy)
        seen.append((len(host.sampled) == len(host.rows), shape))
        return shape

    monkeypatch.setattr("hexad.engine.graphs.shape_of", spy)
    monkeypatch.setattr(runner_module, "StepGraphs", UncapturedGraphs)
    monkeypatch.setattr(executor.runner, "use_graphs", True)
    generate(executor, [[1] * 70, [2] * 3], SamplingParams(temperature=0.0, max_tokens=3), max_prefill_tokens_per_step=32)
    assert all(shape is None for draws, shape in seen if not draws)
    assert any(shape is not None for _draws, shape in seen)
