"""The native draw of random tokens against its torch reference, by every instruction set."""

from __future__ import annotations

import math
import time

import pytest
import torch
from native_library import isas, use

from hexad.operators import token_weights as w
from hexad.operators.args import DrawArgs
from hexad.operators.draw import DrawOptions, draw_reference, kept
from hexad.operators.native.draw import bind_draw, bind_token_ranks
from hexad.operators.token_ranks import token_ranks_reference

VOCABS = (1, 2, 15, 16, 17, 333, 2000)
EDGES = (0.0, 0.25, 0.5, 0.9, 1 - 2.0**-53)


@pytest.fixture
def make() -> torch.Generator:
    seed = time.time_ns() % 2**31
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def pick(make: torch.Generator, among):
    return among[int(torch.randint(len(among), (1,), generator=make))]


def random_options(make: torch.Generator, rows: int, vocab: int) -> DrawOptions:
    def column(values, dtype):
        return torch.tensor([pick(make, values) for _ in range(rows)], dtype=dtype)

    top_k = column([1, min(3, vocab), max(1, vocab // 2), vocab, vocab, min(40, vocab)], torch.int64)
    top_p = column([1.0, 1.0, 0.0, 0.3, 0.9, 0.999, 1e-9], torch.float64)
    least = column([0, math.ceil(0.05 * w.SCALE), math.ceil(0.5 * w.SCALE), 7], torch.int64) if pick(make, [True, False]) else None
    return DrawOptions("nucleus", column([0.05, 0.7, 1.0, 3.0], torch.float32), least, top_k, top_p, int(top_k.max()))


def random_logits(make: torch.Generator, rows: int, vocab: int) -> torch.Tensor:
    """Part of a wider tensor, as padding columns are cut off; with ties in half of the cases."""
    wide = torch.randn(rows, vocab + 5, generator=make) * pick(make, [0.0, 1.0, 4.0, 30.0])
    if pick(make, [True, False]):
        wide = (wide * 2).round() / 2
    wide[:, vocab:] = 1e9
    if vocab > 2 and pick(make, [True, False]):
        wide[:, 1] = float("-inf")
    return wide[:, :vocab]


def allowed(logits: torch.Tensor, options: DrawOptions) -> list[list[int]]:
    """The ids that may be drawn, ascending."""
    weights, ids = kept(logits, logits.max(dim=-1).values, options)
    assert ids is not None
    return [sorted(i[v > 0].tolist()) for i, v in zip(ids, weights, strict=True)]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("vocab", VOCABS)
def test_it_draws_what_the_reference_draws(isa, vocab, make, monkeypatch):
    use(monkeypatch, isa)
    args = DrawArgs(vocab, "cpu")
    native, reference = bind_draw(args), draw_reference(args)
    different = total = 0
    for _ in range(12):
        rows = pick(make, [1, 2, 5])
        logits, options = random_logits(make, rows, vocab), random_options(make, rows, vocab)
        best = logits.max(dim=-1).values
        for u in (*EDGES, *torch.rand(4, generator=make, dtype=torch.float64).tolist()):
            uniforms = torch.full((rows,), u, dtype=torch.float64)
            different += int((native(logits, best, options, uniforms) != reference(logits, best, options, uniforms)).sum())
            total += rows
    assert different <= max(2, total // 50), (different, total)  # exp differs in its last bits: draws at a border may move


@pytest.mark.parametrize("isa", isas())
def test_the_edges_of_what_is_kept_are_the_references(isa, make, monkeypatch):
    """The smallest and the largest uniform number give the first and the last id that stays: no border is off by one."""
    use(monkeypatch, isa)
    off = 0
    for vocab in (16, 300, 4000):
        native = bind_draw(DrawArgs(vocab, "cpu"))
        for _ in range(10):
            logits, options = random_logits(make, 4, vocab), random_options(make, 4, vocab)
            best, ids = logits.max(dim=-1).values, allowed(logits, options)
            first = native(logits, best, options, torch.zeros(4, dtype=torch.float64)).tolist()
            last = native(logits, best, options, torch.full((4,), 1 - 2.0**-53, dtype=torch.float64)).tolist()
            assert all(low <= high for low, high in zip(first, last, strict=True))
            off += sum(i[0] != low or i[-1] != high for i, low, high in zip(ids, first, last, strict=True))
    assert off <= 3, off  # of 120 rows; a nucleus may end within the last bit of a sum


@pytest.mark.parametrize("isa", isas())
def test_a_row_is_the_same_alone_and_among_others_on_any_number_of_threads(isa, make, monkeypatch):
    vocab, rows = 5000, 9
    logits, options = random_logits(make, rows, vocab), random_options(make, rows, vocab)
    best, uniforms = logits.max(dim=-1).values, torch.rand(rows, generator=make, dtype=torch.float64)
    drawn = []
    for threads in (1, 3):
        use(monkeypatch, isa, threads)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        native = bind_draw(DrawArgs(vocab, "cpu"))
        drawn.append(native(logits, best, options, uniforms).tolist())
        for i in range(rows):
            part = slice(i, i + 1)
            least = None if options.min_weight is None else options.min_weight[part]
            one = DrawOptions("nucleus", options.temperature[part], least, options.top_k[part], options.top_p[part], options.list_length)
            assert native(logits[part], best[part], one, uniforms[part]).tolist() == drawn[-1][i : i + 1]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("isa", isas())
def test_rows_without_a_finite_logit_give_some_valid_id(isa, make, monkeypatch):
    use(monkeypatch, isa)
    for vocab in (1, 16, 50, 3000):
        native = bind_draw(DrawArgs(vocab, "cpu"))
        for poison in (float("nan"), float("inf"), float("-inf")):
            logits = torch.randn(6, vocab, generator=make)
            logits[::2] = poison
            logits[1, int(torch.randint(vocab, (1,), generator=make))] = poison
            options = random_options(make, 6, vocab)
            for best in (logits.max(dim=-1).values, torch.nan_to_num(logits).max(dim=-1).values):
                ids = native(logits, best, options, torch.rand(6, generator=make, dtype=torch.float64))
                assert ((ids >= 0) & (ids < vocab)).all()


@pytest.mark.parametrize("isa", isas())
def test_equal_logits_are_kept_from_the_lowest_id(isa, monkeypatch):
    use(monkeypatch, isa)
    native = bind_draw(DrawArgs(70, "cpu"))
    options = DrawOptions("short", torch.ones(1), None, torch.tensor([33]), torch.ones(1, dtype=torch.float64), 33)
    seen = {int(native(torch.zeros(1, 70), torch.zeros(1), options, torch.tensor([u / 330], dtype=torch.float64))) for u in range(330)}
    assert seen == set(range(33))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("vocab", VOCABS)
def test_ranks_and_best_tokens_are_the_references(isa, vocab, make, monkeypatch):
    use(monkeypatch, isa)
    args = DrawArgs(vocab, "cpu")
    native, reference = bind_token_ranks(args), token_ranks_reference(args)
    for top in {0, 1, min(5, vocab), min(64, vocab), vocab}:
        rows = pick(make, [1, 2, 5])
        logits = random_logits(make, rows, vocab)
        best, ids = logits.max(dim=-1).values, torch.randint(vocab, (rows,), generator=make)
        ranks, top_ids, totals = native(logits, best, ids, top)
        wanted_ranks, wanted_ids, wanted_totals = reference(logits, best, ids, top)
        assert ranks.tolist() == wanted_ranks.tolist()
        assert top_ids.tolist() == wanted_ids.tolist()
        torch.testing.assert_close(totals.double(), wanted_totals.double(), rtol=1e-6, atol=8 * vocab)


@pytest.mark.parametrize("isa", isas())
def test_ranks_of_rows_with_nan_stay_in_bounds(isa, make, monkeypatch):
    use(monkeypatch, isa)
    native = bind_token_ranks(DrawArgs(50, "cpu"))
    logits = torch.randn(4, 50, generator=make)
    logits[0], logits[1, 3], logits[2] = float("nan"), float("nan"), float("-inf")
    ranks, top_ids, _ = native(logits, logits.max(dim=-1).values, torch.randint(50, (4,), generator=make), 7)
    assert ((ranks >= 1) & (ranks <= 50)).all() and ((top_ids >= 0) & (top_ids < 50)).all()
