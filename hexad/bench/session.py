"""One `hexad bench` run from its options to its file: calibrate, build the face, measure with live progress, flag, save.

An interrupt at any moment leaves a valid file with what was measured, marked partial.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from hexad.bench import results
from hexad.bench.ceilings import calibration_of, is_here, note
from hexad.bench.compare import flatten
from hexad.bench.faces import Face, Tick
from hexad.bench.facts import read_facts
from hexad.bench.floors import load_floor
from hexad.bench.loads import Load
from hexad.bench.planning import compare_with_result
from hexad.bench.runs import Metrics, Options, Run, RunFailedError
from hexad.bench.shapes import is_shape, resolve_model
from hexad.common.config import DEFAULT_MODEL
from hexad.common.errors import ConfigError, HexadError
from hexad.hardware.machine import read_machine, read_processor
from hexad.hardware.registry import Device, Figure, match_device
from hexad.hardware.roofline import impossible
from hexad.hardware.telemetry import Telemetry
from hexad.models.costs import ModelCosts, find_format

Job = tuple[Load, dict[str, Any], Path | None]  # a load, its result so far, its file
_UNQUANTISED = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Target:
    """What is measured."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)  # engine options, flat
    base_url: str | None = None  # an address instead of an engine in this process
    served_model_name: str | None = None
    api_key: str | None = None
    clients: int | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)
    spawn: bool = False  # start `hexad serve` with the same options, measure it, then the engine in this process

    def face(self, vocab_size: int) -> Face:
        """Build the engine, or look at the address."""
        if self.base_url is not None:
            from hexad.bench.httpface import HttpFace

            return HttpFace(
                self.base_url, self.served_model_name, vocab_size, api_key=self.api_key, clients=self.clients, extra_body=self.extra_body
            )
        from hexad.bench.inprocess import InProcess

        options = dict(self.options)
        if is_shape(self.model):
            options.setdefault("load_format", "dummy")
        return InProcess(resolve_model(self.model), options)


