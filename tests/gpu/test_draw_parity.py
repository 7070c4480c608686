"""The draw on GPUs against the reference: every kind, ties, uneven options; in the interpreter with the reference's own `exp`."""

import random

import numpy as np
import pytest
import torch
from reference import DEVICE, INTERPRETED, fresh_seed, needs_kernels

from hexad.operators import token_weights
from hexad.operators.args import DrawArgs
from hexad.operators.draw import DrawOptions, draw_reference, kept
from hexad.operators.token_ranks import token_ranks_reference

pytestmark = needs_kernels
VOCAB = 1_501 if INTERPRETED else 3_001
RANKED = 4_500 if INTERPRETED else 49_152


def numpy_weigh(shifted):
    """The interpreter's exp is numpy's."""
    return torch.from_numpy((np.exp(shifted.numpy()) * np.float32(token_weights.SCALE)).astype(np.int64))


@pytest.fixture(autouse=True)
def same_exp(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(token_weights, "weigh", numpy_weigh)


def options_of(kind, rows, vocab, *, min_p=False):
    """Random options that a group of this kind may have."""
    longest = 40 if kind == "short" else vocab
    top_k = [vocab] * rows
    if kind != "dense":
        top_k = [random.choice([1, 2, random.randint(1, longest), longest]) for _ in range(rows)]
    top_p = [1.0 if kind == "dense" else random.choice([1.0, 0.9, 0.5, 0.05, 0.999, random.random()]) for _ in range(rows)]
    least = [random.choice([0, token_weights.SCALE // 100, token_weights.SCALE // 3]) for _ in range(rows)]
    return DrawOptions(
        kind,
        torch.tensor([random.choice([1.0, 0.7, 0.3, 1.9]) for _ in range(rows)], device=DEVICE),
        torch.tensor(least, device=DEVICE) if min_p else None,
        torch.tensor(top_k, device=DEVICE),
        torch.tensor(top_p, dtype=torch.float64, device=DEVICE),
        max(top_k),
    )


def logits_of(shape, rows, vocab):
    wide = torch.randn(rows, vocab + 7) * random.choice([0.5, 2.0, 6.0])
    if shape == "ties":
        wide = wide.to(torch.bfloat16).float()
    elif shape == "few values":
        wide = wide.sign() * (torch.rand_like(wide) > 0.5)
    elif shape == "equal":
        wide[:] = 3.25
    wide[:, vocab:] = 100.0  # padding is never drawn
    return wide.to(DEVICE)[:, :vocab]


def bind(vocab):
    from hexad.operators.triton.draw import bind_draw

    return bind_draw(DrawArgs(vocab, DEVICE))


def compare(shape, kind, rows, vocab, *, min_p):
    logits, options = logits_of(shape, rows, vocab), options_of(kind, rows, vocab, min_p=min_p)
    best = logits.max(dim=-1).values
    uniforms = torch.rand(rows, dtype=torch.float64, device=DEVICE)
    uniforms[0], uniforms[-1] = 0.0, 1 - 2**-53
    got = bind(vocab)(logits, best, options, uniforms)
    wanted = draw_reference(DrawArgs(vocab, DEVICE))(logits, best, options, uniforms)
    assert torch.equal(got, wanted), (got.tolist(), wanted.tolist(), options)


@pytest.mark.parametrize("shape", ["smooth", "ties", "few values", "equal"])
@pytest.mark.parametrize("kind", ["dense", "short", "nucleus"])
def test_draws_are_those_of_the_reference(shape, kind):
    fresh_seed()
    for min_p in (False, True):
        compare(shape, kind, 4 if INTERPRETED else 300, VOCAB, min_p=min_p)


@pytest.mark.parametrize("shape", ["smooth", "ties", "few values"])
def test_programs_of_few_threads(shape, monkeypatch):
    from hexad.operators.triton import draw

    fresh_seed()
    monkeypatch.setattr(draw, "WARPS", (1, 2))
    monkeypatch.setattr(draw, "SHORT", random.choice([1, 20, 200]))
    for kind in ("short", "nucleus"):
        compare(shape, kind, 4 if INTERPRETED else 300, VOCAB, min_p=False)


@pytest.mark.parametrize("shape", ["smooth", "few values"])
@pytest.mark.parametrize("longest", [1, 40, 300])
def test_rows_whose_tokens_do_not_fit_a_list(shape, longest, monkeypatch):
    """Their tier is divided, and where that does not help, they are read whole."""
    from hexad.operators.triton import draw

    fresh_seed()
    monkeypatch.setattr(draw, "MOST_LISTED", longest)
    for kind in ("short", "nucleus"):
        compare(shape, kind, 4 if INTERPRETED else 300, VOCAB, min_p=True)


def test_flat_rows_are_divided_and_picked_from(monkeypatch):
    """A nucleus of most of the vocabulary: an eighth of its tier is listed for the border, the draw comes from blocks."""
    from hexad.operators.triton import draw, draw_blocks

    fresh_seed()
    states, launchers = [], draw.launchers

    def watched(vocab):
        kernels = launchers(vocab)
        picks = kernels["pick planned"]

        def pick(grid, *args):
            states.append(args[4][:, draw_blocks.STATE.value].tolist())
            picks(grid, *args)

        return kernels | {"pick planned": pick}

    monkeypatch.setattr(draw, "launchers", watched)
    rows, vocab = (4, 4_500) if INTERPRETED else (200, 49_152)
    monkeypatch.setattr(draw, "MOST_LISTED", vocab // 4)
    for scale in (0.02, 0.3, 1.0):
        logits = (torch.randn(rows, vocab) * scale).to(DEVICE)
        best, top_p = logits.max(dim=-1).values, [0.5, 0.9, 0.99, 1.0] * (rows // 4)
        ones = torch.ones(rows, device=DEVICE)
        options = DrawOptions(
            "nucleus", ones, None, torch.full((rows,), vocab, device=DEVICE), torch.tensor(top_p, dtype=torch.float64, device=DEVICE), vocab
        )
        uniforms = torch.rand(rows, dtype=torch.float64, device=DEVICE)
        uniforms[0], uniforms[-1] = 0.0, 1 - 2**-53
        got = bind(vocab)(logits, best, options, uniforms)
        assert torch.equal(got, draw_reference(DrawArgs(vocab, DEVICE))(logits, best, options, uniforms))
    assert len(states) == 3
    divided, picked = draw_blocks.DIVIDED.value, draw_blocks.PICKED.value
    for state in states:  # 0.5 and 0.9 are divided where an eighth of their tier fits a list
        assert set(state[2::4]) == {divided}, states
        assert set(state[3::4]) <= {divided, picked}, states  # a whole of over 2**53, rounded, may lie above its own limit
    assert set(states[-1][3::4]) == {picked}, states


def test_a_row_of_many_blocks():
    """The border, and the drawn token, in any of them."""
    fresh_seed()
    for kind in ("dense", "short", "nucleus"):
        compare(random.choice(["smooth", "ties"]), kind, 3 if INTERPRETED else 150, 6_200 if INTERPRETED else 128_256, min_p=True)


@pytest.mark.parametrize("kind", ["dense", "nucleus"])
def test_borders_of_a_row_are_exact(kind):
    """Uniforms that point at the first and the last kept token, where one token more or less would move the draw."""
    fresh_seed()
    logits, options = logits_of("ties", 1, VOCAB), options_of(kind, 1, VOCAB)
    best = logits.max(dim=-1).values
    weights, ids = kept(logits, best, options)
    ids = torch.arange(VOCAB, device=DEVICE)[None] if ids is None else ids
    alive = ids[weights > 0].sort().values
    draw = bind(VOCAB)
    for uniform, token in ((0.0, alive[0]), (1 - 2**-53, alive[-1])):
        assert draw(logits, best, options, torch.tensor([uniform], dtype=torch.float64, device=DEVICE)) == token


def test_rows_that_are_not_finite_end():
    fresh_seed()
    logits = logits_of("smooth", 4, VOCAB)
    logits[0], logits[1, 17], logits[2, 5] = float("-inf"), float("nan"), float("inf")
    best = logits.max(dim=-1).values
    uniforms = torch.rand(4, dtype=torch.float64, device=DEVICE)
    for kind in ("dense", "short", "nucleus"):
        options = options_of(kind, 4, VOCAB)
        drawn = bind(VOCAB)(logits, best, options, uniforms)
        assert bool(((drawn >= 0) & (drawn < VOCAB)).all())
        assert drawn[3] == draw_reference(DrawArgs(VOCAB, DEVICE))(logits, best, options, uniforms)[3]


@pytest.mark.parametrize("shape", ["smooth", "ties", "few values", "equal"])
@pytest.mark.parametrize("top", [0, 1, 5, 32, 33])
def test_ranks_and_best_tokens_are_those_of_the_reference(shape, top):
    from hexad.operators.triton.ranks import bind_token_ranks

    fresh_seed()
    args, rows = DrawArgs(RANKED, DEVICE), 3 if INTERPRETED else 70
    logits = logits_of(shape, rows, RANKED)
    logits[0, random.randrange(RANKED)] = float("-inf")  # what a mask leaves out
    best, ids = logits.max(dim=-1).values, torch.randint(RANKED, (rows,), device=DEVICE)
    ranks, top_ids, totals = bind_token_ranks(args)(logits, best, ids, top)
    wanted_ranks, wanted_ids, wanted_totals = token_ranks_reference(args)(logits, best, ids, top)
    assert torch.equal(ranks, wanted_ranks) and torch.equal(top_ids, wanted_ids)
    torch.testing.assert_close(totals.double(), wanted_totals.double(), rtol=1e-6, atol=8 * RANKED)


def test_ranks_of_rows_that_are_not_finite_stay_in_bounds():
    from hexad.operators.triton.ranks import bind_token_ranks

    fresh_seed()
    logits = logits_of("smooth", 4, VOCAB)
    logits[0], logits[1, 3], logits[2, 5] = float("-inf"), float("nan"), float("inf")
    ranks, top_ids, _ = bind_token_ranks(DrawArgs(VOCAB, DEVICE))(
        logits, logits.max(dim=-1).values, torch.randint(VOCAB, (4,), device=DEVICE), 7
    )
    assert bool(((ranks >= 1) & (ranks <= VOCAB)).all()) and bool(((top_ids >= 0) & (top_ids < VOCAB)).all())
    assert bool((top_ids.sort(dim=-1).values.diff(dim=-1) > 0).all())  # each once
