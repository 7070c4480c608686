"""ModelSpec from config.json and from GGUF metadata."""

from __future__ import annotations

import json
import math
import random

import gguf
import numpy as np
import pytest
import torch
import transformers
from model_files import add, damaged, finish, fresh_seed
from safetensors.torch import save_file

from hexad.common.errors import ModelError
from hexad.models.catalog import read_spec
from hexad.models.layers.rope import inverse_frequencies

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def spec_of(folder, config=None, generation=None, **values):
    """The spec of a transformers config, or of a plain object."""
    if config is not None:
        config(**(SIZES | values)).save_pretrained(folder)
    else:
        (folder / "config.json").write_text(json.dumps(SIZES | values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_spec(folder)


def test_llama(tmp_path):
    spec = spec_of(
        tmp_path, transformers.LlamaConfig, {"eos_token_id": [2, 7]}, dtype="float16", rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2
    )
    assert (spec.family, spec.vocab_size, spec.hidden, spec.num_layers, spec.max_len) == ("llama", 96, 32, 6, 256)
    a = spec.attention
    assert (a.heads, a.kv_heads, a.head_dim, a.scale, a.qkv_bias, a.qk_norm) == (4, 2, 8, 8**-0.5, False, False)
    assert (spec.mlp.intermediate, spec.mlp.activation, spec.norm_eps, spec.dtype) == (48, "silu", 1e-5, "float16")
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2, 7))
    assert (spec.rope.theta, spec.rope.dim, spec.rope.scaling) == (10_000.0, 8, "none")
    assert (spec.layer_kinds, spec.tied, spec.weight_format) == (("full",) * 6, False, "plain")
    assert spec.name == tmp_path.name


def test_llama_biases_and_head_dim(tmp_path):
    spec = spec_of(tmp_path, transformers.LlamaConfig, head_dim=16, attention_bias=True, mlp_bias=True)
    assert (spec.attention.head_dim, spec.attention.qkv_bias, spec.attention.out_bias, spec.mlp.bias) == (16, True, True, True)


def test_qwen(tmp_path):
    second, third = tmp_path / "2", tmp_path / "3"
    spec = spec_of(second, transformers.Qwen2Config, tie_word_embeddings=True)
    assert (spec.family, spec.attention.qkv_bias, spec.attention.out_bias, spec.tied) == ("qwen2", True, False, True)
    spec = spec_of(third, transformers.Qwen3Config, head_dim=8)
    assert (spec.family, spec.attention.qkv_bias, spec.attention.qk_norm, spec.tied) == ("qwen3", False, True, False)


def test_gemma(tmp_path):
    spec = spec_of(tmp_path, transformers.Gemma3TextConfig, head_dim=8, query_pre_attn_scalar=16, sliding_window=10)
    assert (spec.family, spec.tied, spec.attention.scale, spec.embedding_scale) == ("gemma3", True, 0.25, math.sqrt(32))
    assert spec.layer_kinds == ("sliding",) * 5 + ("full",)
    assert (spec.attention.window, spec.mlp.activation) == (10, "gelu_tanh")
    assert (spec.rope.theta, spec.extra["sliding_rope"]["theta"]) == (1_000_000.0, 10_000.0)


@pytest.mark.parametrize("nested", [True, False, None])
def test_b42_tie_flag_nested_in_a_text_config(tmp_path, nested):
    text = SIZES | {"model_type": "gemma3_text", "head_dim": 8}
    if nested is not None:
        text["tie_word_embeddings"] = nested
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "dtype": "float32"}))
    spec = read_spec(tmp_path)
    assert spec.tied is (nested if nested is not None else True)
    assert (spec.hidden, spec.dtype) == (32, "float32")


