"""The whole engine in this process: core loop, scheduler, local executor, output text. Tiny random models, random requests, comparisons."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
import torch
from engine_driver import fresh_seed, make_executor, save_random
from tokenizers import decoders, models, pre_tokenizers

from hexad.common.clock import SystemClock
from hexad.common.params import SamplingParams
from hexad.engine.executor.local import LocalExecutor
from hexad.engine.plan import KVLayout, TokenLogprobs
from hexad.models.tokenizer import Tokenizer
from hexad.orchestration.core import CoreLoop
from hexad.orchestration.result import CompletionOutput, RequestOutput, RequestWork
from hexad.orchestration.scheduler import Scheduler, SchedulerSettings, SchedulerStats

NUM_IDS, NUM_ROWS, EOS = 500, 512, 499  # the head has more rows than the tokenizer has ids
BLOCK_SIZE = 8
MAX_LEN = 192
MAX_SEQS = 40
LOGPROB_TOLERANCE = 1e-4
ROUNDING = 1.5e-5  # what batch shapes and kernels may change of float32 logits here; a wrong history changes them a thousand times more
KINDS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 20}),
    "qwen2-mixed": ("Qwen2", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1}),
}


def save_tokenizer(folder: Path, rng: random.Random) -> None:
    """Printable ASCII, pieces of longer characters, random merges of these, three special ids."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = "".join(map(chr, range(32, 127))) + "🦜🚀東京駅é"
    pieces = list(dict.fromkeys("".join(piece for piece, _ in byte_level.pre_tokenize_str(text))))
    merges: list[tuple[str, str]] = []
    while len(pieces) < NUM_IDS - 3:
        pair = (rng.choice(pieces), rng.choice(pieces))
        if "".join(pair) not in pieces:
            merges.append(pair)
            pieces.append("".join(pair))
    made = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    made.pre_tokenizer = byte_level
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "<pad>", "</s>"])
    made.save(str(folder / "tokenizer.json"))


class World:
    """One model with its executor, tokenizer and a source of random requests."""

    def __init__(self, folder: Path, kind: str, seed: int | None = None) -> None:
        self.seed = fresh_seed() if seed is None else seed
        torch.manual_seed(self.seed)
        self.rng = random.Random(self.seed)
        name, config = KINDS[kind]
        save_random(folder, name, vocab_size=NUM_ROWS, hidden_size=64, num_attention_heads=4, max_position_embeddings=MAX_LEN, **config)
        save_tokenizer(folder, self.rng)
        self.tokenizer = Tokenizer.from_files(folder)
        self.executor: LocalExecutor = make_executor(folder, block_size=BLOCK_SIZE, max_num_seqs=MAX_SEQS)
        self.executor.runner.vocab_size = NUM_IDS  # as composition does: rows beyond are padding
        self.groups = self.executor.kv_bytes().groups
        self._prefixes = [self.ids(length) for length in (24, 40, 61)]

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(NUM_IDS - 3) for _ in range(count)]

    def prompt(self) -> list[int]:
        prefix = self.rng.choice([[], [], *self._prefixes])
        return prefix + self.ids(self.rng.choice([1, 2, 7, 8, 9, 30, 70]))


@dataclass(frozen=True)
class Ask:
    """One request of a run."""

    prompt: tuple[int, ...]
    params: SamplingParams
    at_step: int = 0  # submitted after so many turns
    gone_at_step: int | None = None  # its caller goes away


@dataclass(frozen=True)
class Setup:
    """How the engine is set up; the default is the undisturbed run: one step at a time, no cache, no chunks, plenty of room."""

    depth: int = 1
    caching: bool = False
    chunk: int | None = None  # prompt tokens a step
    budget: int = 4096
    blocks: int = 2000  # a group
    max_num_seqs: int = MAX_SEQS
    policy: str = "fcfs"
    chunked: bool = True
    preempt: Callable[[int], bool] | None = field(default=None, compare=False)


@dataclass
class Run:
    results: list[RequestOutput]
    stats: SchedulerStats


