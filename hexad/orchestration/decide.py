"""What "auto" becomes: decided once, from (config, model spec, machine), each decision with its reason. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hexad.common.config import HexadConfig
from hexad.common.errors import ConfigError, OutOfMemoryError
from hexad.engine.plan import KVBudget, KVLayout
from hexad.hardware.cores import pinned_cores
from hexad.hardware.machine import Machine
from hexad.models.served import MAX_DEVICES
from hexad.models.spec import ModelSpec
from hexad.orchestration.sizing import longest_sequence

GIB = 2**30
CPU_KV_CAP_BYTES = 4 * GIB
CPU_KV_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Decision:
    """One "auto" and what it became."""

    key: str  # "section.key"
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}: {self.reason}"


def resolve_device(config: HexadConfig, machine: Machine) -> Decision:
    """Which device runs the model: "cpu", "cuda:N", or "fake[:seconds a step]" (no model at all: for tests and load tools).

    Raises:
        ConfigError: no such device here.
    """
    asked = config.device.device
    if asked in ("cpu", "fake"):
        return Decision("device.device", asked, "as configured")
    if asked == "auto":
        if machine.gpus:
            return Decision("device.device", "cuda:0", f"{len(machine.gpus)} GPU(s) here, the first is an {machine.gpus[0].name}")
        return Decision("device.device", "cpu", "no GPU here")
    kind, _, index = asked.partition(":")
    if kind == "fake" and index.replace(".", "", 1).isdigit():
        return Decision("device.device", asked, "as configured")
    if kind != "cuda" or not (index or "0").isdigit():
        raise ConfigError(f"device.device = {asked!r}: use auto, cpu, cuda or cuda:N")
    if int(index or 0) >= len(machine.gpus):
        raise ConfigError(f"device.device = {asked!r}, but this machine has {len(machine.gpus)} GPU(s): use auto or cpu")
    return Decision("device.device", f"cuda:{index or 0}", "as configured")


def resolve(config: HexadConfig, spec: ModelSpec, machine: Machine) -> tuple[HexadConfig, list[Decision]]:
    """Decide every "auto" that needs no weights in memory. Returns the resolved tree and the decisions made.

    `model.max_model_len` and the number of KV blocks are settled later, by `fit_kv`, when the weights' size is known.

    Raises:
        ConfigError: a value that cannot be served by this model or machine.
    """
    device = resolve_device(config, machine)
    on_gpu = device.value.startswith("cuda")
    decisions = [device, _dtype(config, spec, machine, on_gpu)]
    values: list[tuple[str, int, str]] = [
        ("cache.block_size", 64 if on_gpu else 16, "page size of the GPU kernels" if on_gpu else "fine pages waste least"),
        ("scheduler.max_num_seqs", 256 if on_gpu else 64, "default of the device"),
        ("scheduler.max_num_batched_tokens", 8192 if on_gpu else 512, "compute-bound already, and decodes wait little"),
    ]
    if not on_gpu:
        processor = machine.processor
        cores = min(processor.cores, processor.cores_physical or processor.cores)
        kv_bytes = int(min(CPU_KV_CAP_BYTES, CPU_KV_SHARE * processor.memory_available_bytes))
        if config.device.cpu_pin is None:
            values.append(("device.threads", cores, "usable physical cores"))
        else:
            pinned = pinned_cores(config.device.cpu_pin, config.device.threads)
            values.append(("device.threads", len(pinned), "one for each core of device.cpu_pin"))
        reason = f"{CPU_KV_SHARE:.0%} of free memory, at most {CPU_KV_CAP_BYTES // GIB} GiB"
        values.append(("cache.kv_cache_memory_bytes", kv_bytes, reason))
        if device.value == "cpu":
            _check_kv_bytes(config.cache.kv_cache_memory_bytes, processor.memory_available_bytes)
    elif config.device.cpu_pin is not None:
        raise ConfigError(f"device.cpu_pin = {config.device.cpu_pin!r} pins CPU threads, and the device is {device.value}: leave it out")
    flat = _flat(config)
    decisions += [Decision(key, value, reason) for key, value, reason in values if flat[key] is None]
    resolved = config.with_values({decision.key: decision.value for decision in decisions})
    if resolved.cache.kv_cache_dtype == "auto":
        decisions.append(Decision("cache.kv_cache_dtype", resolved.model.dtype, "the model's"))
        resolved = resolved.with_values({"cache.kv_cache_dtype": resolved.model.dtype})
    _check(resolved, spec)
    return resolved, [d for d in decisions if flat[d.key] != d.value]


def _dtype(config: HexadConfig, spec: ModelSpec, machine: Machine, on_gpu: bool) -> Decision:
    if config.model.dtype != "auto":
        return Decision("model.dtype", config.model.dtype, "as configured")
    if on_gpu:
        if spec.dtype in ("bfloat16", "float16"):
            return Decision("model.dtype", spec.dtype, "as stored")
        return Decision("model.dtype", "bfloat16", f"the weights are stored in {spec.dtype}; 16 bits halve the traffic")
    sets = {"amx_bf16", "avx512_bf16", "bf16"} & set(machine.processor.instruction_sets)
    if sets:
        return Decision("model.dtype", "bfloat16", f"the processor has {', '.join(sorted(sets))}")
    return Decision("model.dtype", "float32", "the processor has no bfloat16 instructions")


def _flat(config: HexadConfig) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in config.model_dump().items() for key, value in keys.items()}


def _check_kv_bytes(asked: int | None, available: int) -> None:
    """On a CPU the machine's free memory bounds the pool; what the weights leave of it is known later."""
    if asked is not None and asked > available:
        raise ConfigError(
            f"cache.kv_cache_memory_bytes = {asked} ({asked / GIB:,.2f} GiB), but this machine has {available / GIB:,.2f} GiB of memory "
            f"free, weights not counted: use at most {int(available * CPU_KV_SHARE) // 2**20}MiB, or leave it out"
        )


