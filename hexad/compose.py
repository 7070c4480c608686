"""The one place that builds an executor and injects it into a core loop; run as a module, it is an engine process.

"auto" is decided here, once, by `orchestration/decide.py`; the resolved tree is what everybody gets afterwards.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hexad import __version__
from hexad.common.clock import SystemClock
from hexad.common.config import HexadConfig
from hexad.common.errors import ModelError
from hexad.common.openmp import calm_openmp
from hexad.engine.executor.seam import Executor, LoadReport
from hexad.engine.plan import KVBudget, KVGroupSpec, KVLayout
from hexad.hardware.machine import Machine, read_machine
from hexad.models.spec import AttentionSpec, MLPSpec, ModelSpec
from hexad.orchestration.core import CoreLoop, StepObserver
from hexad.orchestration.decide import GIB, fit_kv, resolve
from hexad.orchestration.messages import PROTOCOL_VERSION, Welcome
from hexad.orchestration.metrics import StepMetrics
from hexad.orchestration.process import Built, Report, main
from hexad.orchestration.scheduler import Scheduler
from hexad.orchestration.settings import SchedulerSettings
from hexad.orchestration.sizing import longest_sequence

if TYPE_CHECKING:
    from hexad.models.remote.cache import Progress
    from hexad.models.template import ChatTemplate
    from hexad.models.tokenizer import Tokenizer

log = logging.getLogger("hexad.compose")

FAKE_MODEL = "fake"  # with device "fake": no files at all
MAX_FAKE_PAGES = 65_536
MIB = 2**20


FAKE_SPEC = ModelSpec(
    name=FAKE_MODEL,
    family="llama",
    vocab_size=32_000,
    hidden=64,
    num_layers=1,
    max_len=32_768,
    attention=AttentionSpec(heads=1, kv_heads=1, head_dim=64, scale=0.125),
    mlp=MLPSpec(intermediate=64),
    rope=None,
    layer_kinds=("full",),
)


@dataclass(slots=True)
class OpenedModel:
    """A model's files and what they say, before any weight is read."""

    path: Path | None  # folder or file; None: the fake model, which has none
    spec: ModelSpec
    _tokenizers: dict[str | None, Tokenizer] = field(default_factory=dict, init=False, repr=False)  # by configured override

    def text(self, config: HexadConfig) -> tuple[Tokenizer, ChatTemplate | None]:
        """Its tokenizer and chat template, or those that the configuration names instead.

        Raises:
            ModelError: there is no tokenizer, or one that is not understood.
        """
        from hexad.models.template import ChatTemplate

        tokenizer = self._tokenizer(config.model.tokenizer)
        assert self.path is not None
        return tokenizer, ChatTemplate.from_files(self.path, config.model.chat_template)

    def num_token_ids(self, config: HexadConfig) -> int:
        """Ids that may be drawn: what the tokenizer knows. The network can have more rows, which are padding; without a tokenizer, all."""
        if self.path is None:
            return self.spec.vocab_size
        try:
            return min(self._tokenizer(config.model.tokenizer).vocab_size, self.spec.vocab_size)
        except ModelError as error:
            log.info("no tokenizer (%s): every row of the head counts as a token", error.message)
            return self.spec.vocab_size

    def _tokenizer(self, override: str | None) -> Tokenizer:
        from hexad.models.tokenizer import Tokenizer

        if self.path is None:
            raise ModelError(f"model {FAKE_MODEL!r} has no tokenizer: name a real model to get text")
        if override not in self._tokenizers:
            self._tokenizers[override] = Tokenizer.from_files(self.path, override)
        return self._tokenizers[override]

    def sampling_defaults(self, config: HexadConfig) -> dict[str, Any]:
        """What the model's author recommends, by field of `SamplingParams`.

        Raises:
            ModelError: its generation_config.json cannot be read.
        """
        from hexad.models.generation_config import sampling_defaults

        return sampling_defaults(self.path, config.model.generation_config) if self.path is not None else {}


def open_model(config: HexadConfig, report: Report = lambda phase, detail: None) -> OpenedModel:
    """Fetch the model if it is not here, and read what it is. No weights, no torch.

    Raises:
        ModelError: it cannot be found, fetched or understood.
    """
    model = config.model.model
    if config.device.device.startswith("fake") and model == FAKE_MODEL:
        return OpenedModel(None, FAKE_SPEC)
    from hexad.models.catalog import read_spec
    from hexad.models.sources import fetch

    files = fetch(model, revision=config.model.revision, progress=_fetching(report))
    return OpenedModel(files.path, read_spec(files.path, name=files.display_name))


def _fetching(report: Report) -> Progress:
    """Reports a download at most twice a second."""
    clock, last_s = SystemClock(), 0.0

    def progress(what: str, done_bytes: int, total_bytes: int | None) -> None:
        nonlocal last_s
        if clock.now() - last_s >= 0.5 or done_bytes == total_bytes:
            last_s = clock.now()
            report("fetch", f"{what}: {done_bytes / MIB:.0f}" + (f" of {total_bytes / MIB:.0f} MiB" if total_bytes else " MiB"))

    return progress


@dataclass(frozen=True, slots=True)
class Engine:
    """A core loop with its executor loaded, and what its users need to know."""

    core: CoreLoop
    welcome: Welcome
    config: HexadConfig  # resolved
    notes: tuple[str, ...]  # decisions, in words
    report: LoadReport
    opened: OpenedModel