def run(world: World, asks: Sequence[Ask], setup: Setup = Setup(), *, times: int = 1) -> Run:
    """All requests through a fresh engine over the world's executor; the results of the last of `times` rounds over one cache."""
    layout = KVLayout(num_blocks=setup.blocks * len(world.groups), block_size=BLOCK_SIZE, groups=world.groups)
    world.executor.allocate(layout)
    budget = setup.budget if setup.chunk is None else max(setup.chunk, setup.max_num_seqs)
    settings = SchedulerSettings(
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=max(budget, setup.max_num_seqs),
        max_model_len=MAX_LEN,
        enable_prefix_caching=setup.caching,
        enable_chunked_prefill=setup.chunked,
        max_prefill_tokens_per_step=setup.chunk,
        scheduling_policy=setup.policy,
        depth=setup.depth,
    )
    scheduler = Scheduler(settings, layout, SystemClock())
    scheduler.preempt_hook = setup.preempt
    core = CoreLoop(world.executor, scheduler, SystemClock(), vocab_size=NUM_IDS, async_scheduling=setup.depth > 1)
    for turn in range(times):
        results = _round(world, core, asks, f"{turn}-")
    stats = scheduler.stats()
    scheduler.check_integrity()
    assert stats.num_running == stats.num_waiting == stats.num_inflight_steps == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks, "a block leaked"
    assert core.death is None and core.live_requests() == 0
    return Run(results, stats)


def _round(world: World, core: CoreLoop, asks: Sequence[Ask], prefix: str) -> list[RequestOutput]:
    clock = SystemClock()
    works = {
        f"{prefix}{index}": RequestWork(f"{prefix}{index}", None, list(ask.prompt), ask.params, world.tokenizer, clock.now())
        for index, ask in enumerate(asks)
    }
    todo = sorted(zip(works.values(), asks, strict=True), key=lambda pair: pair[1].at_step)
    leaving = sorted(((ask.gone_at_step, name) for name, ask in zip(works, asks, strict=True) if ask.gone_at_step is not None))
    turn = 0
    while todo or core.has_work():
        while todo and todo[0][1].at_step <= turn:
            core.submit(todo.pop(0)[0].as_submit((EOS,)))
        while leaving and leaving[0][0] <= turn:
            core.abort(leaving.pop(0)[1])
        for output in core.step().get(b"", ()):
            work = works[output.request_id]
            if work.push(output, clock.now()):
                core.abort(work.request_id, choice=output.choice)
        turn += 1
        assert turn < 50_000, "does not end"
    assert all(work.complete for work in works.values())
    return [work.result() for work in works.values()]


def random_params(world: World) -> SamplingParams:
    """Everything that sampling can do, in random combinations; no stops yet."""
    rng = world.rng
    some = world.ids(6)
    options: dict[str, object] = {
        "n": rng.choice([1, 1, 2, 3]),
        "max_tokens": rng.randint(1, 24),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        "seed": rng.randrange(2**63),
        "logprobs": rng.choice([None, 0, 3]),
        "prompt_logprobs": rng.choice([None, None, 2]),
    }
    for chance, name, value in (
        (0.3, "top_p", rng.uniform(0.5, 0.99)),
        (0.3, "top_k", rng.randint(1, 60)),
        (0.2, "min_p", rng.uniform(0.0, 0.2)),
        (0.4, "presence_penalty", rng.uniform(-1, 2)),
        (0.4, "frequency_penalty", rng.uniform(-1, 2)),
        (0.4, "repetition_penalty", rng.uniform(0.8, 1.5)),
        (0.3, "logit_bias", {token: rng.choice([-100.0, -3.0, 2.0, 4.0]) for token in some}),
        (0.3, "min_tokens", rng.randint(0, 6)),
        (0.2, "ignore_eos", True),
        (0.15, "allowed_token_ids", tuple(sorted(set(world.ids(60))))),
        (0.2, "skip_special_tokens", False),
    ):
        if rng.random() < chance:
            options[name] = value
    params = SamplingParams(**options)  # type: ignore[arg-type]
    return msgspec.structs.replace(params, min_tokens=min(params.min_tokens, params.max_tokens or 0))


def with_stops(world: World, params: SamplingParams, seen: RequestOutput) -> SamplingParams:
    """The same request with bad words, stop tokens and stop strings taken from what it says without them."""
    rng = world.rng
    said = rng.choice(seen.outputs)
    changes: dict[str, object] = {}
    if len(said.token_ids) > 2 and rng.random() < 0.4:
        at = rng.randrange(len(said.token_ids) - 1)
        changes["bad_words_ids"] = (tuple(said.token_ids[at : at + rng.randint(1, 2)]), tuple(world.ids(3)))
    if said.token_ids and rng.random() < 0.35:
        changes["stop_token_ids"] = (rng.choice(said.token_ids), *world.ids(2))
    if len(said.text) > 4 and rng.random() < 0.6:
        at = rng.randrange(1, len(said.text) - 1)
        changes["stop"] = (said.text[at : at + rng.randint(1, 4)], "never seen")
        changes["include_stop_str_in_output"] = rng.random() < 0.3
    return msgspec.structs.replace(params, **changes)


