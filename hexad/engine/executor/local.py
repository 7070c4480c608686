"""The executor of one device in this process.

On a CPU a worker thread computes: `execute` and `sample` only queue, so that the core plans the next step meanwhile (torch releases the
interpreter inside operators). On a GPU the caller's thread launches and the stream is the queue; results come back through pinned memory
and an event.
"""

from __future__ import annotations

import gc
import logging
import time
from pathlib import Path

import torch

from hexad.common.config import HexadConfig
from hexad.common.errors import ConfigError, EngineDeadError, OutOfMemoryError
from hexad.engine.executor.cpu_threads import start_threads
from hexad.engine.executor.device_thread import DeviceThread
from hexad.engine.executor.profile import activation_peak_bytes
from hexad.engine.executor.seam import LoadReport
from hexad.engine.executor.steps import LocalStep
from hexad.engine.kv import kv_groups, page_bytes
from hexad.engine.plan import KVBudget, KVLayout, StepPlan
from hexad.engine.runner import Runner
from hexad.hardware.cores import pinned_cores
from hexad.hardware.devices import describe, memory_bytes, resolve_device
from hexad.models.build import build_model
from hexad.models.kv_formats import find_kv_dtype
from hexad.models.loader import TORCH_DTYPES, open_weights
from hexad.models.spec import ModelSpec
from hexad.operators.registry import registry

log = logging.getLogger(__name__)

DEFAULT_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_BATCHED_TOKENS = 2_048
FIXED_SHARE = 0.9  # of free memory: the largest pool that is advised, since steps need some as well
CPU_SHARE = 0.5  # of free memory for KV on a CPU, when the configuration names no size: the machine has other work


