"""Attention of optional libraries: what they are given, with stand-ins that keep to their contracts. `tests/gpu` has the real ones."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from hexad.common.errors import ConfigError
from hexad.operators.args import AttentionArgs
from hexad.operators.batch import AttentionBatch, KVPages
from hexad.operators.libraries import fastest, flash_attn, flashinfer, provider
from hexad.operators.libraries.fastest import Fastest
from hexad.operators.libraries.pages import own_pages
from hexad.operators.libraries.prompts import LEAST_QUERIES, PromptAttention, parts
from hexad.operators.libraries.prompts import bind as load_prompts
from hexad.operators.load import load_operators

BLOCK, PAGES = 4, 40
ARGS = AttentionArgs(4, 2, 8, 0.3, None, None, BLOCK, torch.bfloat16, torch.bfloat16, "cuda")


@pytest.fixture
def make() -> torch.Generator:
    seed = time.time_ns() % 2**31
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def attend_row(q, k, v, *, scale, softcap):
    """q [n, H, D] at the end of k, v [m, G, D], in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    n, m = q.shape[0], k.shape[0]
    place, keys = torch.arange(n)[:, None] + m - n, torch.arange(m)[None]
    seen = keys <= place
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


def fake_flash_attn():
    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
                               softcap):  # fmt: skip
        assert causal and page_table.dtype == cu_seqlens_q.dtype == seqused_k.dtype == torch.int32
        assert bool((page_table >= 0).all())  # any of them may be looked up
        out = torch.zeros_like(q)
        for row, length in enumerate(seqused_k.tolist()):
            low, high = cu_seqlens_q[row], cu_seqlens_q[row + 1]
            assert high - low <= max_seqlen_q and length <= max_seqlen_k
            if length:
                keys, values = (x[page_table[row].long()].flatten(0, 1)[:length] for x in (k, v))
                out[low:high] = attend_row(q[low:high], keys, values, scale=softmax_scale, softcap=softcap).to(q.dtype)
        return out, None

    package, module = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    package.cute = module
    return {"flash_attn": package, "flash_attn.cute": module}


def fake_flashinfer(plans):
    class Wrapper:
        def __init__(self, workspace, layout):
            assert workspace.dtype == torch.uint8 and layout == "NHD"

        def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim,
                 page_size, *, causal, sm_scale, logits_soft_cap, q_data_type, kv_data_type):  # fmt: skip
            assert causal and (num_qo_heads, num_kv_heads, head_dim, page_size) == (4, 2, 8, BLOCK) and q_data_type == kv_data_type
            assert not qo_indptr.is_cuda and not paged_kv_indptr.is_cuda and paged_kv_indptr[-1] == len(paged_kv_indices)
            assert bool((paged_kv_last_page_len >= 1).all() and (paged_kv_last_page_len <= page_size).all())
            self.rows = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
            self.options = {"scale": sm_scale, "softcap": logits_soft_cap}
            plans.append(self)

        def run(self, q, kv):
            out = torch.zeros_like(q)
            queries, starts, pages, last = self.rows
            for row in range(len(last)):
                low, high = queries[row], queries[row + 1]
                mine = pages[starts[row] : starts[row + 1]].long()
                length = (len(mine) - 1) * BLOCK + int(last[row])
                keys, values = (x[mine].flatten(0, 1)[:length] for x in kv)
                if high > low and length >= high - low:
                    out[low:high] = attend_row(q[low:high], keys, values, **self.options).to(q.dtype)
            return out

    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    return {"flashinfer": module}


