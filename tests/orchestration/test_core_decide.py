"""What "auto" becomes, on machines of several kinds, and the refusals that name a value which works."""

from __future__ import annotations

import pytest

from hexad.common.config import HexadConfig
from hexad.common.errors import ConfigError, OutOfMemoryError
from hexad.engine.plan import KVBudget, KVGroupSpec
from hexad.hardware.machine import Gpu, Machine, Processor
from hexad.models.spec import AttentionSpec, MLPSpec, ModelSpec, RopeSpec
from hexad.orchestration.decide import fit_kv, resolve
from hexad.orchestration.sizing import longest_sequence, pages_for

GIB = 2**30
SPEC = ModelSpec(
    name="tiny",
    family="llama",
    vocab_size=100,
    hidden=64,
    num_layers=2,
    max_len=8192,
    attention=AttentionSpec(heads=4, kv_heads=2, head_dim=16, scale=0.25),
    mlp=MLPSpec(intermediate=128),
    rope=RopeSpec(dim=16),
    layer_kinds=("full", "full"),
    dtype="float16",
)
FULL = KVGroupSpec(kind="full", num_layers=2)
SLIDING = KVGroupSpec(kind="sliding", num_layers=2, window=64)


def machine(*, gpus: int = 0, sets: tuple[str, ...] = (), available: int = 64 * GIB) -> Machine:
    processor = Processor("cpu", "x86_64", 8, 4, None, sets, 1, 64 * GIB, available)
    gpu = Gpu(0, "Some GPU", 80 * GIB, 79 * GIB, None, None, None, None, None)
    return Machine(processor, (gpu,) * gpus, None, None, "Linux", "3.11")


def config(**flat: object) -> HexadConfig:
    return HexadConfig().with_values({key.replace("__", "."): value for key, value in flat.items()})


def budget(available: int, groups: tuple[KVGroupSpec, ...] = (FULL,)) -> KVBudget:
    return KVBudget(available_bytes=available, page_bytes=1000, block_size=16, groups=groups, breakdown={"weights": 5})


def test_auto_on_a_gpu() -> None:
    resolved, decisions = resolve(HexadConfig(), SPEC, machine(gpus=2))
    assert resolved.device.device == "cuda:0"
    assert resolved.model.dtype == "float16" and resolved.cache.kv_cache_dtype == "float16"
    assert (resolved.cache.block_size, resolved.scheduler.max_num_seqs, resolved.scheduler.max_num_batched_tokens) == (64, 256, 8192)
    assert resolved.cache.kv_cache_memory_bytes is None
    assert all(decision.reason for decision in decisions)


@pytest.mark.parametrize(
    ("sets", "dtype"), [((), "float32"), (("avx512_bf16",), "bfloat16"), (("amx_bf16",), "bfloat16"), (("avx2",), "float32")]
)
def test_auto_on_a_cpu(sets: tuple[str, ...], dtype: str) -> None:
    resolved, _ = resolve(HexadConfig(), SPEC, machine(sets=sets, available=8 * GIB))
    assert resolved.device.device == "cpu" and resolved.model.dtype == dtype
    assert resolved.device.threads == 4
    assert resolved.cache.kv_cache_memory_bytes == 2 * GIB
    assert resolved.cache.block_size == 16


def test_a_pool_larger_than_the_machine_is_refused_with_one_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes = 9663676416 \(9\.00 GiB\).*8\.00 GiB.*at most 2048MiB"):
        resolve(config(cache__kv_cache_memory_bytes=9 * GIB), SPEC, machine(available=8 * GIB))
    resolved, _ = resolve(config(cache__kv_cache_memory_bytes=7 * GIB), SPEC, machine(available=8 * GIB))
    assert resolved.cache.kv_cache_memory_bytes == 7 * GIB


def test_what_is_configured_stays() -> None:
    asked = config(model__dtype="float32", cache__block_size=8, scheduler__max_num_seqs=3, device__threads=1)
    resolved, decisions = resolve(asked, SPEC, machine(gpus=1))
    assert resolved.model.dtype == "float32" and resolved.cache.block_size == 8 and resolved.scheduler.max_num_seqs == 3
    assert not {"model.dtype", "cache.block_size", "scheduler.max_num_seqs", "device.threads"} & {d.key for d in decisions}


def test_resolving_twice_changes_nothing() -> None:
    resolved, _ = resolve(HexadConfig(), SPEC, machine())
    again, decisions = resolve(resolved, SPEC, machine())
    assert again == resolved and decisions == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"device__device": "cuda:1"}, "1 GPU"),
        ({"device__device": "gpu"}, "cuda:N"),
        ({"model__max_model_len": 9000}, "8192"),
        ({"scheduler__max_num_seqs": 100, "scheduler__max_num_batched_tokens": 50}, "at least 100"),
        ({"parallel__tensor_parallel_size": 2}, "use 1"),
    ],
)
def test_refusals_name_what_works(asked: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(config(**asked), SPEC, machine(gpus=1))


def test_max_model_len_follows_kv_memory() -> None:
    resolved, layout, decisions = fit_kv(HexadConfig(), SPEC, budget(10_000))
    assert layout.num_blocks == 10 and resolved.model.max_model_len == 160
    assert "8192" in decisions[0].reason
    resolved, _, _ = fit_kv(HexadConfig(), SPEC, budget(10**9))
    assert resolved.model.max_model_len == 8192


def test_a_length_that_does_not_fit_names_one_that_does() -> None:
    with pytest.raises(OutOfMemoryError, match="at most 160"):
        fit_kv(config(model__max_model_len=161), SPEC, budget(10_000))
    fit_kv(config(model__max_model_len=160), SPEC, budget(10_000))
    with pytest.raises(OutOfMemoryError, match="not even one page"):
        fit_kv(HexadConfig(), SPEC, budget(999))


def test_windows_save_pages() -> None:
    assert pages_for(1000, (FULL,), 16) == 63
    assert pages_for(1000, (FULL, SLIDING), 16) == 63 + 5
    assert longest_sequence(68, (FULL, SLIDING), 16, 8192) == 63 * 16
