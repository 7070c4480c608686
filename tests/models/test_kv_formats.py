"""Formats of keys and values are those that the operators say they support: the engine keeps no list of its own."""

from __future__ import annotations

import pytest
import torch
from model_files import tiny_spec

from hexad.common.errors import ConfigError
from hexad.models.kv_formats import find_kv_dtype
from hexad.operators.load import load_operators
from hexad.operators.registry import Provider

CPU, META = torch.device("cpu"), torch.device("meta")


def find(name: str, device: torch.device = CPU, dtype: torch.dtype = torch.bfloat16) -> torch.dtype:
    return find_kv_dtype(name, tiny_spec(), dtype, device, 16)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int8"])
def test_a_cpu_has_all_of_them(name: str) -> None:
    assert find(name) == getattr(torch, name)


@pytest.mark.parametrize("device", [CPU, META])
def test_auto_is_the_dtype_of_the_model(device: torch.device) -> None:
    assert find("auto", device, torch.float16) == torch.float16


def test_int8_elsewhere_is_refused_with_what_would_work() -> None:
    with pytest.raises(ConfigError) as refused:
        find("int8", META)
    assert str(refused.value) == (
        "kv_cache_dtype is 'int8' on meta: int8 keys and values are for CPUs; "
        "keys and values can be kept there as auto, float32, bfloat16, float16"
    )


def test_what_nothing_stores_is_refused_with_what_would_work() -> None:
    with pytest.raises(ConfigError) as refused:
        find("fp8")
    assert str(refused.value) == (
        "kv_cache_dtype is 'fp8' on cpu; keys and values can be kept there as auto, float32, bfloat16, float16, int8"
    )


def test_a_provider_that_serves_them_is_enough(monkeypatch) -> None:
    """New kernels bring int8 pages to a device; nothing else has to know."""
    registry = load_operators()

    def provide(op: str) -> None:
        served = Provider(op, "test", lambda _args: print, lambda args: [] if args.device_type == "meta" else ["is for tests"], priority=99)
        monkeypatch.setitem(registry._providers, op, [*registry._providers[op], served])

    provide("rope_kv_write")
    with pytest.raises(ConfigError, match="int8 keys and values are for CPUs"):  # written, but not read
        find("int8", META)
    provide("paged_attention")
    assert find("int8", META) == torch.int8


def test_what_is_forced_is_not_the_formats_fault(monkeypatch) -> None:
    """The builder says that a forced provider cannot serve the model."""
    monkeypatch.setenv("HEXAD_OPS", "paged_attention=nowhere")
    assert find("bfloat16") == torch.bfloat16
