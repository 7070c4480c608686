"""Drives the local executor with the real scheduler, step by step, in this thread; and makes the models for it."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hexad.common.clock import SystemClock
from hexad.common.config import HexadConfig
from hexad.common.params import SamplingParams
from hexad.engine.executor.local import LocalExecutor
from hexad.engine.plan import KVLayout, StepPlan, TokenSegment
from hexad.models.catalog import read_spec
from hexad.orchestration.messages import Submit
from hexad.orchestration.scheduler import Scheduler, SchedulerSettings

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def fresh_seed() -> int:
    """A new seed each run; printed, so that pytest shows it on failure."""
    seed = time.time_ns() % 2**31
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return seed


def save_random(folder: Path, kind: str = "Llama", **config):
    """A tiny random model on disk, as transformers writes it."""
    import transformers

    sizes = {
        "vocab_size": 130, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.3, "eos_token_id": None, **config,
    }  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes)).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    model.save_pretrained(folder)
    return model


def reference_greedy(model, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens of a transformers model, end-of-sequence ignored."""
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


def make_executor(
    path: Path,
    *,
    dtype: str = "float32",
    kv_dtype: str = "auto",
    num_blocks: int = 200,
    block_size: int = 16,
    max_num_seqs: int = 32,
    **model,
):
    """A loaded executor with its pool allocated."""
    config = HexadConfig.parse(
        {
            "model": {"model": str(path), "dtype": dtype, **model},
            "cache": {"kv_cache_memory_bytes": 2**28, "block_size": block_size, "kv_cache_dtype": kv_dtype},
            "scheduler": {"max_num_seqs": max_num_seqs},
        }
    )
    executor = LocalExecutor(config, read_spec(path), path)
    executor.load()
    allocate(executor, num_blocks)
    return executor


def allocate(executor: LocalExecutor, num_blocks: int) -> KVLayout:
    """A fresh pool: every request of before is forgotten."""
    layout = KVLayout(num_blocks=num_blocks, block_size=executor.block_size, groups=executor.kv_bytes().groups)
    executor.allocate(layout)
    return layout


@dataclass
class Generated:
    tokens: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    num_preemptions: int = 0


class EngineDriver:
    """One scheduler over a (shared) executor."""

    def __init__(self, executor: LocalExecutor, *, num_blocks: int = 200, depth: int = 2, **settings) -> None:
        self.layout = allocate(executor, num_blocks)
        limits = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": executor.max_model_len, "depth": depth, **settings}
        self.scheduler = Scheduler(SchedulerSettings(**limits), self.layout, SystemClock())
        self.executor = executor
        self.plans: list[StepPlan] = []
        self.results: dict[tuple[str, int], Generated] = {}
        self._pending: deque = deque()

    def submit(self, prompt, params: SamplingParams = GREEDY, **fields) -> str:
        name = f"r{len(self.results)}"
        for choice in range(params.n):
            self.results[name, choice] = Generated()
        self.scheduler.add(Submit(request_id=name, prompt=(TokenSegment(tuple(prompt)),), params=params, **fields))
        return name

    def step(self) -> bool:
        """Launch what may be launched, then take in the oldest result; False when nothing is left."""
        while len(self._pending) < self.scheduler.settings.depth:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self.plans.append(plan)
            self._pending.append((plan, self.executor.execute(plan).sample()))
        if not self._pending:
            assert not self.scheduler.has_work()
            return False
        plan, pending = self._pending.popleft()
        for event in self.scheduler.update(plan, pending.wait(60)):
            seen = self.results[event.request_id, event.choice]
            seen.tokens += event.token_ids
            seen.logprobs += event.logprobs
            seen.prompt_logprobs += event.prompt_logprobs
            if event.terminal:
                seen.finish_reason, seen.error, seen.num_preemptions = event.finish_reason, event.error, event.num_preemptions
        return True

    def run(self) -> list[Generated]:
        """Everything submitted, to its end; choices in order of submission."""
        while self.step():
            pass
        self.scheduler.check_integrity()
        return list(self.results.values())


def generate(executor: LocalExecutor, prompts, params=GREEDY, **options) -> list[Generated]:
    """All prompts at once through a fresh scheduler and pool."""
    driver = EngineDriver(executor, **options)
    every = params if isinstance(params, list) else [params] * len(prompts)
    for prompt, wanted in zip(prompts, every, strict=True):
        driver.submit(prompt, wanted)
    return driver.run()


def tokens(results: Iterable[Generated]) -> list[list[int]]:
    """What each has generated; none may have failed."""
    results = list(results)
    assert all(result.error is None for result in results)
    return [result.tokens for result in results]


def generate_twice(executor: LocalExecutor, prompts, params=GREEDY, *, depth: int = 2) -> list[list[int]]:
    """Everything twice over the same pool, so that the second time most of the prompts come from the cache."""
    driver = EngineDriver(executor, depth=depth)
    for _ in range(2):
        for prompt in prompts:
            driver.submit(prompt, params)
        driver.run()
    assert driver.scheduler.stats().prefix_hits_total > 0
    return tokens(driver.results.values())


def generate_preempted(executor: LocalExecutor, prompts, params=GREEDY, *, depth: int = 2, rng: random.Random) -> list[list[int]]:
    """A pool that is too small for all, and everything preempted at random steps."""
    driver = EngineDriver(executor, depth=depth, num_blocks=14 * len(executor.spec.kv_layer_groups))
    driver.scheduler.preempt_hook = lambda _step: rng.random() < 0.15
    for prompt in prompts:
        driver.submit(prompt, params)
    results = driver.run()
    assert sum(result.num_preemptions for result in results) > 0
    return tokens(results)