def _check(config: HexadConfig, spec: ModelSpec) -> None:
    """Values that parse but cannot be served."""
    asked = config.model.max_model_len
    if asked is not None and asked > spec.max_len:
        raise ConfigError(f"model.max_model_len = {asked}: the model's context is {spec.max_len} tokens, use at most that")
    budget, seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    assert budget is not None and seqs is not None
    if budget < seqs:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens = {budget} is less than scheduler.max_num_seqs = {seqs}: each running sequence needs "
            f"a token a step, use at least {seqs} or fewer sequences"
        )
    for key, size in config.parallel.model_dump().items():
        if size > MAX_DEVICES:
            raise ConfigError(f"parallel.{key} = {size}: this build runs on one device, use {MAX_DEVICES}")


def fit_kv(config: HexadConfig, spec: ModelSpec, budget: KVBudget) -> tuple[HexadConfig, KVLayout, list[Decision]]:
    """Size the KV pool and settle the longest sequence.

    Raises:
        OutOfMemoryError: the pool cannot hold one sequence of the length asked for; names a length that fits.
    """
    num_blocks = max(0, budget.available_bytes // max(budget.page_bytes, 1))
    longest = longest_sequence(num_blocks, budget.groups, budget.block_size, spec.max_len)
    asked = config.model.max_model_len
    shown = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in budget.breakdown.items())
    if longest < (asked or 1):
        need = f"model.max_model_len is {asked}: use at most {longest}, or" if asked and longest else "not even one page fits:"
        raise OutOfMemoryError(
            f"KV memory of {budget.available_bytes / GIB:.2f} GiB ({shown}) holds {longest} tokens, but {need} raise "
            "cache.kv_cache_memory_bytes or cache.gpu_memory_utilization"
        )
    decisions = []
    if asked is None:
        reason = "the model's context" if longest == spec.max_len else f"what KV memory holds (the model's context is {spec.max_len})"
        decisions.append(Decision("model.max_model_len", longest, reason))
        config = config.with_values({"model.max_model_len": longest})
    return config, KVLayout(num_blocks=num_blocks, block_size=budget.block_size, groups=budget.groups), decisions