@dataclass
class Session:
    """Runs loads on one target and writes their files."""

    target: Target
    options: Options
    calibration_s: float = 0.3  # seconds a figure; 0: no calibration
    quiet: bool = False
    kind: str = "offline"

    def run(self, loads: list[Load], path: Path | None) -> list[dict[str, Any]]:
        """Measure each load; returns the results, the last of which may be partial after an interrupt.

        Raises:
            KeyboardInterrupt: after the partial result was written.
            HexadError: the engine cannot be built, or a request failed.
        """
        spec, stored = read_facts(self.target.model)
        self._costs, self._vocab_size = costs_of(spec, stored, self.target.options), spec.vocab_size
        made = []
        for load in loads:
            result = results.new_result(self.kind, load, spec.name, self._costs.format.name)
            result["kv_dtype"] = self._costs.kv_dtype
            result["duration_s"] = self.options.duration_s
            result["settings"] = self._settings()
            one = path if path is None or len(loads) == 1 else path.with_name(f"{path.stem}-{load.name}{path.suffix or '.json'}")
            results.begin(result, one)
            made.append((load, result, one))
        base_url = self.target.base_url
        self._calibration, self._uncalibrated = calibration_of(self.target.options, base_url, self.calibration_s, quiet=self.quiet)
        if self._uncalibrated:
            note(f"not calibrated: {self._uncalibrated}", self.quiet)
        for _, result, _ in made:
            result["calibration"] = self._calibration
            if self._uncalibrated:
                result["calibration_note"] = self._uncalibrated
        if self.target.spawn:
            self._run_both(made)
        else:
            self._run_one(self.target, made)
        return [result for _, result, _ in made]

    def _run_both(self, made: list[Job]) -> None:
        """A server of our own, then the same loads in this process (one engine at a time); `in_process` and the ratio join the result."""
        from hexad.bench.spawned import SpawnedServer

        note("starting a server", self.quiet)
        shape = is_shape(self.target.model)
        options = ({"load_format": "dummy"} if shape else {}) | self.target.options
        with SpawnedServer(resolve_model(self.target.model), options, self._vocab_size if shape else None) as server:
            self._run_one(replace(self.target, base_url=server.url, spawn=False), made, server.pid, last=False)
        inside: list[Job] = [(load, {**result, "metrics": {}, "flags": []}, None) for load, result, _ in made]
        note("the same in this process", self.quiet)
        self._run_one(replace(self.target, spawn=False), inside)
        for (_, result, path), (_, other, _) in zip(made, inside, strict=True):
            result["in_process"] = other["metrics"]
            http, direct = (flatten(side["metrics"].get("output_tok_s", {})) for side in (result, other))
            result["metrics"]["http_share_of_in_process"] = {key: http[key] / direct[key] for key in http if direct.get(key)}
            result["partial"] = False
            results.save(result, path)

    def _run_one(self, target: Target, made: list[Job], pid: int | None = None, *, last: bool = True) -> None:
        """All loads on one face. `last`: nothing follows that could complete the results."""
        with ExitStack() as stack:
            gpu = 0 if self._calibration and self._calibration["kind"] == "gpu" else None
            telemetry = stack.enter_context(Telemetry(gpu, pid=pid))
            face = target.face(self._vocab_size)
            stack.callback(face.close)
            for load, result, path in made:
                self._measure(face, load, result, path, telemetry, last=last)

    def _measure(self, face: Face, load: Load, result: dict[str, Any], path: Path | None, telemetry: Telemetry, *, last: bool) -> None:
        def keep(metrics: Metrics) -> None:
            result["metrics"] = metrics
            self._describe(face, result, telemetry)
            results.save(result, path)

        keep({})
        with Progress(self.quiet, load.name) as progress:
            try:
                keep(Run(face, load, self.options, progress.tick, keep).measure())
            except RunFailedError as error:
                raise HexadError(str(error)) from None
        result["partial"] = not last
        _judge(result, load, self._costs)
        flags = getattr(face, "flags", None)
        result["flags"] += flags() if flags else []
        results.save(result, path)

    def _describe(self, face: Face, result: dict[str, Any], telemetry: Telemetry) -> None:
        info, seen = face.info(), telemetry.summary()
        result["engine"] = info
        result["device"] = {"name": (self._calibration or {}).get("device") or _device_name(info), "telemetry": seen}
        if "address" not in info or is_here(info["address"]):
            result["device"]["cores"] = read_processor().cores
        if not result["metrics"]:
            return
        if info["face"] == "in process":
            result["metrics"]["kv_footprint_bytes"] = info["kv_bytes"]
            result["metrics"]["weight_bytes"] = info["weight_bytes"]
        if info["face"] == "in process" or self.target.spawn:
            result["metrics"]["peak_memory_bytes"] = seen.get("peak_gpu_bytes") or seen["peak_rss_bytes"]

    def _settings(self) -> dict[str, Any]:
        """What the flags made of the run beside its load: two results with other settings are not alike."""
        options, target = self.options, self.target
        slo = (
            {key: value for key, value in msgspec.structs.asdict(options.slo).items() if value is not None}
            if self.kind == "serve"
            else None
        )
        return {
            "repeats": options.repeats,
            "seed": options.seed,
            "request_rate": options.request_rate,
            "goodput": slo,
            "extra_body": target.extra_body,
            "options": results.shown_options(target.options),
        }


def served_default(base_url: str, served_name: str | None, api_key: str | None, *, quiet: bool = False) -> str:
    """The default model, when the address (or `served_name`) says that name.

    Prompts and floors are those of a model, so another one must be named.

    Raises:
        ConfigError: it serves something else, or does not answer.
    """
    from hexad.bench.httpface import HttpFace

    name = HttpFace(base_url, served_name, 1, api_key=api_key).model
    known = read_facts(DEFAULT_MODEL)[0].name
    if not name.startswith(known):  # llama.cpp says the file's name
        raise ConfigError(
            f"--base-url needs --model, whose lengths and floors count: the address serves {name!r}; name its folder, file, source or "
            f"shape, such as --model llama-3.1-8b (only {known} is known without: {DEFAULT_MODEL})"
        )
    note(f"no --model: the address serves {name}, which is {DEFAULT_MODEL}", quiet)
    return DEFAULT_MODEL


def costs_of(spec: Any, stored: Any, options: dict[str, Any]) -> ModelCosts:
    """Costs of a model as these engine options would run it."""
    wanted = options.get("quantization") or options.get("dtype")
    keeps = wanted in (None, "auto") or (options.get("quantization") is None and stored.name not in _UNQUANTISED)
    form = stored if keeps else find_format(str(wanted))
    return ModelCosts(spec, form, options.get("kv_cache_dtype") or "auto")


