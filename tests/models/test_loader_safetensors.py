"""Safetensors through the loader: every tensor equal to what transformers saved; damaged files are refused, never trusted."""

from __future__ import annotations

import json
import random
import struct

import pytest
import torch
from model_files import damaged, fresh_seed, save_llama, tiny_spec
from safetensors.torch import load_file, save_file

from hexad.common.errors import ModelError, WeightsError
from hexad.models.formats.safetensors import read_header
from hexad.models.loader import open_weights


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [None, 8_000])
def test_every_tensor_equals_the_checkpoint(tmp_path, tied, shard_bytes):
    saved = save_llama(tmp_path, fresh_seed(), shard_bytes=shard_bytes, tie_word_embeddings=tied)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes is not None)
    store = open_weights(tmp_path, tiny_spec(tied=tied))
    expected = set(saved) - ({"lm_head.weight"} if tied else set())
    assert set(store.names()) == expected
    for name in expected:
        handle = store.get(name)
        assert torch.equal(handle.load(), saved[name])
        assert handle.shape == tuple(saved[name].shape)
        assert handle.nbytes == saved[name].nbytes
        assert handle.format == "float32"
    store.finish()


def test_slices_read_what_indexing_reads(tmp_path):
    seed = fresh_seed()
    saved = save_llama(tmp_path, seed)
    rng = random.Random(seed)
    store = open_weights(tmp_path, tiny_spec())
    for name, whole in saved.items():
        handle, part = store.get(name), whole
        for _ in range(3):
            dim = rng.randrange(part.dim())
            start = rng.randint(0, part.shape[dim])
            stop = rng.randint(start, part.shape[dim])
            handle, part = handle.slice(dim, start, stop), part.narrow(dim, start, stop - start)
            assert handle.shape == tuple(part.shape)
        assert torch.equal(handle.load(), part)
        assert torch.equal(handle.load(torch.bfloat16), part.to(torch.bfloat16))
    with pytest.raises(WeightsError, match=r"no part \[3:99\]"):
        store.get("model.norm.weight").slice(0, 3, 99)


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(tmp_path):
    saved = save_llama(tmp_path, fresh_seed())
    open_weights(tmp_path, tiny_spec()).get("model.norm.weight").load().zero_()
    assert torch.equal(open_weights(tmp_path, tiny_spec()).get("model.norm.weight").load(), saved["model.norm.weight"])


def test_missing_and_left_over_tensors_are_named(tmp_path):
    saved = save_llama(tmp_path, fresh_seed())
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # computed by networks: ignored
    tensors["model.layers.0.surprise.weight"] = torch.ones(4)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    store = open_weights(tmp_path, tiny_spec())
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing; nearest: .*up_proj"):
        store.get("model.layers.1.mlp.up_proj.weight")
    for name in saved:
        if store.has(name):
            store.get(name)
    assert store.unused() == ["model.layers.0.surprise.weight"]
    with pytest.raises(WeightsError, match=r"surprise"):
        store.finish()


def test_missing_shard_is_named(tmp_path):
    save_llama(tmp_path, fresh_seed(), shard_bytes=8_000)
    victim = sorted(tmp_path.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(WeightsError, match=victim.name):
        open_weights(tmp_path, tiny_spec())


def test_an_index_cannot_leave_its_folder(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(WeightsError, match="leaves the folder"):
        open_weights(tmp_path, tiny_spec())


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_text_part_of_a_multimodal_checkpoint(tmp_path, prefix):
    tensors = {f"{prefix}embed_tokens.weight": torch.ones(4, 2), "vision_tower.x.weight": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    store = open_weights(tmp_path, tiny_spec(tied=True))
    assert torch.equal(store.get("model.embed_tokens.weight").load(), torch.ones(4, 2))
    store.finish()


def test_b42_tie_flag_and_output_head(tmp_path):
    """Tied without lm_head, tied with a duplicate, untied with it: load. Untied without: an error that names it."""
    seed = fresh_seed()
    saved = save_llama(tmp_path, seed)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)

    def opened(tensors, tied):
        save_file(tensors, file)
        store = open_weights(tmp_path, tiny_spec(tied=tied))
        for name in saved:
            if name != "lm_head.weight" or not tied:
                store.get(name)
        store.finish()

    opened(whole, tied=False)
    opened(whole, tied=True)
    headless = {n: t for n, t in whole.items() if n != "lm_head.weight"}
    opened(headless, tied=True)
    with pytest.raises(WeightsError, match=r"lm_head\.weight.*missing"):
        opened(headless, tied=False)
    with pytest.raises(WeightsError, match=r"lm_head\.bias"):
        opened(headless | {"lm_head.bias": torch.ones(96)}, tied=True)


def test_damaged_files_are_always_a_model_error(tmp_path):
    seed = fresh_seed()
    rng = random.Random(seed)
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(24.0).reshape(4, 6), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.ones(5, dtype=torch.int8)}, file)
    data = file.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    refused = 0
    for _ in range(600):
        file.write_bytes(damaged(data, rng, head))
        try:
            tensors = read_header(file)
        except ModelError:
            refused += 1
            continue
        assert all(t.offset + t.nbytes <= file.stat().st_size for t in tensors.values())
    assert refused > 200


def header(entries: dict, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("entries", "data", "says"),
    [
        ({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}, b"\0" * 8, "no file can hold"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, b"\0" * 8, "no file can hold"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, b"\0" * 8, "takes 16 bytes"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, b"", "offsets"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 4, "cut short"),
        ({n: {"dtype": "F32", "shape": [2], "data_offsets": [o, o + 8]} for n, o in (("a", 0), ("b", 4))}, b"\0" * 12, "overlap"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 9, "9 bytes of data"),
        ({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4, "X9"),
        ({"a": {"shape": [1]}}, b"", "not valid"),
        ({"a": [1]}, b"", "not valid"),
    ],
)
def test_hostile_headers(tmp_path, entries, data, says):
    file = tmp_path / "model.safetensors"
    file.write_bytes(header(entries, data))
    with pytest.raises(WeightsError, match=says):
        read_header(file)


@pytest.mark.parametrize("data", [b"", b"abc", b"\xff" * 8, b"\xff" * 7 + b"\x7f" + b"{}", struct.pack("<Q", 4) + b"[" * 4])
def test_files_that_are_none(tmp_path, data):
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    with pytest.raises(WeightsError):
        open_weights(tmp_path, tiny_spec())


def test_a_deeply_nested_header_does_not_crash(tmp_path):
    file = tmp_path / "model.safetensors"
    text = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(WeightsError):
        read_header(file)


def test_dummy_weights_need_no_file(tmp_path):
    spec = tiny_spec(dtype="bfloat16")
    saved = save_llama(tmp_path, fresh_seed())
    store, again = open_weights(tmp_path / "absent", spec, "dummy"), open_weights(tmp_path / "absent", spec, "dummy")
    assert {n: store.get(n).shape for n in store.names()} == {n: tuple(t.shape) for n, t in saved.items()}
    store.finish()
    for name in store.names():
        values = store.get(name).load()
        assert values.dtype == torch.bfloat16
        assert torch.equal(values, again.get(name).load())
        center = 1.0 if name.endswith("norm.weight") else 0.0
        assert (values.float() - center).abs().max() < 5e-3
    whole, part = store.get("lm_head.weight"), store.get("lm_head.weight").slice(0, 3, 9).slice(1, 2, 5)
    assert torch.equal(part.load(torch.float32), whole.load(torch.float32)[3:9, 2:5])
    assert whole.load().unique().numel() > 20
    assert not torch.equal(whole.load(), store.get("model.embed_tokens.weight").load())