@pytest.mark.parametrize(("change", "tied"), [(None, True), ("first", False), ("last", False), ("absent", True)])
def test_b42_tied_with_a_duplicate_head(tmp_path, change, tied, caplog):
    """A copy of the embedding is redundant; a head of its own is used, with a warning, as transformers does."""
    spec_of(tmp_path, model_type="llama", tie_word_embeddings=True)
    table = torch.randn(96, 32)
    head = table.clone()
    if change in ("first", "last"):
        head[0 if change == "first" else -1, 0] += 1
    tensors = {"model.embed_tokens.weight": table} | ({} if change == "absent" else {"lm_head.weight": head})
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_spec(tmp_path).tied is tied
    assert ("differs from the embedding" in caplog.text) is not tied


@pytest.mark.parametrize(
    ("model_type", "fields", "kinds"),
    [
        ("mistral", {"sliding_window": 8}, "ssssss"),
        ("mistral", {"sliding_window": None}, "ffffff"),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 2}, "ffffff"),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, "ffssss"),
        ("qwen3", {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 3}, "fsfsfs"),
        ("qwen3", {"sliding_window": None, "layer_types": ["full_attention"] * 6}, "ffffff"),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 3}, "ssfssf"),
    ],
)
def test_b46_which_layers_have_a_window(tmp_path, model_type, fields, kinds):
    spec = spec_of(tmp_path, model_type=model_type, **fields)
    assert "".join(kind[0] for kind in spec.layer_kinds) == kinds
    assert spec.attention.window == (8 if "s" in kinds else None)


@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.parametrize(
    ("rule", "max_len"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 1024),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
            256,
        ),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16}, 512),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_rope_scaling(tmp_path, rule, max_len, old_names):
    fields = {"rope_theta": 5e5, "rope_scaling": rule} if old_names else {"rope_parameters": rule | {"rope_theta": 5e5}}
    spec = spec_of(tmp_path, model_type="llama", **fields)
    assert (spec.rope.scaling, spec.rope.theta, spec.max_len) == (rule["rope_type"], 5e5, max_len)
    assert spec.rope.original_max_len == rule.get("original_max_position_embeddings", 256)
    if "beta_fast" in rule:
        assert spec.rope.extra["beta_fast"] == 16
    inverse_frequencies(spec.rope, spec.max_len, spec.max_len)  # understood by the layer that uses it


def test_b42_an_unknown_architecture_lists_the_known_ones(tmp_path):
    with pytest.raises(ModelError, match=r"'mamba'.*not supported; supported: llama, mistral, qwen2, qwen3, gemma3"):
        spec_of(tmp_path, model_type="mamba")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": -4}, "hidden_size must be a whole number"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"num_hidden_layers": "6"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"hidden_act": "mish"}, "mish"),
        ({"rms_norm_eps": "nan"}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 6}, "chunked_attention"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor"),
    ],
)
def test_bad_fields_are_named(tmp_path, fields, says):
    with pytest.raises(ModelError, match=says):
        spec_of(tmp_path, **({"model_type": "llama"} | fields))