def random_asks(world: World, count: int) -> list[Ask]:
    """`count` random requests, most with stops that are met."""
    asks = [Ask(tuple(world.prompt()), random_params(world)) for _ in range(count)]
    said = run(world, asks).results
    return [dataclasses.replace(ask, params=with_stops(world, ask.params, result)) for ask, result in zip(asks, said, strict=True)]


def alone(world: World, asks: Sequence[Ask]) -> list[RequestOutput]:
    """What each request answers undisturbed: alone, in one piece, one step at a time."""
    return [run(world, [ask]).results[0] for ask in asks]


def assert_same(
    world: World, asks: Sequence[Ask], got: Sequence[RequestOutput], expected: Sequence[RequestOutput], *, cached: bool = False
) -> None:
    """Ids, texts, finish reasons and usage are equal; log-probabilities agree. `cached`: the cached share of the prompt as well.

    One choice may differ where its draw hangs on the last bits of float32 logits, which is looked into (`hangs_on_rounding`).
    """
    assert len(got) == len(expected) == len(asks)
    excused = 0
    for ask, ours, theirs in zip(asks, got, expected, strict=True):
        assert len(ours.outputs) == len(theirs.outputs)
        for choice, wanted in zip(ours.outputs, theirs.outputs, strict=True):
            where = f"request {ours.request_id}, choice {choice.index} of {ask}: {_first_difference(choice, wanted)}"
            assert choice.error == wanted.error is None
            if choice.token_ids != wanted.token_ids:
                excused += 1
                assert excused == 1, where
                assert hangs_on_rounding(world, ask, choice, wanted), where
                continue
            assert choice.text == wanted.text, where
            assert (choice.finish_reason, choice.stop_reason) == (wanted.finish_reason, wanted.stop_reason), where
            _assert_close(choice.logprobs, wanted.logprobs, where)
        _assert_close(ours.prompt_logprobs, theirs.prompt_logprobs, f"request {ours.request_id}, prompt")
        if cached:
            assert ours.metrics.num_cached_tokens == theirs.metrics.num_cached_tokens
        if not excused:
            assert usage(ours) == usage(theirs)


def _first_difference(choice: CompletionOutput, wanted: CompletionOutput) -> str:
    pairs = zip_longest(choice.token_ids, wanted.token_ids)
    at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(wanted.token_ids))
    ours, theirs = ((c.token_ids[at : at + 1], (c.logprobs or [])[at : at + 1]) for c in (choice, wanted))
    return f"token {at} is {ours}, expected {theirs}; ends {choice.finish_reason}, expected {wanted.finish_reason}"


def hangs_on_rounding(world: World, ask: Ask, choice: CompletionOutput, wanted: CompletionOutput) -> bool:
    """Does the undisturbed run, too, draw `choice`'s first different token when its logits change by what rounding may do?"""
    ids = choice.token_ids
    at = next((i for i, (ours, theirs) in enumerate(zip(ids, wanted.token_ids, strict=False)) if ours != theirs), None)
    if at is None:
        return False  # one is longer: no draw explains that
    model: Any = world.executor.runner.model
    exact = model.logits

    def nudged(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits = exact(*args, **kwargs)
        return logits + ROUNDING * torch.randn_like(logits)

    model.logits = nudged
    try:
        return any(run(world, [ask]).results[0].outputs[choice.index].token_ids[: at + 1] == ids[: at + 1] for _ in range(80))
    finally:
        del model.logits


def _assert_close(got: Sequence[TokenLogprobs | None] | None, expected: Sequence[TokenLogprobs | None] | None, where: str) -> None:
    assert (got is None) == (expected is None), where
    assert len(got or ()) == len(expected or ()), where
    for ours, theirs in zip(got or (), expected or (), strict=True):
        if ours is None or theirs is None:
            assert ours is theirs, where
            continue
        assert ours.token_id == theirs.token_id, where
        assert ours.logprob == pytest.approx(theirs.logprob, abs=LOGPROB_TOLERANCE), where
        values = [[value for _, value in entry.top] for entry in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], abs=LOGPROB_TOLERANCE), where
        for (id_a, value), (id_b, _) in zip(ours.top, theirs.top, strict=True):  # a tie may come in either order, or be cut
            assert id_a == id_b or sum(abs(value - other) < LOGPROB_TOLERANCE for other in values[0]) > 1 or id_a == ours.top[-1][0], where


def usage(result: RequestOutput) -> tuple[int, int]:
    """Prompt and completion tokens."""
    return len(result.prompt_token_ids), sum(len(choice.token_ids) for choice in result.outputs)