def build(config: HexadConfig, report: Report = lambda phase, detail: None, *, observers: Sequence[StepObserver] = ()) -> Engine:
    """Open the model, decide, load, size the KV pool, and compose. `report(phase, detail)` hears how it goes.

    Raises:
        StartupError: ConfigError, ModelError, WeightsError or OutOfMemoryError, as the case may be; nothing stays allocated.
    """
    calm_openmp()
    report("open", config.model.model)
    opened = open_model(config, report)
    report("import", "")
    machine = _visible(read_machine())
    config, decisions = resolve(config, opened.spec, machine)
    num_token_ids = opened.num_token_ids(config)
    executor = _executor(config, opened, num_token_ids)
    try:
        report("read", config.device.device)
        loaded = executor.load()
        report("allocate", f"{loaded.weight_bytes / GIB:.2f} GiB of weights")
        budget = executor.kv_bytes()
        config, layout, more = fit_kv(config, opened.spec, budget)
        executor.allocate(layout)
    except BaseException:
        executor.close()
        raise
    notes = tuple(str(decision) for decision in (*decisions, *more))
    for note in notes:
        log.info("%s", note)
    core = CoreLoop(
        executor,
        Scheduler(_settings(config, executor.depth), layout, SystemClock()),
        SystemClock(),
        vocab_size=num_token_ids,
        async_scheduling=config.scheduler.async_scheduling,
        observers=(StepMetrics(), *observers),
    )
    return Engine(core, _welcome(config, opened.spec, num_token_ids, loaded, layout, budget.page_bytes), config, notes, loaded, opened)


def _executor(config: HexadConfig, opened: OpenedModel, num_token_ids: int) -> Executor:
    if config.device.device.startswith("fake"):
        return _fake_executor(config, opened.spec, num_token_ids)
    from hexad.engine.executor.local import LocalExecutor

    assert opened.path is not None
    return LocalExecutor(config, opened.spec, opened.path, vocab_size=num_token_ids)


def _fake_executor(config: HexadConfig, spec: ModelSpec, num_token_ids: int) -> Executor:
    """Made-up tokens at a settable speed: "fake" is instant, "fake:0.02" takes 20 ms a step."""
    from hexad.engine.executor.fake import FakeExecutor, FakeScript, FakeSpeed

    block_size, memory = config.cache.block_size, config.cache.kv_cache_memory_bytes
    assert block_size is not None and memory is not None
    page_bytes = block_size * spec.kv_bytes_per_token(config.cache.kv_cache_dtype)
    available = min(memory, MAX_FAKE_PAGES * page_bytes)
    return FakeExecutor(
        script=FakeScript(vocab_size=num_token_ids),
        speed=FakeSpeed(step_s=float(config.device.device.partition(":")[2] or 0)),
        check_kv="off",
        budget=KVBudget(
            available_bytes=available,
            page_bytes=page_bytes,
            block_size=block_size,
            groups=(KVGroupSpec(kind="full", num_layers=spec.num_layers),),
            breakdown={"kv_cache_memory_bytes": memory},
        ),
    )


def _visible(machine: Machine) -> Machine:
    """The machine with the GPUs that torch may use: a build without CUDA, or CUDA_VISIBLE_DEVICES, can leave fewer than the driver has."""
    if not machine.gpus:
        return machine
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return replace(machine, gpus=machine.gpus[:count])


def _settings(config: HexadConfig, depth: int) -> SchedulerSettings:
    cache, scheduler = config.cache, config.scheduler
    assert scheduler.max_num_seqs and scheduler.max_num_batched_tokens and config.model.max_model_len
    return SchedulerSettings(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=config.model.max_model_len,
        enable_prefix_caching=cache.enable_prefix_caching,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        max_prefill_tokens_per_step=scheduler.max_prefill_tokens_per_step,
        scheduling_policy=scheduler.scheduling_policy,
        tenant_weights=scheduler.tenant_weights,
        max_num_queued_reqs=scheduler.max_num_queued_reqs,
        max_queued_tokens=scheduler.max_queued_tokens,
        depth=depth if scheduler.async_scheduling else 1,
        model_revision=config.model.revision or "",
        seed=config.model.seed,
    ).check()


def _welcome(config: HexadConfig, spec: ModelSpec, num_token_ids: int, loaded: LoadReport, layout: KVLayout, page_bytes: int) -> Welcome:
    assert config.model.max_model_len is not None
    return Welcome(
        protocol=PROTOCOL_VERSION,
        version=__version__,
        config_hash=config.fingerprint(),
        model=spec.name,
        max_len=config.model.max_model_len,
        max_request_blocks_tokens=longest_sequence(layout.num_blocks, layout.groups, layout.block_size, 2**40),
        vocab_size=num_token_ids,
        device=loaded.device,
        dtype=loaded.dtype,
        kv_bytes=layout.num_blocks * page_bytes,
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
    )


def serve() -> int:
    """Be an engine process (see `orchestration/process.py`); returns the exit code."""

    def build_engine(config: HexadConfig, report: Report) -> Built:
        engine = build(config, report)
        return Built(engine.core, engine.welcome, engine.config, engine.notes)

    return main(build_engine)


if __name__ == "__main__":
    sys.exit(serve())
