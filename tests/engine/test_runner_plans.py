"""The local executor under hand-made plans: what each field of a plan does."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from engine_driver import allocate, fresh_seed, make_executor, reference_greedy, save_random

from hexad.common.config import HexadConfig
from hexad.common.errors import ConfigError, EngineDeadError, OutOfMemoryError
from hexad.common.params import SamplingParams
from hexad.engine.batch_state import BatchState
from hexad.engine.executor.local import LocalExecutor, fitting
from hexad.engine.executor.steps import LocalStep
from hexad.engine.plan import KVLayout, KVMove, NewRequest, Row, StepPlan, TokenSegment
from hexad.models.catalog import read_spec

BLOCKS = 40
SIZE = 4  # tokens a block
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def reference(folder):
    fresh_seed()
    return save_random(folder)


@pytest.fixture(scope="module")
def loaded(reference, folder):
    made = make_executor(folder, num_blocks=BLOCKS, block_size=SIZE, max_num_seqs=4)
    yield made
    made.close()


@pytest.fixture
def rng() -> random.Random:
    return random.Random(fresh_seed())


class Plans:
    """Makes plans for an executor and numbers them."""

    def __init__(self, executor: LocalExecutor) -> None:
        allocate(executor, BLOCKS)
        self.executor = executor
        self.next = 0

    def launch(self, rows=(), masks=None, **fields):
        plan = StepPlan(step_id=self.next, rows=tuple(rows), num_tokens=sum(row.num_tokens for row in rows), **fields)
        self.next += 1
        return self.executor.execute(plan).sample(masks)

    def run(self, rows=(), masks=None, **fields):
        return self.launch(rows, masks, **fields).wait(30).rows


@pytest.fixture
def plans(loaded):
    return Plans(loaded)


def new(rid: int, ids, blocks, params=GREEDY, **fields) -> NewRequest:
    values = {"prompt": (TokenSegment(tuple(ids)),), "prompt_len": len(ids), "block_ids": (tuple(blocks),), **fields}
    return NewRequest(rid=rid, params=params, **values)


def row(rid: int, start: int, count: int, samples: bool = True, blocks=()) -> Row:
    return Row(rid=rid, start=start, num_tokens=count, samples=samples, new_block_ids=(tuple(blocks),) if blocks else ())


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(130) for _ in range(length)]


def test_keys_of_prompts_are_known_apart_from_those_of_decode_rows(rng):
    state, long = BatchState(4, 100, SIZE, 1), rng.randint(30, 40)

    def step(*rows, **fields):
        step.made = getattr(step, "made", -1) + 1
        return state.step(StepPlan(step_id=step.made, rows=rows, num_tokens=sum(r.num_tokens for r in rows), **fields))

    first = step(row(0, 0, long), new=[new(0, prompt_of(rng, long), range(1, 12))])
    assert (first.max_seq_len, first.max_prompt_len, first.num_decodes) == (long, long, 0)
    mixed = step(row(0, long, 1), row(1, 0, 7), new=[new(1, prompt_of(rng, 7), [12, 13])])
    assert (mixed.max_seq_len, mixed.max_prompt_len, mixed.num_decodes) == (long + 1, 7, 1)
    decodes = step(row(0, long + 1, 1), row(1, 7, 1))
    assert (decodes.max_seq_len, decodes.max_prompt_len, decodes.num_decodes) == (long + 2, 0, 2)


def test_results_keep_the_order_of_the_plan(plans, reference, rng):
    """Prefills stand before decodes in the plan; the runner computes them after."""
    prompts = [prompt_of(rng, length) for length in (6, 9, 3)]
    plans.run([row(0, 0, 6)], new=[new(0, prompts[0], [5, 6, 7])])
    got = plans.run([row(1, 0, 9), row(0, 6, 1), row(2, 0, 2, samples=False)], new=[new(1, prompts[1], [1, 2, 3]), new(2, prompts[2], [9])])
    assert [result.rid for result in got] == [1, 0, 2]
    assert got[0].tokens == (reference_greedy(reference, prompts[1], 1)[0],)
    assert got[1].tokens == (reference_greedy(reference, prompts[0], 2)[1],)
    assert got[2].tokens == ()


def test_tables_grow_by_new_blocks(plans, reference, rng):
    prompt = prompt_of(rng, 4)
    got = [plans.run([row(0, 0, 4)], new=[new(0, prompt, [30])])[0].tokens[0]]
    for step, blocks in enumerate([[17], [], [], [], [3], []]):
        got.append(plans.run([row(0, 4 + step, 1, blocks=blocks)])[0].tokens[0])
    assert got == reference_greedy(reference, prompt, 7)


def test_launched_before_earlier_tokens_are_known(plans, reference, rng):
    """Ten steps in flight: inputs never pass through the host."""
    prompt = prompt_of(rng, 5)
    pending = [plans.launch([row(0, 0, 5)], new=[new(0, prompt, [1, 2, 3, 4])])]
    pending += [plans.launch([row(0, 5 + step, 1)]) for step in range(9)]
    assert [p.wait(30).rows[0].tokens[0] for p in pending] == reference_greedy(reference, prompt, 10)
    assert all(p.done() for p in pending)


def test_slots_are_reused_in_order(plans, reference, rng):
    """Four slots, all taken; one request leaves and another enters in the same plan, while steps of the first are in flight."""
    prompts = [prompt_of(rng, 5) for _ in range(5)]
    blocks = [[8 * i + j for j in range(3)] for i in range(5)]
    first = plans.launch([row(i, 0, 5) for i in range(4)], new=[new(i, prompts[i], blocks[i]) for i in range(4)])
    second = plans.launch([row(i, 5, 1) for i in range(4)])
    third = plans.launch([row(4, 0, 5), row(0, 6, 1), row(3, 6, 1)], finished=[2, 1], new=[new(4, prompts[4], blocks[4])])
    fourth = plans.launch([row(4, 5, 1), row(0, 7, 1)], finished=[3, 99])
    expected = [reference_greedy(reference, prompt, 4) for prompt in prompts]
    assert [r.tokens[0] for r in first.wait(30).rows] == [ids[0] for ids in expected[:4]]
    assert [r.tokens[0] for r in second.wait(30).rows] == [ids[1] for ids in expected[:4]]
    assert [r.tokens[0] for r in third.wait(30).rows] == [expected[4][0], expected[0][2], expected[3][2]]
    assert [r.tokens[0] for r in fourth.wait(30).rows] == [expected[4][1], expected[0][3]]


def test_kv_moves_copy_the_first_tokens_of_a_block(plans, reference, rng):
    """A second request takes over half a block of the first (copy on write) and goes another way."""
    shared, tail = prompt_of(rng, 6), prompt_of(rng, 3)
    plans.run([row(0, 0, 6)], new=[new(0, shared, [10, 11])])
    got = plans.run(
        [row(1, 6, 3), row(0, 6, 1)],
        kv_moves=[KVMove(group=0, source_block=11, target_block=20, num_tokens=2)],
        new=[new(1, shared + tail, [10, 20, 21], num_cached=6)],
    )
    assert got[0].tokens[0] == reference_greedy(reference, shared + tail, 1)[0]
    assert got[1].tokens[0] == reference_greedy(reference, shared, 2)[1]


def test_a_resumed_request_brings_its_outputs(plans, reference, rng):
    prompt = prompt_of(rng, 7)
    expected = reference_greedy(reference, prompt, 6)
    resumed = new(5, prompt, [1, 2, 3, 4], prompt=(TokenSegment(tuple(prompt)), TokenSegment(tuple(expected[:4]))))
    assert plans.run([row(5, 0, 11)], new=[resumed])[0].tokens == (expected[4],)
    assert plans.run([row(5, 11, 1)])[0].tokens == (expected[5],)


def test_nan_fails_that_row_alone(plans, reference, rng):
    prompts = [prompt_of(rng, 9) for _ in range(3)]
    blocks = [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]
    plans.run([row(i, 0, 9) for i in range(3)], new=[new(i, prompts[i], blocks[i]) for i in range(3)])
    plans.executor.runner.kv.layers[0].v[11] = float("nan")
    got = plans.run([row(i, 9, 1) for i in range(3)])
    assert "NaN" in got[1].error and got[1].tokens == ()
    for i in (0, 2):
        assert got[i].error is None and got[i].tokens[0] == reference_greedy(reference, prompts[i], 2)[1]
    # whoever gets the damaged blocks next is not harmed by what is left in them
    got = plans.run([row(7, 0, 9)], finished=[1], new=[new(7, prompts[1], blocks[1])])
    assert got[0].tokens[0] == reference_greedy(reference, prompts[1], 1)[0]


def test_masks_bind_their_row_alone(plans, reference, rng):
    prompts = [prompt_of(rng, 5) for _ in range(2)]
    free = plans.run([row(i, 0, 5) for i in range(2)], new=[new(i, prompts[i], [2 * i, 2 * i + 1]) for i in range(2)])
    allowed = next(i for i in range(130) if i != free[0].tokens[0])
    words = np.zeros(-(-130 // 32), np.uint32)
    words[allowed // 32] = 1 << (allowed % 32)
    got = plans.run(
        [row(10 + i, 0, 5) for i in range(2)],
        {10: words.tobytes()},
        finished=[0, 1],
        new=[new(10 + i, prompts[i], [20 + 2 * i, 21 + 2 * i]) for i in range(2)],
    )
    assert got[0].tokens == (allowed,)
    assert got[1].tokens == free[1].tokens


@pytest.mark.parametrize("chunks", [[1], [9], [3, 6], [1, 1, 7], [8, 1]])
def test_prompt_logprobs_come_once_a_token(plans, reference, chunks, rng):
    prompt = prompt_of(rng, sum(chunks))
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    request = new(0, prompt, [4, 5, 6], params, want_prompt_logprobs=True)
    entries, start = [], 0
    for count in chunks:
        last = start + count == len(prompt)
        entries += plans.run([row(0, start, count, samples=last)], new=[request] if start == 0 else [])[0].prompt_logprobs
        start += count
    assert plans.run([row(0, start, 1)])[0].prompt_logprobs == ()
    assert len(entries) == len(prompt) and entries[0] is None
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for position in range(1, len(prompt)):
        assert entries[position].token_id == prompt[position]
        assert entries[position].logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-4)


def test_empty_plans_are_answered(plans):
    assert plans.run() == ()
    assert plans.run(finished=[3]) == ()


def test_padding_rows_of_the_head_are_never_drawn(reference, folder):
    config = HexadConfig.parse({"model": {"dtype": "float32"}, "cache": {"kv_cache_memory_bytes": 2**24, "block_size": SIZE}})
    executor = LocalExecutor(config, read_spec(folder), folder, vocab_size=3)
    executor.load()
    try:
        plans = Plans(executor)
        hot = SamplingParams(temperature=2.0)
        for rid in range(5):
            assert plans.run([row(rid, 0, 2)], new=[new(rid, [1, 2], [rid], hot, seed=rid)])[0].tokens[0] < 3
    finally:
        executor.close()


def test_a_failed_step_raises_and_others_do_not(plans, rng, monkeypatch):
    prompt = prompt_of(rng, 3)
    runner = plans.executor.runner

    def fail(step, starting):
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", fail)
        pending = plans.launch([row(0, 0, 3)], new=[new(0, prompt, [1])])
        with pytest.raises(EngineDeadError, match="on fire"):
            pending.wait(30)
    assert len(plans.run([row(1, 0, 3)], new=[new(1, prompt, [2])])) == 1


def test_execute_returns_before_the_work_is_done(plans, rng, monkeypatch):
    gate, runner = threading.Event(), plans.executor.runner
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda step, starting: (gate.wait(30), forward(step, starting)))
    pending = plans.launch([row(0, 0, 3)], new=[new(0, prompt_of(rng, 3), [1])])
    assert not pending.done()
    with pytest.raises(TimeoutError, match="step 0"):
        pending.wait(0.01)
    gate.set()
    assert len(pending.wait(30).rows) == 1 and pending.done()


def test_closing_is_final_and_idempotent(reference, folder):
    executor = make_executor(folder, num_blocks=4)
    executor.close()
    executor.close()
    with pytest.raises(EngineDeadError):
        executor.execute(StepPlan(step_id=0, rows=()))


def test_budget_shows_its_sum(reference, folder):
    config = HexadConfig.parse({"cache": {"block_size": SIZE}})
    executor = LocalExecutor(config, read_spec(folder), folder)
    report = executor.load()
    assert report.dtype == "float32" and report.weight_bytes > 0 and report.operators["paged_attention"] == "torch"
    budget = executor.kv_bytes()
    assert budget.breakdown["weights"] == report.weight_bytes
    assert 0 < budget.available_bytes <= budget.breakdown["free"] <= budget.breakdown["total"]
    assert budget.page_bytes == 2 * 2 * SIZE * 2 * 8 * 4  # layers, k and v, tokens, heads, features, bytes
    with pytest.raises(ConfigError, match="block size is 8"):
        executor.allocate(KVLayout(num_blocks=4, block_size=8, groups=budget.groups))
    executor.close()


def test_no_memory_for_one_block_is_an_error_with_the_sum(reference, folder):
    config = HexadConfig.parse({"cache": {"kv_cache_memory_bytes": 10, "block_size": SIZE}})
    executor = LocalExecutor(config, read_spec(folder), folder)
    executor.load()
    with pytest.raises(OutOfMemoryError, match="kv_cache_memory_bytes"):
        executor.kv_bytes()
    executor.close()


def test_a_pool_larger_than_the_memory_is_refused_and_the_value_that_is_advised_works(reference, folder, monkeypatch):
    monkeypatch.setattr("hexad.engine.executor.local.memory_bytes", lambda device: (3 * 2**30, 4 * 2**30))

    def executor_of(size):
        config = HexadConfig.parse({"cache": {"kv_cache_memory_bytes": size, "block_size": SIZE}})
        executor = LocalExecutor(config, read_spec(folder), folder)
        executor.load()
        return executor

    monkeypatch.setattr("hexad.engine.executor.local.describe", str)
    with pytest.raises(OutOfMemoryError, match=r"3221225473 .*3\.00 of 4\.00 GiB free.*at most (\d+)MiB") as refused:
        fitting(3 * 2**30 + 1, torch.device("cuda"), 3 * 2**30, 4 * 2**30)
    advised = int(refused.value.message.split("at most ")[1].removesuffix("MiB")) * 2**20
    assert fitting(advised, torch.device("cuda"), 3 * 2**30, 4 * 2**30) == advised
    with pytest.raises(OutOfMemoryError, match="a smaller model"):
        fitting(2**30, torch.device("cuda"), 2**20 - 1, 2**30)
    executor = executor_of(3 * 2**30 + 1)  # a CPU's is settled before the weights are read: it takes what they leave
    assert executor.kv_bytes().available_bytes == advised
    executor.close()


def test_bad_devices_and_dtypes_are_named(reference, folder):
    spec = read_spec(folder)
    for values, text in (
        ({"device.device": "tpu"}, "'tpu'"),
        ({"device.device": "cuda:99"}, "'cuda:99'"),
        ({"cache.kv_cache_dtype": "fp8"}, "'fp8'"),
    ):
        with pytest.raises(ConfigError, match=text):
            LocalExecutor(HexadConfig().with_values(values), spec, folder)
    with pytest.raises(ConfigError, match=r"int8 keys and values are for CPUs; .* as auto, float32, bfloat16, float16$"):
        LocalExecutor(HexadConfig().with_values({"cache.kv_cache_dtype": "int8"}), spec, folder, device=torch.device("meta"))


def test_host_work_of_a_decode_step_is_small(plans, rng, monkeypatch):
    """Planning runs on the caller's thread beside the device's work: no torch, no work per token of history."""
    calls = []
    monkeypatch.setattr(LocalStep, "launch", lambda self: calls.append(self))
    monkeypatch.setattr(torch, "from_numpy", lambda array: pytest.fail("planning touched torch"))
    for rid in range(4):
        plans.executor.execute(StepPlan(step_id=rid, rows=(), new=(new(rid, [1] * 100, range(10 * rid, 10 * rid + 10)),)))
    plans.executor.execute(StepPlan(step_id=4, rows=tuple(row(rid, 30, 1) for rid in range(4))))
    assert len(calls) == 5
