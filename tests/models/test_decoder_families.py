"""Every family on a fresh random checkpoint against transformers, in float32."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
import torch
import transformers

from hexad.common.errors import ConfigError, ModelError, WeightsError
from hexad.models.build import Model, build_model
from hexad.models.catalog import read_spec
from hexad.models.families.family import known_families
from hexad.models.inputs import ForwardInputs
from hexad.models.layers.rope import inverse_frequencies, rope_table
from hexad.models.loader import open_weights
from hexad.models.spec import RopeSpec
from hexad.operators.batch import AttentionBatch, KVPages

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 130, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-unused-window": ("Qwen2", {"sliding_window": 8, "use_sliding_window": False}),
    "qwen2-mixed-window": ("Qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-wide-heads": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}


@pytest.fixture(autouse=True)
def rng() -> random.Random:
    seed = time.time_ns() % 2**31
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return random.Random(seed)


def save_random(folder: Path, kind: str, **config) -> transformers.PreTrainedModel:
    """A random model on disk. Norm weights and biases are random too: ones and zeros would hide a swap."""
    sizes = {**SIZES, **config}
    make_config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}ForCausalLM")(make_config(**sizes)).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    model.save_pretrained(folder)
    return model


def build(folder: Path, dtype: torch.dtype = torch.float32, **options) -> Model:
    spec = read_spec(folder)
    return build_model(spec, open_weights(folder, spec), dtype, CPU, **options)


def logits_of(model: Model, ids: list[int], chunk: int, block_size: int = 16) -> torch.Tensor:
    """All logits [n, vocab] of one sequence, computed `chunk` tokens at a time over shuffled blocks."""
    spec = model.spec
    count = len(spec.kv_layer_groups)
    width = -(-len(ids) // block_size)
    table = torch.randperm(count * width, dtype=torch.int32).view(count, 1, width)
    shape = (count * width, block_size, spec.attention.kv_heads, spec.attention.head_dim)
    kv = [KVPages(torch.full(shape, float("nan")), torch.full(shape, float("nan"))) for _ in range(spec.num_layers)]
    parts = []
    for start in range(0, len(ids), chunk):
        positions = torch.arange(start, min(start + chunk, len(ids)))
        batches = tuple(
            AttentionBatch(
                query_start=torch.tensor([0, len(positions)], dtype=torch.int32),
                seq_lens=torch.tensor([start + len(positions)], dtype=torch.int32),
                block_table=table[group],
                slots=table[group, 0].long()[positions // block_size] * block_size + positions % block_size,
                max_query_len=len(positions),
                max_seq_len=start + len(positions),
                block_size=block_size,
                num_decodes=0,
            )
            for group in range(count)
        )
        inputs = ForwardInputs(torch.tensor(ids)[positions], positions, batches)
        with torch.inference_mode():
            parts.append(model.logits(model.forward(inputs, kv)))
    return torch.cat(parts)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_b46_logits_equal_transformers(name, tmp_path, rng):
    """Prompts shorter than, equal to and longer than the window, whole and in chunks."""
    kind, config = FAMILIES[name]
    reference = save_random(tmp_path, kind, **config)
    model = build(tmp_path)
    for length in (5, 7, 8, 9, 10, 17, 40):
        ids = [rng.randrange(SIZES["vocab_size"]) for _ in range(length)]
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0]
        for chunk in (1, 3, 8, length):
            got = logits_of(model, ids, chunk)
            assert got.dtype == torch.float32
            assert relative_error(got, expected) < 1e-4, (length, chunk)
            assert torch.equal(got.argmax(-1), expected.argmax(-1)) or relative_error(got, expected) < 1e-6


ROPE_RULES = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    "yarn-all": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "beta_fast": 16, "beta_slow": 2, "truncate": False,
        "mscale": 0.7, "mscale_all_dim": 0.9,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("rule", ROPE_RULES)
def test_rope_scalings_equal_transformers(rule, tmp_path, rng):
    parameters = {"rope_theta": 10_000.0, **ROPE_RULES[rule]}
    reference = save_random(tmp_path, "Llama", rope_parameters=parameters)
    ids = [rng.randrange(SIZES["vocab_size"]) for _ in range(60)]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    model = build(tmp_path, max_len=SIZES["max_position_embeddings"])  # what "dynamic" is fixed for
    assert relative_error(logits_of(model, ids, 60), expected) < 1e-4


def test_dynamic_rope_is_fixed_for_the_longest_sequence():
    """A key's rotation may not depend on when it was computed."""
    rope = RopeSpec(theta=10_000.0, dim=16, scaling="dynamic", factor=2.0)
    inverse, _ = inverse_frequencies(rope, 256, 64)
    base = 10_000.0 * (2.0 * 256 / 64 - 1.0) ** (16 / 14)
    assert torch.allclose(inverse, base ** -(torch.arange(0, 16, 2) / 16))
    short = rope_table(rope, 256, 64, CPU)
    assert torch.equal(short[:10], rope_table(rope, 256, 64, CPU)[:10])