def fitting(wanted: int, device: torch.device, free: int, total: int) -> int:
    """The size of a pool of `wanted` bytes where `free` bytes are left beside the weights.

    On a CPU the size was settled before the weights were read (`orchestration/decide.py` refuses what the machine lacks altogether), so
    that it shrinks to what is left; on a GPU somebody asked for it.

    Raises:
        OutOfMemoryError: a GPU has less.
    """
    if wanted <= free:
        return wanted
    fits = int(free * FIXED_SHARE) // 2**20 * 2**20
    has = f"{describe(device)} has {free / 2**30:,.2f} of {total / 2**30:,.2f} GiB free beside the weights"
    asked = f"cache.kv_cache_memory_bytes = {wanted} ({wanted / 2**30:,.2f} GiB)"
    if device.type == "cpu" and fits:
        log.warning("%s, but %s: taking %d MiB", asked, has, fits // 2**20)
        return fits
    mend = f"use at most {fits // 2**20}MiB" if fits else "take a smaller model or dtype, or free some"
    raise OutOfMemoryError(f"{asked}, but {has}: {mend}")


class LocalExecutor:
    """Implements the executor seam on one device. `config` is resolved; what is still None takes the defaults above.

    `vocab_size` is the number of ids that the tokenizer knows: rows of the head beyond it are padding and never drawn.
    """

    def __init__(
        self, config: HexadConfig, spec: ModelSpec, files: Path, device: torch.device | None = None, vocab_size: int | None = None
    ) -> None:
        self.config = config
        self.spec = spec
        self.files = files
        self.vocab_size = vocab_size or spec.vocab_size
        self.device = device or resolve_device(config.device.device)
        self.depth = 2 if config.scheduler.async_scheduling else 1
        self.dtype = _dtype(config.model.dtype, spec)
        self.block_size = config.cache.block_size or DEFAULT_BLOCK_SIZE
        self.kv_dtype = find_kv_dtype(config.cache.kv_cache_dtype, spec, self.dtype, self.device, self.block_size)
        self.max_num_seqs = config.scheduler.max_num_seqs or DEFAULT_MAX_NUM_SEQS
        self.max_batched_tokens = config.scheduler.max_num_batched_tokens or DEFAULT_MAX_BATCHED_TOKENS
        self.max_model_len = config.model.max_model_len or spec.max_len
        self.runner: Runner
        self._weight_bytes = 0
        self._thread: DeviceThread | None = None
        self._closed = False

    def load(self) -> LoadReport:
        """Read the weights and bind the operators."""
        if self.device.type != "cpu":
            return self._load()
        cores = pinned_cores(self.config.device.cpu_pin, self.config.device.threads)
        threads = self.config.device.threads or len(cores) or torch.get_num_threads()
        self._thread = DeviceThread("hexad-device", lambda: start_threads(threads, cores))
        return self._thread.run(self._load)

    def _load(self) -> LoadReport:
        started = time.perf_counter()
        store = open_weights(self.files, self.spec, self.config.model.load_format)
        opened = time.perf_counter()
        model = build_model(
            self.spec,
            store,
            self.dtype,
            self.device,
            self.config.device.operators,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            max_len=self.max_model_len,
            quantization=self.config.model.quantization,
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        built = time.perf_counter()
        self.runner = Runner(
            model,
            self.device,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            use_graphs=self.device.type == "cuda" and not self.config.device.enforce_eager,
            operators=self.config.device.operators,
        )
        self._weight_bytes = model.weight_bytes
        return LoadReport(
            device=describe(self.device),
            dtype=_name(self.dtype),
            weight_bytes=model.weight_bytes,
            phases_s={"open": opened - started, "read": built - opened},
            operators=dict(registry.choices),
        )

    def kv_bytes(self) -> KVBudget:
        """Memory left for keys and values, measured after loading.

        Raises:
            OutOfMemoryError: nothing is left.
        """
        breakdown = self._breakdown()
        available = breakdown.pop("available")
        page = page_bytes(self.spec, self.kv_dtype, self.block_size)
        if available < page:
            listed = ", ".join(f"{name} {value / 2**20:,.0f} MiB" for name, value in breakdown.items())
            raise OutOfMemoryError(
                f"no memory is left for keys and values on {describe(self.device)} ({listed}): lower max_num_batched_tokens, "
                "raise gpu_memory_utilization, or take a smaller model or dtype"
            )
        return KVBudget(
            available_bytes=available,
            page_bytes=page,
            block_size=self.block_size,
            groups=kv_groups(self.spec),
            breakdown=breakdown,
        )

    def _breakdown(self) -> dict[str, int]:
        fixed = self.config.cache.kv_cache_memory_bytes
        if fixed is not None:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            fixed = fitting(fixed, self.device, *memory_bytes(self.device))
            return {"weights": self._weight_bytes, "kv_cache_memory_bytes": fixed, "available": fixed}
        free, total = memory_bytes(self.device)
        if self.device.type == "cpu":
            return {"weights": self._weight_bytes, "free": free, "total": total, "available": int(free * CPU_SHARE)}
        peak = activation_peak_bytes(
            self.runner.model, self.device, self.max_batched_tokens, self.max_num_seqs, self.block_size, self.kv_dtype
        )
        gc.collect()
        torch.cuda.empty_cache()
        free, total = memory_bytes(self.device)
        reserve = int(total * (1 - self.config.cache.gpu_memory_utilization))
        available = free - peak - reserve
        return {
            "total": total,
            "weights": self._weight_bytes,
            "free": free,
            "activations": peak,
            "reserve": reserve,
            "available": available,
        }

    def allocate(self, layout: KVLayout) -> None:
        """Make the KV pool; the executor is then ready for plans. Called again (no step in flight), it forgets every request."""
        if layout.block_size != self.block_size:
            raise ConfigError(f"block size is {layout.block_size}, the operators were bound for {self.block_size}: use that")
        if self._thread is None:
            self.runner.allocate(layout, self.kv_dtype)
        else:
            self._thread.run(lambda: self.runner.allocate(layout, self.kv_dtype))

    def execute(self, plan: StepPlan) -> LocalStep:
        """Queue the forward pass of one plan."""
        if self._closed:
            raise EngineDeadError("the executor is closed: start a new one")
        step = LocalStep(self.runner, self._thread, self.runner.plan(plan))
        step.launch()
        return step

    def close(self) -> None:
        """Finish what is queued and let go of the device's memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._thread.close()
        self.__dict__.pop("runner", None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _dtype(name: str, spec: ModelSpec) -> torch.dtype:
    stored = spec.dtype if spec.dtype in ("float32", "bfloat16", "float16") else "bfloat16"
    return TORCH_DTYPES[stored if name == "auto" else name]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