def _device_name(info: dict[str, Any]) -> str:
    """What a result without calibration says of its device: the engine's word, this machine for a local address, else the host."""
    if "device" in info:
        return str(info["device"])
    host = urlsplit(info["address"]).hostname or ""
    if not is_here(info["address"]):
        return host
    machine = read_machine()
    return machine.gpus[0].name if machine.gpus else machine.processor.name


def calibrated_device(calibration: dict[str, Any]) -> Device:
    """The device of a calibration, for floors: a registered one whose figures were measured with care, else what was measured just now.

    A short calibration sees the burst clock; the registry's sustained figures are the steadier floor.
    """
    known = match_device(calibration["device"])
    if known is not None and known.read_bytes_s.measured:
        return known
    source = "the calibration of this result"
    rates = {kind: Figure(rate, source, measured=True) for kind, rate in calibration["gemm_flops_s"].items()}
    memory = known.memory_bytes if known else Figure(0, source)
    read = Figure(calibration["read_bytes_s"], source, measured=True)
    return Device(calibration["device"], calibration["kind"], memory, read, {**(known.rates if known else {}), **rates})


def _judge(result: dict[str, Any], load: Load, costs: ModelCosts) -> None:
    """Add the floors on the calibrated device, and flag what memory could not have delivered."""
    if not result["calibration"]:
        result["flags"].append(f"impossible times could not be judged: {result.get('calibration_note', 'no calibration')}")
        return
    device = calibrated_device(result["calibration"])
    limit = result["engine"].get("config", {}).get("scheduler", {}).get("max_num_seqs") or 256
    result["floors"] = load_floor(costs, device, load, limit)
    result["against_floors"] = compare_with_result(result, result["floors"])
    result["flags"] += impossible_times(result, load, costs)


def impossible_times(result: dict[str, Any], load: Load, costs: ModelCosts) -> list[str]:
    """Steps that would have read weights and KV faster than the measured bandwidth of the same device."""
    from hexad.bench.floors import decode_bound

    metrics, device = result["metrics"], calibrated_device(result["calibration"])
    read_bytes_s = max(result["calibration"]["read_bytes_s"], device.read_bytes_s.value)
    steps = {1: metrics["tpot_ms"]} if isinstance(metrics.get("tpot_ms"), float) else {}
    steps |= {int(batch): value for batch, value in (metrics.get("ms_per_step") or {}).items()} if load.batch else {}
    if load.concurrency:  # every stream gets at most one token a step
        steps |= {int(n): int(n) / rate * 1e3 for n, rate in (metrics.get("output_tok_s") or {}).items() if rate}
    context = load.prompt_tokens + load.output_tokens / 2
    found = []
    for batch, milliseconds in steps.items():
        parts = decode_bound(costs, device, batch, context)
        nbytes = (parts.weights_s + parts.kv_s) * device.read_bytes_s.value
        reason = impossible(nbytes, milliseconds / 1e3, read_bytes_s, tolerance=0.05)
        if reason:
            found.append(f"decode step of batch {batch}: {reason}")
    return found


class Progress:
    """Live progress on stderr: requests, output tokens, tokens/s. Silent when quiet or not a terminal (then a line every ten seconds)."""

    def __init__(self, quiet: bool, title: str) -> None:
        self._quiet = quiet
        self._title = title
        self._live: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar
            from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

            self._live = Bar(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=Console(stderr=True))
            self._task = self._live.add_task(self._title, total=None)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def tick(self, label: str) -> Tick:
        """A callback for one step of a sweep."""
        start = last = time.perf_counter()
        every_s = 0.2 if self._live is not None else 10.0

        def show(finished: int, tokens: int) -> None:
            nonlocal last
            now = time.perf_counter()
            if self._quiet or now - last < every_s:
                return
            last = now
            text = f"{self._title} {label}: {finished} requests, {tokens:,} tokens, {tokens / (now - start):,.0f} tok/s"
            if self._live is not None:
                self._live.update(self._task, description=text)
            else:
                note(text)

        return show


Ticker = Callable[[str], Tick]
