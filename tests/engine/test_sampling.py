"""The sampler against a plain float64 reference, and its promises: rows independent, ids valid, nothing sampled from padding."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from sampling_reference import distribution, edited, logprobs, ranking

from hexad.common.errors import RequestError
from hexad.common.params import SamplingParams
from hexad.engine.plan import NewRequest, TokenSegment
from hexad.engine.sampling.logprobs import prompt_logprobs
from hexad.engine.sampling.sampler import Sampler
from hexad.operators import draw as draw_operator
from hexad.operators.token_weights import draw

INF = math.inf
TABLE_WIDTH = 40


@pytest.fixture
def rng():
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return random.Random(seed)


class Case:
    """A batch: requests with histories, and a sampler that knows them."""

    def __init__(self, vocab, padded, rows, eos=(0,)):
        self.rows = rows  # (params, prompt, output)
        self.vocab, self.eos = vocab, eos
        self.sampler = Sampler(vocab, padded, len(rows), "cpu")
        self.table = torch.randint(0, vocab, (len(rows), TABLE_WIDTH), dtype=torch.int32)
        for slot, (params, prompt, output) in enumerate(rows):
            request = NewRequest(
                rid=1000 + slot,
                prompt=(TokenSegment(tuple(prompt) + tuple(output)),),
                prompt_len=len(prompt),
                params=params,
                seed=params.seed or 0,
                eos_token_ids=eos,
            )
            self.sampler.add(slot, request)
            self.table[slot, : len(prompt) + len(output)] = torch.tensor([*prompt, *output], dtype=torch.int32)
        self.lengths = torch.tensor([len(prompt) + len(output) for _, prompt, output in rows])

    def sample(self, logits, slots=None, masks=None, positions=None):
        slots = list(range(len(self.rows))) if slots is None else slots
        lengths = self.lengths[slots]
        positions = lengths if positions is None else positions
        sampled = self.sampler(logits.clone(), slots, positions, self.table, lengths, masks, int(lengths.max()))
        return self.sampler.to_host(sampled.to_cpu())

    def probabilities(self, logits, slots=None, masks=None):
        slots = list(range(len(self.rows))) if slots is None else slots
        return self.sampler.probabilities(logits.clone(), slots, self.table, self.lengths[slots], masks).numpy()


def random_ids(rng, vocab, low, high):
    return [rng.randrange(vocab) for _ in range(rng.randint(low, high))]


def random_params(rng, vocab):
    def sometimes(value, default, chance=0.35):
        return value if rng.random() < chance else default

    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.8, 1.0, 2.0]),
        top_p=sometimes(rng.choice([1e-9, 0.2, 0.7, 0.95]), 1.0),
        top_k=sometimes(rng.choice([-1, 1, 2, 7, vocab, vocab + 1000]), 0),
        min_p=sometimes(rng.choice([0.01, 0.2, 1.0]), 0.0),
        presence_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        frequency_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        repetition_penalty=sometimes(rng.choice([0.5, 1.2, 3.0]), 1.0),
        seed=rng.randrange(2**64),
        logit_bias=sometimes({rng.randrange(vocab): rng.uniform(-100, 100) for _ in range(3)}, {}),
        allowed_token_ids=sometimes(tuple(random_ids(rng, vocab, 3, 9)), None, 0.2),
        bad_words_ids=sometimes(tuple(tuple(random_ids(rng, vocab, 1, 3)) for _ in range(3)), ()),
        min_tokens=sometimes(rng.randint(1, 8), 0),
        stop_token_ids=sometimes(tuple(random_ids(rng, vocab, 1, 2)), ()),
        ignore_eos=rng.random() < 0.2,
        logprobs=sometimes(rng.randint(0, 6), None, 0.5),
    )


def random_row(rng, vocab):
    params = random_params(rng, vocab)
    output = random_ids(rng, vocab, 0, 10)
    if params.bad_words_ids and rng.random() < 0.7:  # make a sequence match
        output += list(rng.choice(params.bad_words_ids)[:-1])
    return params, random_ids(rng, vocab, 1, 8), output


def assert_distribution(got, x, params):
    wanted = [distribution(x, params, nudge) for nudge in (0.0, 1e-5, -1e-5)]
    assert any(np.allclose(got, want, atol=2e-5) for want in wanted), (params, got, wanted[0])


def test_random_mixed_batches_match_the_reference(rng):
    vocab, padded = 23, 32
    for _ in range(60):
        rows = [random_row(rng, vocab) for _ in range(rng.randint(1, 12))]
        case = Case(vocab, padded, rows)
        logits = torch.randn(len(rows), padded) * 3
        logits[:, vocab:] = 1e9
        masks = {1000 + i: rng.randbytes(3) for i in range(len(rows)) if rng.random() < 0.2} or None
        probabilities = case.probabilities(logits, masks=masks)
        host = case.sample(logits, masks=masks)
        for row, (params, prompt, output) in enumerate(rows):
            mask = (masks or {}).get(1000 + row)
            x = edited(logits[row, :vocab], params, prompt, output, case.eos, mask)
            if np.isneginf(x).all():
                assert host.errors[row] is not None and "exclude every" in host.errors[row]
                assert host.logprobs[row] is None
                continue
            assert host.errors[row] is None
            assert_distribution(probabilities[row], x, params)
            token = host.token_ids[row]
            assert probabilities[row][token] > 0
            assert_logprobs(host.logprobs[row], token, x, params.logprobs)


def assert_logprobs(entry, token, x, top):
    if top is None:
        assert entry is None
        return
    values = logprobs(x)
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(values[token], abs=1e-4)
    best = [t for t in ranking(x) if x[t] > -INF][:top]
    assert [p for _, p in entry.top] == pytest.approx([values[t] for t in best], abs=1e-4)
    gaps_clear = all(abs(x[a] - x[b]) > 1e-4 for a, b in zip(ranking(x), ranking(x)[1:], strict=False) if x[b] > -INF)
    if gaps_clear:
        assert [t for t, _ in entry.top] == best
        assert entry.rank == ranking(x).index(token) + 1
    assert dict(entry.top).get(token, entry.logprob) == entry.logprob


def test_penalties_know_prompt_from_output():
    """Repetition counts prompt and output, frequency and presence the output alone, each as often as it says."""
    prompt, output = [1, 1, 2], [2, 3, 3, 3]
    params = {
        "repetition": SamplingParams(temperature=0, repetition_penalty=2.0, logprobs=5),
        "frequency": SamplingParams(temperature=0, frequency_penalty=0.5, logprobs=5),
        "presence": SamplingParams(temperature=0, presence_penalty=0.5, logprobs=5),
    }
    changed = {"repetition": [0, 1, 1, 1, 0], "frequency": [0, 0, 0.5, 1.5, 0], "presence": [0, 0, 0.5, 0.5, 0]}
    case = Case(5, 5, [(p, prompt, output) for p in params.values()])
    host = case.sample(torch.full((3, 5), 2.0))
    for entry, name in zip(host.logprobs, params, strict=True):
        by_id = dict(entry.top)
        assert [by_id[0] - by_id[t] for t in range(5)] == pytest.approx(changed[name], abs=1e-5)


# B13: extreme options


def grid():
    return [
        SamplingParams(temperature=t, top_p=p, min_p=m, top_k=k, seed=11)
        for t in (0, 1e-300, 1e-8, 1e-5, 1e-4, 2.0)
        for p in (1e-9, 1e-4, 1.0)
        for m in (0.0, 1.0)
        for k in (-1, 0, 1, VOCAB_13 + 1000)
    ]


VOCAB_13 = 300


def extreme_logits(kind, rows):
    logits = torch.randn(rows, VOCAB_13) * 4
    if kind == "equal":
        logits[:] = 1.5
    if kind == "nearly all -inf":
        logits[:, torch.randperm(VOCAB_13)[1:]] = -INF
    if kind == "huge":
        logits = (logits * 1e4).clamp(-6e4, 6e4)  # within float16
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["random", "equal", "nearly all -inf", "huge"])
def test_b13_extreme_options_give_valid_ids_and_leave_neighbours_alone(rng, kind, dtype):
    params = [p.validate(VOCAB_13) for p in grid()]
    case = Case(VOCAB_13, VOCAB_13, [(p, [1], []) for p in params])
    logits = extreme_logits(kind, len(params)).to(dtype).float()
    probabilities = case.probabilities(logits)
    assert np.isfinite(probabilities).all()
    assert probabilities.sum(axis=1) == pytest.approx(np.ones(len(params)))
    host = case.sample(logits)
    assert host.errors == [None] * len(params)
    for row, p in enumerate(params):
        token = host.token_ids[row]
        assert 0 <= token < VOCAB_13 and logits[row, token] > -INF
        if p.temperature < 1e-5 or p.top_k == 1:
            assert token == int(np.argmax(logits[row].numpy()))
        elif p.temperature <= 1e-4 and kind == "random":
            best = torch.topk(logits[row], 2)
            assert token == int(best.indices[0]) or best.values[0] - best.values[1] < 1e-2
        if p.top_p <= 1e-4:
            assert logits[row, token] == logits[row].max()
        alone = case.sample(logits[row : row + 1], [row])
        assert alone.token_ids == [token]


def test_b13_greedy_rows_with_masked_logits_do_not_touch_random_neighbours(rng):
    rows = [(SamplingParams(temperature=0 if i % 2 else 0.9, seed=i), [1], []) for i in range(8)]
    case = Case(50, 64, rows)
    logits = torch.randn(8, 64)
    plain = case.sample(logits).token_ids
    logits[1::2, 3:50] = -INF
    masked = case.sample(logits).token_ids
    assert masked[0::2] == plain[0::2]
    assert all(token < 3 for token in masked[1::2])


# B14: biases


def test_b14_bias_of_100_forces_and_minus_100_bans(rng):
    params = [
        SamplingParams(temperature=2.0, logit_bias={10: -100.0}, seed=1),
        SamplingParams(temperature=2.0, logit_bias={10: 100.0}, seed=1),
    ]
    case = Case(20, 24, [(p, [1], []) for p in params])
    logits = torch.randn(400, 24)
    logits[:200, 10] = 8.0  # the favourite without the ban
    drawn = case.sample(logits, [0] * 200 + [1] * 200, positions=torch.arange(400)).token_ids
    assert 10 not in drawn[:200]
    assert drawn[200:] == [10] * 200


@pytest.mark.parametrize(
    "bad",
    [
        {"logit_bias": {20: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: 101.0}},
        {"logit_bias": {1: math.nan}},
        {"stop_token_ids": (22,)},
        {"allowed_token_ids": (22,)},
        {"bad_words_ids": ((22,),)},
    ],
)
def test_b14_ids_of_padding_rows_are_refused(bad):
    field = next(iter(bad)).removesuffix("_ids") if "bad_words_ids" in bad else next(iter(bad))
    with pytest.raises(RequestError) as caught:
        SamplingParams(**bad).validate(20)
    assert caught.value.param == field


# B15: determinism


def test_b15_a_row_is_the_same_alone_and_among_63_others(rng):
    vocab, padded = 49_152, 49_280
    rows = []
    for i in range(64):
        params = random_params(rng, vocab)
        rows.append((params if i % 3 else SamplingParams(temperature=0.8, seed=rng.randrange(2**64), logprobs=3), [1, 2], [3, 4]))
    case = Case(vocab, padded, rows)
    logits = torch.randn(64, padded) * 2
    together = case.sample(logits)
    before = torch.get_num_threads()
    try:
        for threads, checked in ((1, range(64)), (2, range(0, 64, 4))):
            torch.set_num_threads(threads)
            for row in checked:
                alone = case.sample(logits[row : row + 1], [row])
                assert alone.token_ids == [together.token_ids[row]]
                assert alone.logprobs == [together.logprobs[row]]
    finally:
        torch.set_num_threads(before)


def test_b15_top_k_1_is_greedy_with_the_same_tie_rule(rng):
    options = [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(top_p=1e-12), SamplingParams(temperature=1e-9)]
    case = Case(100, 128, [(p, [1], []) for p in options])
    for _ in range(20):
        logits = torch.randint(0, 3, (1, 128)).float().expand(4, 128).contiguous()
        assert len(set(case.sample(logits).token_ids)) == 1
        assert case.sample(logits).token_ids[0] == int(np.argmax(logits[0, :100].numpy()))


def test_b15_seed_and_position_alone_decide(rng):
    seeded = SamplingParams(temperature=1.0, seed=5)
    case = Case(1000, 1000, [(seeded, [1], []), (SamplingParams(seed=6), [1], []), (SamplingParams(seed=5), [7, 8], [9])])
    logits = torch.zeros(1, 1000).expand(50, 1000)
    positions = torch.arange(50)
    first = case.sample(logits, [0] * 50, positions=positions).token_ids
    assert case.sample(logits, [0] * 50, positions=positions).token_ids == first
    assert case.sample(logits, [2] * 50, positions=positions).token_ids == first
    assert case.sample(logits, [1] * 50, positions=positions).token_ids != first
    assert len(set(first)) > 30


def test_b15_choices_of_one_seed_differ_and_each_can_be_repeated():
    def draws(choice):
        sampler = Sampler(1000, 1000, 1, "cpu")
        request = NewRequest(rid=1, prompt=(TokenSegment((1,)),), prompt_len=1, params=SamplingParams(seed=3, n=2), choice=choice, seed=3)
        sampler.add(0, request)
        positions = torch.arange(1, 31)
        table = torch.zeros(1, 64, dtype=torch.int32)
        return sampler(torch.zeros(30, 1000), [0] * 30, positions, table, positions).token_ids.tolist()

    assert draws(0) == draws(0)
    assert draws(1) == draws(1)
    assert draws(0) != draws(1)


# B24: padding


def test_b24_padding_is_never_sampled_nor_listed(rng):
    options = [{}, {"top_k": 30}, {"top_p": 0.999}, {"temperature": 0}]
    rows = [(SamplingParams(**{"temperature": 2.0, "logprobs": 20, **option}), [1], []) for option in options]
    case = Case(25, 64, rows)
    logits = torch.randn(10_000, 64)
    logits[:, 25:] = 50.0
    host = case.sample(logits, [i % 4 for i in range(10_000)], positions=torch.arange(10_000))
    assert max(host.token_ids) < 25
    assert all(t < 25 for entry in host.logprobs for t, _ in entry.top)
    assert {t for t, row in zip(host.token_ids, range(10_000), strict=True) if row % 4 == 0} == set(range(25))


@pytest.mark.parametrize("num_bytes", [1, 2, 4, 8, 100])
def test_b24_grammar_masks_narrower_and_wider_than_the_vocabulary(num_bytes):
    case = Case(25, 64, [(SamplingParams(temperature=1.0), [1], [])])
    probabilities = case.probabilities(torch.zeros(1, 64), masks={1000: b"\xff" * num_bytes})
    allowed = min(25, num_bytes * 8)
    assert (probabilities[0] > 0).tolist() == [t < allowed for t in range(25)]


# Bad rows


@pytest.mark.parametrize("poison", [math.nan, INF])
def test_rows_with_nan_fail_alone(rng, poison):
    options = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(top_k=3, logprobs=2)]
    options += [SamplingParams(repetition_penalty=1.3, logprobs=1)]
    case = Case(300, 300, [(p, [1, 2], [3]) for p in options * 2])
    logits = torch.randn(10, 300)
    clean = case.sample(logits)
    logits[:5, 17] = poison
    poisoned = case.sample(logits)
    assert all(error and "NaN" in error for error in poisoned.errors[:5])
    assert all(0 <= token < 300 for token in poisoned.token_ids)
    assert poisoned.token_ids[5:] == clean.token_ids[5:]
    assert poisoned.logprobs[5:] == clean.logprobs[5:]
    assert poisoned.errors[5:] == [None] * 5


def test_a_row_of_nothing_but_minus_inf_fails():
    case = Case(8, 8, [(SamplingParams(), [1], []), (SamplingParams(temperature=0), [1], [])])
    host = case.sample(torch.full((2, 8), -INF))
    assert all(host.errors)


# Distribution


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    used = expected > 0
    assert counts[~used].sum() == 0
    return ((counts[used] - expected[used]) ** 2 / expected[used]).sum(), int(used.sum()) - 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=6, top_p=0.9),
        SamplingParams(min_p=0.1, temperature=1.7),
    ],
)
def test_draws_follow_the_distribution(rng, params):
    count = 40_000
    case = Case(40, 40, [(SamplingParams(**{**_fields(params), "seed": rng.randrange(2**63)}), [1], [])])
    logits = torch.randn(1, 40).expand(count, 40)
    probabilities = distribution(logits[0].double().numpy(), params)
    drawn = case.sample(logits, [0] * count, positions=torch.arange(count)).token_ids
    statistic, freedom = chi_square(np.bincount(drawn, minlength=40), probabilities)
    assert statistic < freedom + 6 * math.sqrt(2 * freedom) + 10


def _fields(params):
    return {name: getattr(params, name) for name in params.__struct_fields__}


# Internals whose shortcut must not show


@pytest.mark.parametrize("guesses", [(), (1,), (16, 64), (256, 1100), (1999,)])
def test_a_nucleus_larger_than_the_guess_gives_what_ranking_everything_gives(rng, monkeypatch, guesses):
    vocab = 2000
    options = [(1.0, 0.5, 0, 0), (2.0, 0.99, 0, 0), (0.1, 0.9, 0, 0), (2.0, 0.9, 1500, 0), (2.0, 1.0, 1200, 0.01), (0.01, 0.9, 1500, 0)]
    options += [(1.0, 0.9, 0, 0.05), (0.3, 0.6, 1100, 0.2), (1.0, 1e-6, 1500, 0)]
    rows = [(SamplingParams(temperature=t, top_p=p, top_k=k, seed=i, min_p=m), [1], []) for i, (t, p, k, m) in enumerate(options)]
    case = Case(vocab, vocab, rows)
    logits = torch.randint(-8, 8, (len(rows), vocab)).float() / 4  # many ties
    monkeypatch.setattr(draw_operator, "NUCLEUS_GUESSES", guesses)
    guessed = case.probabilities(logits)
    drawn = case.sample(logits).token_ids
    for row, (params, _, _) in enumerate(rows):
        assert_distribution(guessed[row], logits[row].double().numpy(), params)
        assert case.sample(logits[row : row + 1], [row]).token_ids == [drawn[row]]
    monkeypatch.setattr(draw_operator, "NUCLEUS_GUESSES", ())
    assert (case.probabilities(logits) == guessed).all()
    assert case.sample(logits).token_ids == drawn


def test_greedy_batches_are_never_sorted_and_host_work_is_done_once(monkeypatch):
    case = Case(100, 128, [(SamplingParams(temperature=0), [1], []) for _ in range(4)])
    for name in ("sort", "topk", "cumsum", "exp_"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a, name=name, **k: pytest.fail(f"{name} in a greedy batch"))
    logits = torch.randn(4, 128)
    assert case.sample(logits).token_ids == [int(i) for i in logits[:, :100].argmax(-1)]
    monkeypatch.setattr(case.sampler, "_make_batch", lambda *a: pytest.fail("composition worked out again"))
    case.sample(logits)


def test_a_slot_taken_again_has_its_new_options():
    case = Case(10, 10, [(SamplingParams(temperature=0, logit_bias={3: 100.0}), [1], [])])
    assert case.sample(torch.zeros(1, 10)).token_ids == [3]
    case.sampler.remove(0)
    request = NewRequest(rid=9, prompt=(TokenSegment((1,)),), prompt_len=1, params=SamplingParams(temperature=0, logit_bias={4: 100.0}))
    case.sampler.add(0, request)
    assert case.sample(torch.zeros(1, 10)).token_ids == [4]


def test_bad_words_look_at_the_output_alone():
    params = SamplingParams(temperature=0, bad_words_ids=((7, 8, 9),))
    for prompt, output, banned in (
        ([7, 8], [], False),
        ([7], [8], False),
        ([1], [7, 8], True),
        ([7], [8, 7, 8], True),
        ([1], [7, 3], False),
    ):
        case = Case(10, 10, [(params, prompt, output)])
        logits = torch.zeros(1, 10)
        logits[0, 9] = 5.0
        assert case.sample(logits).token_ids == [0 if banned else 9], (prompt, output)


def test_top_p_stops_where_the_mass_is_reached_exactly():
    options = [SamplingParams(top_p=0.5), SamplingParams(top_p=0.5, top_k=8), SamplingParams(top_p=0.50001)]
    probabilities = Case(8, 8, [(p, [1], []) for p in options]).probabilities(torch.zeros(3, 8))
    assert [(row > 0).tolist() for row in probabilities] == [[i < n for i in range(8)] for n in (4, 4, 5)]


def test_tokens_without_weight_are_never_drawn_at_the_edges():
    weights = torch.tensor([[0, 3, 0, 0, 1, 0]] * 5)
    columns = draw(weights, torch.tensor([0.0, 0.7499, 0.75, 0.9999, 1 - 2.0**-53], dtype=torch.float64))
    assert columns.tolist() == [1, 1, 4, 4, 4]


def test_min_tokens_frees_the_end_exactly_then():
    params = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(5,))
    for generated in range(6):
        case = Case(10, 10, [(params, [1, 1], [2] * generated)], eos=(6,))
        logits = torch.zeros(1, 10)
        logits[0, 5], logits[0, 6] = 5.0, 9.0
        free = generated >= 3
        assert case.sample(logits).token_ids == [6 if free else 0]


def test_prompt_logprobs_match_the_reference(rng):
    logits = torch.randn(70, 64) * 3
    next_ids = torch.randint(0, 50, (70,))
    entries = prompt_logprobs(logits, next_ids, 50, 3, first=True)
    assert entries[0] is None and len(entries) == 71
    for row, entry in enumerate(entries[1:]):
        assert_logprobs(entry, int(next_ids[row]), logits[row, :50].double().numpy(), 3)
    assert prompt_logprobs(logits[:0], next_ids[:0], 50, 3) == ()
