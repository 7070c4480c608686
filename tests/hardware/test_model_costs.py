"""Weights and KV bytes of the packaged shapes against sums done by hand from their config.json."""

import pytest

from hexad.bench.facts import read_facts
from hexad.common.errors import ConfigError
from hexad.models.costs import ModelCosts, Rows, find_format, format_of

# hidden 4096, 32 layers: q 4096*4096, k and v 4096*1024 each, o 4096*4096, gate, up, down 3*4096*14336; embedding and head 128256*4096
LINEAR_8B = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
TABLE_8B = 128256 * 4096
NORMS_8B = (2 * 32 + 1) * 4096
LINEAR_70B = 80 * (8192 * 8192 * 2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
TABLE_70B = 128256 * 8192
NORMS_70B = (2 * 80 + 1) * 8192
ROWS_70B = 80 * (8192 + 2 * 1024 + 8192 + 2 * 28672 + 8192)  # output rows of all linear layers
LINEAR_1B = 16 * (2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192)
ATTENTION_MOE = 48 * (2048 * 4096 * 2 + 2 * 2048 * 512)
EXPERTS_MOE = 48 * 128 * 3 * 2048 * 768


def costs_of(model, weight_format=None, kv="auto", tp=1):
    spec, stored = read_facts(model)
    return ModelCosts(spec, weight_format or stored, kv, tp)


@pytest.mark.parametrize(
    ("model", "parameters", "nbytes"),
    [
        ("llama-3.1-8b", LINEAR_8B + 2 * TABLE_8B + NORMS_8B, 2 * (LINEAR_8B + 2 * TABLE_8B + NORMS_8B)),
        ("llama-3.2-1b", 1_235_814_400, 2 * (LINEAR_1B + 128256 * 2048 + 33 * 2048)),  # tied: the table once
        ("llama-3-70b-fp8", 70_553_706_496, LINEAR_70B + 4 * ROWS_70B + 2 * (2 * TABLE_70B + NORMS_70B)),
        ("llama-3-70b-awq", 70_553_706_496, LINEAR_70B * (4 + 20 / 128) / 8 + 2 * (2 * TABLE_70B + NORMS_70B)),
        ("qwen3-30b-a3b", 30_532_122_624, 2 * 30_532_122_624),  # published: 30.5 B
    ],
)
def test_weights_agree_with_sums_by_hand(model, parameters, nbytes):
    costs = costs_of(model)
    assert costs.parameters() == parameters
    assert costs.resident_bytes() == nbytes


@pytest.mark.parametrize(
    ("model", "kv", "nbytes"),
    [
        ("llama-3.1-8b", "auto", 2 * 32 * 8 * 128 * 2),
        ("llama-3.2-1b", "auto", 2 * 16 * 8 * 64 * 2),
        ("llama-3-70b-fp8", "fp8", 2 * 80 * 8 * 128),
        ("llama-3-70b-awq", "auto", 2 * 80 * 8 * 128 * 2),
        ("qwen3-30b-a3b", "auto", 2 * 48 * 4 * 128 * 2),
    ],
)
def test_kv_bytes_agree_with_sums_by_hand(model, kv, nbytes):
    costs = costs_of(model, kv=kv)
    assert costs.kv_bytes_per_token() == nbytes
    assert costs.kv_bytes(1000) == 1000 * nbytes


def test_formats_of_checkpoints_are_recognised():
    names = {model: read_facts(model)[1].name for model in ("llama-3.1-8b", "llama-3-70b-fp8", "llama-3-70b-awq")}
    assert names == {"llama-3.1-8b": "bfloat16", "llama-3-70b-fp8": "fp8", "llama-3-70b-awq": "int4"}


def test_a_step_streams_the_head_but_not_the_embedding():
    costs = costs_of("llama-3.1-8b")
    assert costs.streamed_bytes(1) == 2 * (LINEAR_8B + TABLE_8B + NORMS_8B)


def test_tied_head_is_streamed_though_it_is_stored_once():
    costs = costs_of("llama-3.2-1b")
    assert costs.streamed_bytes(1) == costs.resident_bytes()


def test_experts_touched_grow_with_the_batch():
    costs = costs_of("qwen3-30b-a3b")
    one, many = costs.streamed_bytes(1), costs.streamed_bytes(100_000)
    assert one == pytest.approx(2 * (ATTENTION_MOE + EXPERTS_MOE / 16 + 151936 * 2048), rel=0.005)
    assert many == pytest.approx(2 * (ATTENTION_MOE + EXPERTS_MOE + 151936 * 2048), rel=0.005)


def test_expert_flops_count_only_the_chosen_ones():
    flops = costs_of("qwen3-30b-a3b").flops(1, 0)["bf16"]
    assert flops == 2 * (ATTENTION_MOE + EXPERTS_MOE // 16 + 48 * 2048 * 128)


def test_head_multiplies_only_rows_that_sample():
    costs = costs_of("llama-3.1-8b")
    assert costs.flops(512, 1)["bf16"] == 2 * (512 * LINEAR_8B + TABLE_8B)


def test_fp8_products_run_in_fp8_and_the_head_in_bf16():
    flops = costs_of("llama-3-70b-fp8").flops(10, 10)
    assert flops == {"fp8": 2 * 10 * LINEAR_70B, "bf16": 2 * 10 * TABLE_70B}


def test_causal_attention_counts_visible_pairs():
    costs = costs_of("llama-3.1-8b")
    fresh = costs.attention_flops(Rows(1, 4))
    assert fresh == 4 * 32 * 128 * 32 * (1 + 2 + 3 + 4)
    assert costs.attention_flops(Rows(3, 2, past=10)) == 3 * 4 * 32 * 128 * 32 * (11 + 12)


def test_shared_prefix_is_read_once():
    costs = costs_of("llama-3.1-8b")
    per_token = costs.kv_bytes_per_token()
    alone, together = (costs.step([Rows(8, 1, past=99, shared=s)]).kv_bytes for s in (0, 50))
    assert alone == 8 * 100 * per_token
    assert together == (8 * 50 + 50) * per_token


def test_tensor_parallel_ranks_split_weights_and_kv_down_to_one_head():
    whole, half, many = costs_of("llama-3.1-8b"), costs_of("llama-3.1-8b", tp=2), costs_of("llama-3.1-8b", tp=16)
    norms = 2 * NORMS_8B
    assert half.resident_bytes() - norms == (whole.resident_bytes() - norms) // 2
    assert half.kv_bytes_per_token() * 2 == whole.kv_bytes_per_token()
    assert many.kv_bytes_per_token() * 8 == whole.kv_bytes_per_token()  # 8 KV heads on 16 ranks: each keeps one
    assert half.step([Rows(1, 1)]).link_bytes > 0 and whole.step([Rows(1, 1)]).link_bytes == 0


def test_unknown_format_names_the_nearest():
    with pytest.raises(ConfigError, match="bfloat16"):
        find_format("bfloat15")
    with pytest.raises(ConfigError, match="known"):
        ModelCosts(read_facts("llama-3.1-8b")[0], None, "fp3")


def test_format_of_gptq_takes_its_group_size():
    import msgspec

    spec = msgspec.structs.replace(read_facts("llama-3.1-8b")[0], quantization={"quant_method": "gptq", "bits": 4, "group_size": 32})
    assert format_of(spec).weight_bytes == 0.5 + 2.5 / 32


def test_sliding_layers_keep_and_read_only_their_window():
    import msgspec

    spec = read_facts("llama-3.1-8b")[0]
    attention = msgspec.structs.replace(spec.attention, window=100)
    mixed = msgspec.structs.replace(spec, attention=attention, layer_kinds=("sliding", "full") * 16)
    costs = ModelCosts(mixed)
    assert costs.kv_bytes(1000) == costs.kv_bytes_per_token() * (16 * 100 + 16 * 1000) / 32
    pairs = [sum(min(i + 1, 100) for i in range(300)), sum(i + 1 for i in range(300))]
    assert costs.attention_flops(Rows(1, 300)) == 4 * 32 * 128 * 16 * sum(pairs)
