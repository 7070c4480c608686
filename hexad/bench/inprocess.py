"""An engine in this process as a `Face`: the core loop is driven directly, tokens are turned into text as `LLM.generate` does."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hexad.bench.faces import Prompt, Tick, no_tick
from hexad.bench.records import Record
from hexad.common.errors import StartupError
from hexad.common.params import SamplingParams
from hexad.engine.plan import TokenSegment
from hexad.orchestration.messages import Output, Submit
from hexad.orchestration.output import ChoiceOutput

Live = dict[str, tuple[Record, ChoiceOutput | None]]


class InProcess:
    """Builds an engine from flat options (`dtype=`, `max_num_seqs=`, ...) and owns it."""

    def __init__(self, model: str, options: Mapping[str, Any], *, detokenize: bool = True) -> None:
        """Load the model. `sampling` may be given other parameters than greedy ones afterwards (fields of `SamplingParams`).

        Raises:
            StartupError: a bad option, a model that cannot be read, or too little memory.
        """
        from hexad import compose
        from hexad.llm import config_from_options

        self._engine = compose.build(config_from_options({"model": model, **options}))
        self._core = self._engine.core
        self.vocab_size: int = self._engine.welcome.vocab_size
        self._tokenizer = _tokenizer(model) if detokenize else None
        self.sampling: dict[str, Any] = {"temperature": 0.0}
        self._records: list[Record] = []
        self._next_id = 0

    @property
    def records(self) -> list[Record]:
        return self._records

    @property
    def core(self) -> Any:
        """The core loop, for profiling."""
        return self._core

    def info(self) -> dict[str, Any]:
        engine, welcome = self._engine, self._engine.welcome
        config = engine.config.model_dump(mode="json", exclude={"server"})
        config["model"]["model"] = config["model"]["model"].rstrip("/").rpartition("/")[2]
        return {
            "face": "in process",
            "device": welcome.device,
            "dtype": welcome.dtype,
            "weight_bytes": engine.report.weight_bytes,
            "kv_bytes": welcome.kv_bytes,
            "kv_blocks": welcome.num_blocks,
            "block_size": welcome.block_size,
            "phases_s": engine.report.phases_s,
            "operators": engine.report.operators,
            "config": config,
            "detokenizes": self._tokenizer is not None,
        }

    def run(
        self,
        prompts: Sequence[Prompt],
        output_tokens: int,
        *,
        concurrency: int | None = None,
        duration_s: float | None = None,
        request_rate: float | None = None,
        tick: Tick = no_tick,
    ) -> list[Record]:
        """See `Face.run`. A failure of one request is its record's `error`."""
        params = SamplingParams(**self.sampling, max_tokens=output_tokens, ignore_eos=True)
        arrivals = _arrivals(len(prompts), request_rate)
        self._records = []
        live: Live = {}
        start = time.perf_counter()
        sent = finished = tokens = 0
        try:
            while live or sent < len(prompts) or duration_s is not None:
                now = time.perf_counter()
                if duration_s is not None and now - start >= duration_s:
                    break
                room = concurrency if concurrency is not None else len(prompts)
                while len(live) < room and (sent < len(prompts) or duration_s is not None):
                    if request_rate and sent < len(prompts) and now - start < arrivals[sent]:
                        break
                    prompt = prompts[sent] if sent < len(prompts) else _changed(prompts[sent % len(prompts)], sent, self.vocab_size)
                    self._submit(prompt, params, live)
                    sent += 1
                if not live:
                    time.sleep(max(0.0, arrivals[sent] - (now - start)) if request_rate and sent < len(prompts) else 0.0)
                    continue
                for output in self._step():
                    done, count = self._take(output, live)
                    finished, tokens = finished + done, tokens + count
                tick(finished, tokens)
        finally:  # an interrupt or the end of the time: leave nothing running
            self._drop(live)
        return self._records

    def close(self) -> None:
        self._core.close()

    def _submit(self, prompt: Prompt, params: SamplingParams, live: Live) -> None:
        name, self._next_id = f"bench-{self._next_id}", self._next_id + 1
        record = Record(len(prompt), time.perf_counter())
        text = ChoiceOutput(self._tokenizer, params, prompt) if self._tokenizer is not None else None
        self._core.submit(Submit(request_id=name, prompt=(TokenSegment(tuple(prompt)),), params=params))
        self._records.append(record)
        live[name] = (record, text)

    def _step(self) -> Sequence[Output]:
        return self._core.step().get(b"", ())

    def _take(self, output: Output, live: Live) -> tuple[int, int]:
        """Record one output; (1 if its request ended, tokens in it)."""
        entry = live.get(output.request_id)
        if entry is None:
            return 0, 0
        record, text = entry
        if text is not None:
            text.push(output)
        now = time.perf_counter()
        if output.token_ids:
            record.events_s.append(now)
            record.output_tokens += len(output.token_ids)
        record.cached_tokens = output.num_cached or record.cached_tokens
        if output.finish_reason is None and output.error is None:
            return 0, len(output.token_ids)
        record.end_s, record.error = now, output.error
        del live[output.request_id]
        return 1, len(output.token_ids)

    def _drop(self, live: Live) -> None:
        for name in live:
            self._core.abort(name)
        for _ in range(1_000):
            if not self._core.has_work():
                return
            self._step()


def _tokenizer(model: str) -> Any:
    """The model's tokenizer, or None for a shape that has none."""
    from hexad.bench.facts import locate
    from hexad.models.tokenizer import Tokenizer

    try:
        return Tokenizer.from_files(locate(model), None)
    except StartupError:
        return None


def _arrivals(count: int, request_rate: float | None) -> list[float]:
    """Poisson arrivals, seconds from the start; all zero without a rate."""
    if not request_rate:
        return [0.0] * count
    generator, moment, found = random.Random(0), 0.0, []
    for _ in range(count):
        found.append(moment)
        moment += generator.expovariate(request_rate)
    return found


def _changed(prompt: Prompt, turn: int, vocab_size: int) -> Prompt:
    """The prompt with a first token that no earlier turn had: it must not hit the prefix cache."""
    low = min(1_000, vocab_size // 4)
    return [low + (prompt[0] + turn * 7919) % (vocab_size - low), *prompt[1:]]