def test_damaged_configs_are_always_a_model_error(tmp_path):
    transformers.Gemma3TextConfig(**SIZES, head_dim=8).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    data = file.read_bytes()
    rng = random.Random(fresh_seed())
    for _ in range(500):
        file.write_bytes(damaged(data, rng, len(data)))
        try:
            read_spec(tmp_path)
        except ModelError:
            continue


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"model_type": 3}'])
def test_files_that_are_no_config(tmp_path, data):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ModelError):
        read_spec(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        read_spec(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_spec(tmp_path)


def gguf_spec(path, arch, tensors=(), **keys):
    writer = gguf.GGUFWriter(path, arch)
    defaults = {
        "block_count": 6, "context_length": 256, "embedding_length": 32, "feed_forward_length": 48, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 0.5,
    }  # fmt: skip
    for name, value in (defaults | keys).items():
        add(writer, name if name.startswith("tokenizer.") else f"{arch}.{name}", value)
    for name, values in {"token_embd.weight": np.ones((96, 32), np.float32), **dict(tensors)}.items():
        writer.add_tensor(name, values)
    finish(writer)
    return read_spec(path)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_gguf_architectures(tmp_path, arch):
    keys = {
        "attention.key_length": 16, "rope.freq_base": 5e5, "tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 5,
        "attention.sliding_window": 8, "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|im_end|>"], "tokenizer.ggml.token_type": [1, 3, 1],
    }  # fmt: skip
    spec = gguf_spec(tmp_path / "m.gguf", arch, {"blk.0.attn_q.bias": np.ones(64, np.float32)}, **keys)
    assert (spec.family, spec.vocab_size, spec.hidden, spec.num_layers, spec.max_len, spec.name) == (arch, 96, 32, 6, 256, "m")
    assert (spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim, spec.attention.qkv_bias) == (4, 2, 16, True)
    assert (spec.norm_eps, spec.rope.theta, spec.rope.dim, spec.eos_token_ids) == (0.5, 5e5, 16, (3, 5, 1))
    assert (spec.tied, spec.weight_format, spec.dtype) == (True, "gguf", "float32")
    assert spec.layer_kinds == (("sliding",) * 5 + ("full",) if arch == "gemma3" else ("full",) * 6)
    assert spec.embedding_scale == (math.sqrt(32) if arch == "gemma3" else 1.0)


def test_gguf_llama3_rope_factors(tmp_path):
    """rope_freqs.weight holds Llama 3's factors: the rule is found again, and gives the same frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rule = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = transformers.LlamaConfig(
        **SIZES | {"num_attention_heads": 1, "hidden_size": 128}, rope_parameters=rule | {"original_max_position_embeddings": 8192}
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / (5e5 ** (np.arange(0, 128, 2) / 128))
    factors = (plain / expected.numpy()).astype(np.float32)
    keys = {"attention.key_length": 128, "rope.freq_base": 5e5, "context_length": 131072}
    spec = gguf_spec(tmp_path / "a.gguf", "llama", {"rope_freqs.weight": factors}, **keys)
    assert (spec.rope.scaling, spec.rope.factor, spec.rope.original_max_len) == ("llama3", 8.0, 8192)
    assert np.allclose(inverse_frequencies(spec.rope, 4096, 131072)[0].numpy(), expected.numpy(), rtol=1e-5)
    other = (factors * np.linspace(1, 2, 64)).astype(np.float32)
    spec = gguf_spec(tmp_path / "b.gguf", "llama", {"rope_freqs.weight": other}, **keys)
    for length in (4096, 131072):
        got, factor = inverse_frequencies(spec.rope, length, 131072)
        assert np.allclose(got.numpy(), plain / other, rtol=1e-5)
        assert factor == 1.0


def test_gguf_rope_scaling(tmp_path):
    spec = gguf_spec(tmp_path / "a.gguf", "llama", **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert (spec.rope.scaling, spec.rope.factor, spec.max_len) == ("linear", 4.0, 256)
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    spec = gguf_spec(tmp_path / "b.gguf", "qwen2", **keys)
    assert (spec.rope.scaling, spec.rope.original_max_len, spec.max_len) == ("yarn", 128, 512)


@pytest.mark.parametrize(
    ("arch", "keys", "says"),
    [
        ("bloom", {}, "supported: llama, qwen2, qwen3, gemma3"),
        ("llama", {"block_count": 0}, "block_count"),
        ("llama", {"attention.head_count_kv": 3}, "do not divide"),
        ("llama", {"embedding_length": 64}, r"should be \[vocabulary, 64\]"),
        ("llama", {"attention.head_count": [4, 4, 4, 4, 4, 2]}, "differs between layers"),
        ("llama", {"rope.dimension_count": 99}, "even number up to 8"),
        ("llama", {"rope.scaling.type": "spiral"}, "spiral"),
    ],
)
def test_gguf_bad_metadata(tmp_path, arch, keys, says):
    with pytest.raises(ModelError, match=says):
        gguf_spec(tmp_path / "m.gguf", arch, **keys)