def test_longrope_takes_the_factors_of_the_served_context():
    rope = RopeSpec(dim=8, scaling="longrope", original_max_len=32, extra={"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]})
    plain = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    short, factor = inverse_frequencies(rope, 32, 128)
    long, _ = inverse_frequencies(rope, 64, 128)
    assert torch.allclose(short, plain) and torch.allclose(long, plain / torch.tensor([2.0, 3.0, 4.0, 5.0]))
    assert factor == pytest.approx((1 + torch.log(torch.tensor(4.0)) / torch.log(torch.tensor(32.0))) ** 0.5)


def test_unknown_rope_scaling_is_named():
    with pytest.raises(ModelError, match="'banana'"):
        inverse_frequencies(RopeSpec(dim=8, scaling="banana"), 16, 16)


def test_every_parameter_is_loaded(tmp_path, rng):
    """Fresh memory is filled with NaN while the network is built: a parameter that was not read would show."""
    reference = save_random(tmp_path, "Qwen3", head_dim=16)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        model = build(tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    ids = [rng.randrange(SIZES["vocab_size"]) for _ in range(12)]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    assert relative_error(logits_of(model, ids, 12), expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near(dtype, tmp_path, rng):
    reference = save_random(tmp_path, "Llama").to(dtype)
    ids = [rng.randrange(SIZES["vocab_size"]) for _ in range(30)]
    model = build(tmp_path, dtype)
    spec = model.spec
    assert model.weight_bytes < sum(p.numel() for p in reference.parameters()) * 2 + SIZES["max_position_embeddings"] * 8 * 4 + 1
    with torch.no_grad():
        expected = reference.float()(torch.tensor([ids])).logits[0]
    shape = (4, 16, spec.attention.kv_heads, spec.attention.head_dim)
    kv = [KVPages(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(spec.num_layers)]
    positions = torch.arange(30)
    batch = AttentionBatch(
        query_start=torch.tensor([0, 30], dtype=torch.int32),
        seq_lens=torch.tensor([30], dtype=torch.int32),
        block_table=torch.arange(2, dtype=torch.int32).unsqueeze(0),
        slots=positions.clone(),
        max_query_len=30,
        max_seq_len=30,
        block_size=16,
        num_decodes=0,
    )
    with torch.inference_mode():
        got = model.logits(model.forward(ForwardInputs(torch.tensor(ids), positions, (batch,)), kv))
    assert relative_error(got, expected) < (0.1 if dtype == torch.bfloat16 else 0.02)


def test_tied_head_takes_no_second_table(tmp_path):
    save_random(tmp_path, "Llama", tie_word_embeddings=True)
    tied = build(tmp_path).weight_bytes
    save_random(tmp_path, "Llama", tie_word_embeddings=False)
    assert build(tmp_path).weight_bytes - tied == SIZES["vocab_size"] * SIZES["hidden_size"] * 4


def change_tensors(folder: Path, change) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_tensor_is_named(tmp_path):
    save_random(tmp_path, "Llama")
    change_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightsError, match=re.escape("model.layers.1.mlp.up_proj.weight")):
        build(tmp_path)


def test_left_over_tensor_is_named(tmp_path):
    save_random(tmp_path, "Llama")
    change_tensors(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    with pytest.raises(WeightsError, match=re.escape("model.layers.0.self_attn.q_proj.bias")):
        build(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.k_proj.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_misshapen_tensor_is_named(name, tmp_path):
    save_random(tmp_path, "Llama")
    change_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(WeightsError, match=re.escape(name)):
        build(tmp_path)


def test_unknown_family_lists_the_known(tmp_path):
    import msgspec

    save_random(tmp_path, "Llama")
    spec = msgspec.structs.replace(read_spec(tmp_path), family="nonesuch")
    with pytest.raises(ModelError, match=", ".join(known_families())):
        build_model(spec, open_weights(tmp_path, spec), torch.float32, CPU)


def test_forced_provider_that_cannot_serve_is_an_error(tmp_path):
    save_random(tmp_path, "Llama")
    with pytest.raises(ConfigError, match="gain nothing"):
        build(tmp_path, prefer={"linear": "onednn"})
