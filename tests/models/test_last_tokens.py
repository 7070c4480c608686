"""`ForwardInputs.last`: the hidden states of some rows' last tokens, bit for bit or nearly those of a whole forward pass."""

import dataclasses
import random

import pytest
import torch
from test_decoder_families import FAMILIES, SIZES, build, relative_error, save_random

from hexad.models.inputs import ForwardInputs, LastTokens
from hexad.operators.batch import AttentionBatch, KVPages

LENGTHS, BLOCK = (1, 1, 7, 19), 16


def step(model, ids):
    """One step of four prompts: two of one token, two longer ones."""
    spec, tokens, rows = model.spec, sum(LENGTHS), len(LENGTHS)
    groups = len(spec.kv_layer_groups)
    table = torch.randperm(groups * rows * 2, dtype=torch.int32).view(groups, rows, 2)
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    owner = torch.repeat_interleave(torch.arange(rows), torch.tensor(LENGTHS))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    slots = [table[g][owner, positions // BLOCK].long() * BLOCK + positions % BLOCK for g in range(groups)]
    batches = tuple(AttentionBatch(starts, lengths, table[g], slots[g], max(LENGTHS), max(LENGTHS), BLOCK, 2) for g in range(groups))
    shape = (groups * rows * 2, BLOCK, spec.attention.kv_heads, spec.attention.head_dim)
    kv = [KVPages(torch.zeros(shape), torch.zeros(shape)) for _ in range(spec.num_layers)]
    assert len(ids) == tokens
    return ForwardInputs(ids, positions, batches), kv


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3], [2], []], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_last_tokens_alone_are_those_of_the_whole(name, rows, tmp_path):
    seed = random.randrange(2**31)
    print("seed", seed)
    torch.manual_seed(seed)
    kind, config = FAMILIES[name]
    save_random(tmp_path, kind, **config)
    model = build(tmp_path)
    assert model.picks_last
    ids = torch.randint(SIZES["vocab_size"], (sum(LENGTHS),))
    inputs, pages = step(model, ids)
    index = inputs.attention[0].query_start[1:].long()[rows] - 1
    last = []
    for batch in inputs.attention:
        ones = torch.arange(len(rows) + 1, dtype=torch.int32)
        queries = AttentionBatch(ones, batch.seq_lens[rows], batch.block_table[rows], index, 1, max(LENGTHS), BLOCK, len(rows))
        last.append(LastTokens(index, queries))
    again = [KVPages(torch.zeros_like(p.k), torch.zeros_like(p.v)) for p in pages]
    with torch.inference_mode():
        whole = model.forward(inputs, pages)
        fresh = [dataclasses.replace(batch, slots=batch.slots.clone(), scratch={}) for batch in inputs.attention]
        got = model.forward(ForwardInputs(ids, inputs.positions.clone(), tuple(fresh), tuple(last)), again)
    assert got.shape == (len(rows), model.spec.hidden)
    assert not rows or relative_error(got, whole[index]) < 1e-5
    for first, second in zip(pages, again, strict=True):
        assert torch.equal(first.k, second.k) and torch.equal(first.v, second.v), "keys and values of all tokens are written"
