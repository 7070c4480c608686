"""Attention of FlashAttention 4 and FlashInfer against the reference, and in the engine, where they are installed."""

from __future__ import annotations

import importlib
import random
from dataclasses import replace

import pytest
import torch

from hexad.operators.args import AttentionArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.libraries.prompts import LEAST_QUERIES
from hexad.operators.libraries.provider import installed
from hexad.operators.load import load_operators

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BLOCK = 64
ARGS = AttentionArgs(32, 8, 128, 128**-0.5, None, None, BLOCK, torch.bfloat16, torch.bfloat16, "cuda")
KINDS = {
    "plain": {},
    "softcap": {"softcap": 30.0},
    "float16": {"dtype": torch.float16, "kv_dtype": torch.float16},
    "heads of 64, 16 to a key head": {"heads": 16, "kv_heads": 1, "head_dim": 64, "scale": 64**-0.5},
    "heads of 256, no groups": {"heads": 4, "kv_heads": 4, "head_dim": 256, "scale": 256**-0.5},
    "heads of 96": {"head_dim": 96, "scale": 96**-0.5},
    "pages of 16": {"block_size": 16},
}
MEASURED = "measured"
SERVED = {"flash_attn": list(KINDS), "flashinfer": ["plain", "pages of 16"]}  # a minute or two of nvcc for each of its variants


def problem(args, rows, num_decodes=0):
    """(q, kv, batch) of rows of (queries, keys); the block table holds -1 behind a row's pages."""
    queries, lengths = zip(*rows, strict=True)
    block = args.block_size
    width = -(-max(lengths) // block)
    table = torch.full((len(rows), width + 1), -1, dtype=torch.int32)
    pages = width * len(rows)
    order = torch.randperm(pages).tolist()
    for row, length in enumerate(lengths):
        count = -(-length // block)
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    start = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    batch = AttentionBatch(
        query_start=start.cuda(), seq_lens=torch.tensor(lengths, dtype=torch.int32).cuda(), block_table=table.cuda(),
        slots=torch.full((sum(queries),), -1).cuda(), max_query_len=max(queries), max_seq_len=max(lengths), block_size=block,
        num_decodes=num_decodes,
    )  # fmt: skip
    merged = torch.randn(sum(queries), args.heads + 2 * args.kv_heads, args.head_dim, device="cuda").to(args.dtype)  # as a layer has it
    kv = KVPages(*(torch.randn(pages, block, args.kv_heads, args.head_dim, device="cuda").to(args.dtype) for _ in range(2)))
    return merged[:, : args.heads], kv, batch


def needs(library):
    if not (installed(library) if library != MEASURED else any(map(installed, SERVED))):
        pytest.skip(f"{library} is not installed")


def check(call, args, q, kv, batch):
    wanted = load_operators().reference("paged_attention", args)(q, kv, replace(batch, scratch={}))
    torch.testing.assert_close(call(q, kv, batch).float(), wanted.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("library", "kind"), [(library, kind) for library, kinds in SERVED.items() for kind in kinds])
def test_mixed_rows_agree_with_the_reference(library, kind):
    needs(library)
    args = replace(ARGS, **KINDS[kind])
    call = importlib.import_module(f"hexad.operators.libraries.{library}").bind(args)
    rows = [(1, 1), (1, 777), (64, 64), (130, 513), (1, 2048), (300, 300), (700, 1500)]
    random.shuffle(rows)
    check(call, args, *problem(args, rows))


@pytest.mark.parametrize(("library", "kind"), [(library, kind) for library in SERVED for kind in ("plain", "pages of 16")])
def test_what_others_left_in_pages_reaches_no_row(library, kind):
    """Not a number in every slot but the row's own, also in its last page."""
    needs(library)
    args = replace(ARGS, **KINDS[kind])
    call = importlib.import_module(f"hexad.operators.libraries.{library}").bind(args)
    rows = [(1, 1), (1, 777), (64, 64), (130, 513), (300, 300), (700, 1500), (513, 2049)]
    q, kv, batch = problem(args, rows)
    wanted = load_operators().reference("paged_attention", args)(q, kv, replace(batch, scratch={}))
    kept = torch.zeros(kv.k.shape[:2], dtype=torch.bool)
    table = batch.block_table.cpu()
    for row, (_queries, length) in enumerate(rows):
        for place in range(length):
            kept[table[row, place // args.block_size], place % args.block_size] = True
    for pages in (kv.k, kv.v):
        pages[~kept.cuda()] = float("nan")
    got = call(q, kv, batch)
    torch.testing.assert_close(got.float(), wanted.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("library", list(SERVED))
def test_a_distant_key_counts(library):
    needs(library)
    call = load_operators().bind("paged_attention", ARGS, {"paged_attention": library}).call
    q, kv, batch = problem(ARGS, [(600, 3000)])
    before = call(q, kv, batch)
    first_page = int(batch.block_table[0, 0])
    kv.k[first_page, 1] = 8 * kv.k[first_page, 1]
    assert not torch.equal(call(q, kv, batch), before)
    check(call, ARGS, q, kv, batch)


@pytest.mark.parametrize("library", [*SERVED, MEASURED])
def test_steps_of_decode_rows_and_prompts(library):
    needs(library)
    call = load_operators().bind("paged_attention", ARGS, {"paged_attention": library}).call
    decodes = [(1, random.randint(1, 3000)) for _ in range(random.randint(1, 40))]
    q, kv, batch = problem(ARGS, [*decodes, (3, 90), (LEAST_QUERIES, 2000), (700, 700)], len(decodes))
    assert call.takes(q, kv, batch)
    check(call, ARGS, q, kv, batch)
    q, kv, batch = problem(ARGS, [*decodes, (3, 90)], len(decodes))
    assert not call.takes(q, kv, batch)
    check(call, ARGS, q, kv, batch)


@pytest.mark.parametrize("library", [*SERVED, MEASURED])
def test_the_engine_gives_the_same_tokens(library, tmp_path, monkeypatch):
    """Long prompts beside short ones and decode rows, in several chunks, with graphs: greedy tokens as with the own kernels."""
    needs(library)
    pytest.importorskip("msgspec")
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    from hexad import LLM, SamplingParams

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=4096, head_dim=128, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).eval().float().save_pretrained(tmp_path)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    prompts = [{"prompt_token_ids": torch.randint(0, 512, (length,)).tolist()} for length in (30, 3000, 600, 5, 1500, 900)]
    options = {"max_model_len": 4096, "max_num_batched_tokens": 1024, "kv_cache_memory_bytes": 2**28, "device": "cuda", "dtype": "bfloat16"}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)

    def generate():
        with LLM(str(tmp_path), **options) as llm:
            return [result.outputs[0] for result in llm.generate(prompts, params)]

    own = generate()
    monkeypatch.setenv("HEXAD_OPS", f"paged_attention={library}")
    other = generate()
    for mine, theirs in zip(own, other, strict=True):  # a random network's logits nearly tie: only until the first other token
        for a, b, of_a, of_b in zip(mine.token_ids, theirs.token_ids, mine.logprobs, theirs.logprobs, strict=True):
            assert abs(of_a.logprob - of_b.logprob) < 0.05
            if a != b:
                break