def step(make, lengths, queries, block=BLOCK):
    """A mixed step; entries of the table behind a row's last page are -1."""
    counts = [-(-length // block) for length in lengths]
    order, table = torch.randperm(PAGES, generator=make).tolist(), torch.full((len(lengths), max(counts) + 2), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor(order[:count], dtype=torch.int32)
        order = order[count:]
    start = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    return AttentionBatch(
        query_start=start, seq_lens=torch.tensor(lengths, dtype=torch.int32), block_table=table, slots=torch.full((int(start[-1]),), -1),
        max_query_len=max(queries), max_seq_len=max(lengths) + 3, block_size=block, num_decodes=0,
    )  # fmt: skip


@pytest.mark.parametrize("library", ["flash_attn", "flashinfer"])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_a_mixed_step_is_what_the_reference_gives(library, softcap, make, monkeypatch):
    plans = []
    for name, module in (fake_flash_attn() if library == "flash_attn" else fake_flashinfer(plans)).items():
        monkeypatch.setitem(sys.modules, name, module)
    args = replace(ARGS, softcap=softcap)
    call = {"flash_attn": flash_attn, "flashinfer": flashinfer}[library].bind(args)
    reference = load_operators().reference("paged_attention", replace(args, device_type="cpu"))
    lengths, queries = [1, 9, 16, 7, 0], [1, 1, 6, 7, 1]  # the last is a padding row
    batch = step(make, lengths, queries)
    for _ in range(2):  # two layers of one step
        q = torch.randn(sum(queries), 4, 8, generator=make).bfloat16()
        kv = KVPages(*(torch.randn(PAGES, BLOCK, 2, 8, generator=make).bfloat16() for _ in range(2)))
        live = slice(0, sum(queries[:-1]))
        torch.testing.assert_close(call(q, kv, batch)[live].float(), reference(q, kv, batch)[live].float(), atol=2e-2, rtol=2e-2)
    assert len(plans) == (library == "flashinfer")  # one plan a step, whatever the layers


def test_the_own_kernels_stay_the_choice_and_reasons_are_told(monkeypatch):
    pytest.importorskip("triton")
    registry, args = load_operators(), replace(ARGS, head_dim=64, block_size=64)
    monkeypatch.setattr(provider, "installed", lambda name: name == "flash_attn")
    listed = {c.provider: c for c in registry.explain("paged_attention", args)}
    assert listed["triton"].chosen
    assert listed["flash_attn"].reasons == () and not listed["flash_attn"].chosen
    assert listed["flashinfer"].reasons == ("flashinfer-python is not installed",)
    forced = {c.provider: c.chosen for c in registry.explain("paged_attention", args, {"paged_attention": "flash_attn"})}
    assert forced["flash_attn"]
    for change, word in (
        ({"device_type": "cpu"}, "not on cuda"),
        ({"dtype": torch.float32}, "float32"),
        ({"kv_dtype": torch.float8_e4m3fn}, "pages are in"),
        ({"head_dim": 300}, "head size 300"),
        ({"head_dim": 72}, "not a multiple of 16"),
        ({"block_size": 48}, "block size 48"),  # what the own kernels cannot take: they do the rest of a step
    ):
        assert any(word in reason for reason in provider.reasons_of("flash_attn", replace(args, **change))), change
    monkeypatch.setattr(provider, "installed", lambda name: True)
    assert any("not 64, 128 or 256" in reason for reason in provider.reasons_of("flashinfer", replace(args, head_dim=96)))
    assert not provider.reasons_of("flashinfer", replace(args, head_dim=128))
    monkeypatch.setattr(provider, "_capability", lambda: 100)
    assert any("on a card of this kind" in reason for reason in provider.reasons_of("flash_attn", replace(args, head_dim=192)))
    monkeypatch.setattr(provider, "_capability", lambda: 86)
    assert any("older than compute capability 9.0" in reason for reason in provider.reasons_of("flash_attn", args))
    assert not provider.reasons_of("flashinfer", args)


def prompts_of(reference, seen):
    """Stand-ins for a library and the own kernels that note the rows they are given."""

    def kernel(name):
        def attend(q, kv, batch):
            seen.append((name, batch.seq_lens.tolist(), (batch.query_start[1:] - batch.query_start[:-1]).tolist(), batch.max_query_len))
            assert batch.query_start[0] == 0 and len(q) == batch.query_start[-1] == len(batch.slots)
            return reference(q, kv, batch)

        return attend

    library = kernel("library")
    return PromptAttention(lambda *_: library, kernel("own"))


def test_the_library_computes_long_prompts_and_the_own_kernels_the_rest(make):
    args = replace(ARGS, device_type="cpu", block_size=64)
    reference = load_operators().reference("paged_attention", args)
    cases = (
        ([9, 700, 16, 1400], [1, 1, 16, LEAST_QUERIES + 6], 2, ["own", "library"]),
        ([LEAST_QUERIES, 20], [LEAST_QUERIES, 20], 0, ["library"]),
        ([9, 700, 600], [1, 1, LEAST_QUERIES - 1], 2, ["own"]),
        ([9, 700], [1, 1], 2, ["own"]),
    )
    for lengths, queries, decodes, wanted in cases:
        seen = []
        call = prompts_of(reference, seen)
        batch = replace(step(make, lengths, queries, 64), num_decodes=decodes)
        for _ in range(2):  # two layers of one step
            q = torch.randn(sum(queries), 4, 8, generator=make).bfloat16()
            kv = KVPages(*(torch.randn(PAGES, 64, 2, 8, generator=make).bfloat16() for _ in range(2)))
            torch.testing.assert_close(call(q, kv, batch), reference(q, kv, replace(batch, scratch={})))
            assert call.takes(q, kv, batch) == ("library" in wanted)
        assert [name for name, *_ in seen] == wanted * 2
        if wanted == ["own", "library"]:
            assert seen[0][1:] == (lengths[:2], [1, 1], 1) and seen[1][1:] == (lengths[2:], queries[2:], max(queries))


def test_shapes_without_memory_are_left_to_the_own_kernels():
    seen = []
    call = PromptAttention(lambda *_: seen.append("library"), lambda *_: seen.append("own"))
    batch = AttentionBatch(*(torch.empty(2, dtype=torch.int32, device="meta") for _ in range(4)), 4096, 4096, 64, 0)
    call(torch.empty(4096, 4, 8, device="meta"), None, batch)
    assert seen == ["own"]


def test_compiled_code_is_kept_in_the_cache_folder(monkeypatch, tmp_path):
    for name, module in fake_flash_attn().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("HEXAD_CACHE", str(tmp_path))
    for name in ("ENABLED", "DIR"):
        monkeypatch.delenv(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}", raising=False)
        monkeypatch.setattr(flash_attn.os, "environ", dict(flash_attn.os.environ))
    flash_attn.bind(ARGS)
    assert flash_attn.os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(tmp_path / "flash_attn")
    assert flash_attn.os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"


def test_an_older_package_of_the_name_is_not_taken_for_it(monkeypatch):
    monkeypatch.setattr(provider.importlib.util, "find_spec", lambda _name: object())  # FlashAttention 2 has a `cute` folder, too
    assert provider.installed.__wrapped__("flash_attn") is False
    monkeypatch.undo()
    monkeypatch.setattr(provider.importlib.metadata, "version", lambda _name: "4.0.0")
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))  # no `cute` inside
    assert provider.installed.__wrapped__("flash_attn") is False


def test_measurement_chooses_for_each_class_of_steps(make):
    args = replace(ARGS, device_type="cpu", block_size=64, scale=random.random())  # choices are kept by arguments
    reference = load_operators().reference("paged_attention", args)
    own, other = (lambda q, kv, batch: reference(q, kv, batch)), (lambda q, kv, batch: reference(q, kv, batch))
    times, timed = {}, []

    def seconds(call):
        call()
        timed.append(kernel := call.__defaults__[0])
        return times[kernel]

    call = PromptAttention(Fastest(args, {"triton": own, "library": other}, seconds), own)
    chosen = []

    def run(lengths, queries, decodes=0):
        batch = replace(step(make, lengths, queries, 64), num_decodes=decodes)
        q = torch.randn(sum(queries), 4, 8, generator=make).bfloat16()
        kv = KVPages(*(torch.randn(PAGES, 64, 2, 8, generator=make).bfloat16() for _ in range(2)))
        torch.testing.assert_close(call(q, kv, batch), reference(q, kv, replace(batch, scratch={})))
        chosen.append(call.choose(q[decodes:], kv, parts(batch)[1]) if call.takes(q, kv, batch) else own)

    times.update({own: 1.0, other: 0.5})
    run([600], [600])
    run([1000], [1000])  # the same class: nothing is timed
    assert chosen == [other, other] and timed == [own, other]
    times.update({own: 1.0, other: 0.98})
    run([9, 1300], [1, 600], 1)  # behind many keys: another class, and too close to change
    assert chosen[-1] is own and len(timed) == 4
    times.update({own: 2.0, other: 1.0})
    run([600, 600], [600, 600])  # more prompts
    run([9, 600], [1, 600], 1)  # decode rows beside a prompt of the first class
    run([9, 300], [1, 300], 1)
    assert chosen[-3:] == [other, other, own] and len(timed) == 6
    second = Fastest(args, {"triton": own, "library": other}, seconds)  # another layer
    assert second(torch.randn(600, 4, 8).bfloat16(), None, step(make, [600], [600], 64)) is other and len(timed) == 6


def test_a_library_that_fails_is_left_alone(make, monkeypatch, caplog):
    args = replace(ARGS, device_type="cpu", block_size=64, scale=random.random())
    monkeypatch.setattr(fastest, "_broken", set())
    reference = load_operators().reference("paged_attention", args)
    asked = []

    def fails(_q, _kv, _batch):
        asked.append(1)
        raise RuntimeError("no nvcc")

    def seconds(call):
        call()
        return 1.0

    choose = Fastest(args, {"triton": reference, "library": fails}, seconds)
    for queries in (600, 1200):
        q = torch.randn(queries, 4, 8, generator=make).bfloat16()
        kv = KVPages(*(torch.randn(PAGES, 64, 2, 8, generator=make).bfloat16() for _ in range(2)))
        assert choose(q, kv, step(make, [queries], [queries], 64)) is reference
    assert asked == [1] and "attention by library fails (RuntimeError: no nvcc)" in caplog.text
    with pytest.raises(RuntimeError, match="no nvcc"):  # nothing could take its place
        Fastest(args, {"triton": fails}, seconds)(q, kv, step(make, [600], [600], 64))


def test_entries_without_a_page_name_another_of_the_row():
    table = torch.tensor([[5, 2, -1, -1], [7, -1, -1, -1], [-1, -1, -1, -1]], dtype=torch.int32)
    none = torch.zeros(1, dtype=torch.int32)
    batch = AttentionBatch(none, none, table, none, 1, 1, BLOCK, 0)
    assert own_pages(batch).tolist() == [[5, 2, 5, 5], [7, 7, 7, 7], [0, 0, 0, 0]] and own_pages(batch) is own_pages(batch)


def test_keys_of_decode_rows_are_not_the_prompts(make):
    """A class is one of prompts: what a decode row beside them looks back on is not in it."""
    batch = replace(step(make, [1300, 600], [1, 600], 64), num_decodes=1, max_prompt_len=600)
    assert fastest.class_of(parts(batch)[1]) == fastest.class_of(step(make, [600], [600], 64))


@pytest.mark.parametrize(
    ("capability", "more", "reason"),
    [
        (120, {}, "does not page keys"),
        (90, {"block_size": 128}, "read beyond a row's last key"),
        (90, {"window": 100}, "before a window would reach the result"),
    ],
)
def test_what_flash_attention_would_refuse_or_spoil(capability, more, reason, monkeypatch):
    monkeypatch.setattr(provider, "installed", lambda _name: True)
    monkeypatch.setattr(provider, "_capability", lambda: capability)
    args = replace(ARGS, **({"head_dim": 64, "block_size": 64} | more))
    assert any(reason in found for found in provider.reasons_of("flash_attn", args))


def test_measured_needs_a_library(monkeypatch):
    pytest.importorskip("triton")
    registry, args = load_operators(), replace(ARGS, head_dim=64, block_size=64)
    monkeypatch.setattr(provider, "installed", lambda name: False)
    with pytest.raises(ConfigError, match="flash-attn-4: flash-attn-4 is not installed; flashinfer-python: "):
        registry.bind("paged_attention", args, {"paged_attention": "measured"})
    monkeypatch.setattr(provider, "installed", lambda name: name == "flashinfer")
    listed = {c.provider: c for c in registry.explain("paged_attention", args)}
    assert listed["triton"].chosen and listed["measured"].reasons == ()


@pytest.mark.parametrize("error", [ImportError("libcuda.so.1 is missing"), RuntimeError("wrong torch")])
def test_a_broken_library_is_named(error, monkeypatch):
    pytest.importorskip("triton")
    args = replace(ARGS, head_dim=64, block_size=64)
    monkeypatch.setattr(provider, "installed", lambda name: name == "flash_attn")

    def broken(_name):
        raise error

    monkeypatch.setattr(flash_attn.importlib, "import_module", broken)
    with pytest.raises(ConfigError, match=f"flash-attn-4 is installed, but cannot be loaded .{type(error).__name__}: {error}"):
        load_prompts("flash_attn", args)
