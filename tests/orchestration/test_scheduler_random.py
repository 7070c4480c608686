"""Random mixes of everything, with all invariants checked after each step and every output compared with the reference."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from sched_driver import FULL, Driver, layout, sliding

from hexad.common.errors import RequestError
from hexad.common.params import SamplingParams
from hexad.engine.executor.fake import FakeScript, Fault

windows = st.integers(1, 9)
group_sets = st.one_of(
    st.just((FULL,)),
    st.builds(lambda w: (FULL, sliding(w)), windows),
    st.builds(lambda w: (sliding(w),), windows),
    st.builds(lambda a, b: (FULL, sliding(a), sliding(b)), windows, windows),
)
faults = st.lists(
    st.builds(Fault, kind=st.sampled_from(["fail", "nan"]), step=st.integers(0, 30), rid=st.none() | st.integers(0, 5)), max_size=2
)
# few ids, few lengths: prompts share prefixes
prompts = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.builds(lambda base, tail: [base] * 12 + tail, st.integers(0, 1), st.lists(st.integers(0, 2), max_size=6)),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts, deadlines, results, cache resets and preemptions in any order, on pools that are too small."""

    @initialize(
        groups=group_sets,
        blocks=st.integers(4, 16),
        block_size=st.integers(1, 4),
        depth=st.integers(1, 3),
        scheduling_policy=st.sampled_from(["fcfs", "priority", "fair"]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 20),
        max_prefill_tokens_per_step=st.one_of(st.none(), st.integers(1, 8)),
        max_model_len=st.integers(6, 48),
        enable_prefix_caching=st.booleans(),
        chunked=st.booleans(),
        drafts=st.sampled_from([0, 0, 2]),
        broken=faults,
    )
    def build(self, groups, blocks, block_size, budget, max_model_len, chunked, broken, drafts, **options):
        self.driver = Driver(
            layout(blocks * len(groups), block_size, *groups),
            script=FakeScript(vocab_size=40, eos_every=9),
            faults=tuple(broken),
            drafts=drafts,
            tenant_weights={"b": 2.0},
            max_num_batched_tokens=budget if chunked else max(budget, max_model_len),
            max_model_len=max_model_len,
            enable_chunked_prefill=chunked,
            **options,
        )

    @rule(
        prompt=prompts,
        max_tokens=st.sampled_from([None, 0, 1, 4, 9]),
        min_tokens=st.sampled_from([0, 0, 3]),
        n=st.sampled_from([1, 1, 1, 3]),
        seed=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        logprobs=st.sampled_from([None, 2]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        stop=st.sampled_from([(), (7, 8, 9)]),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("abc"),
        cache_salt=st.sampled_from(["", "", "salt"]),
        deadline_s=st.sampled_from([None, None, 5.0]),
    )
    def submit(self, prompt, max_tokens, min_tokens, n, seed, temperature, logprobs, prompt_logprobs, stop, **outer):
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            n=n,
            seed=seed,
            temperature=temperature,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop_token_ids=stop,
        )
        try:
            self.driver.submit(prompt, sampling=params, eos=(3,), **outer)
        except RequestError as error:
            event(f"refused: {error.code}")

    @rule(data=st.data())
    @precondition(lambda self: self.driver.seen)
    def abort(self, data):
        rid = data.draw(st.sampled_from(sorted(self.driver.seen)))
        self.driver.abort(rid, data.draw(st.sampled_from([None, 0, 1])))

    @rule()
    def launch(self):
        self.driver.launch()

    @rule()
    def collect(self):
        self.driver.collect()

    @rule(count=st.integers(1, 8))
    def steps(self, count):
        for _ in range(count):
            self.driver.step()

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds):
        self.driver.clock.advance(seconds)
        self.driver.expire()

    @rule()
    def preempt_all(self):
        self.driver.scheduler.preempt_hook = lambda step: True
        self.driver.launch()
        self.driver.scheduler.preempt_hook = None

    @rule()
    def reset_cache(self):
        self.driver.scheduler.reset_prefix_cache()
        self.driver.scheduler.check_integrity()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.drain()
            event("preempted" if self.driver.scheduler.stats().preemptions_total else "not preempted")
            event("cache hits" if self.driver.scheduler.stats().prefix_hits_total else "no cache hits")


TestRandomMixes = pytest.mark.timeout(250)(SchedulerMachine.TestCase)
TestRandomMixes.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


SOAK_SEEDS = [random.SystemRandom().randrange(2**32) for _ in range(24)]


@pytest.mark.parametrize("seed", SOAK_SEEDS)
def test_a_long_random_load_ends_right(seed):
    """Denser than what hypothesis likes to try: preemption, hits and evictions at nearly every step."""
    r = random.Random(seed)
    groups = r.choice([(FULL,), (FULL, sliding(r.randint(1, 9))), (sliding(r.randint(1, 9)),), (FULL, sliding(3), sliding(7))])
    driver = Driver(
        layout(r.randint(6, 14) * len(groups), r.randint(1, 4), *groups),
        script=FakeScript(vocab_size=50, eos_every=r.choice([0, 9])),
        max_num_seqs=r.randint(2, 6),
        max_num_batched_tokens=r.randint(6, 20),
        max_model_len=r.randint(8, 48),
        enable_prefix_caching=r.random() < 0.6,
        depth=r.choice([1, 2, 2, 3]),
        scheduling_policy=r.choice(["fcfs", "priority", "fair"]),
        drafts=r.choice([0, 0, 2]),
        faults=tuple(Fault(kind="nan", step=r.randint(0, 60), rid=r.choice([None, r.randint(0, 20)])) for _ in range(r.randint(0, 2))),
    )
    for _ in range(300):
        if r.random() < 0.35:
            prompt = [r.randint(0, 2) for _ in range(r.randint(1, 24))]
            with contextlib.suppress(RequestError):
                driver.submit(
                    prompt,
                    max_tokens=r.choice([None, 0, 1, 5, 12]),
                    n=r.choice([1, 1, 3]),
                    seed=r.randint(0, 5),
                    logprobs=r.choice([None, 1]),
                    prompt_logprobs=r.choice([None, None, 1]),
                    eos=(2,),
                    priority=r.randint(0, 3),
                    tenant=r.choice("ab"),
                    cache_salt=r.choice(["", "", "x"]),
                )
        if r.random() < 0.04 and driver.seen:
            driver.abort(r.choice(list(driver.seen)))
        r.choice([driver.step, driver.launch, driver.collect])()
    driver.drain()
