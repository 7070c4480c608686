"""The runner: a step plan becomes device tensors, a forward pass, tokens, and a result.

Token ids never leave the device between steps: a table [request slot, position] holds every id. Prompts are written when a request arrives,
drawn tokens after sampling, and the next step's inputs are gathered from it, so that step n + 1 can be launched before the host knows what
step n drew.

Calls come in two orders that must not be mixed up:
- `plan` runs on the caller's thread, in the order of the plans, and touches host state alone (`BatchState`).
- `forward` and `sample` run in the device's order (a worker thread on a CPU, a stream on a GPU) and touch everything on the device, the
  sampler included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

from hexad.engine.batch_state import BatchState, HostStep
from hexad.engine.executor.seam import Masks
from hexad.engine.graphs import Decoded, StepFrame, StepGraphs
from hexad.engine.kv import KVStorage
from hexad.engine.plan import KVLayout, RowResult, StepPlan, StepResult, TokenLogprobs
from hexad.engine.prompt_logprobs import PromptScores, num_targets, score
from hexad.engine.sampling.logprobs import LogprobTensors
from hexad.engine.sampling.sampler import Sampled, Sampler
from hexad.engine.step_inputs import DeviceStep, to_device
from hexad.models.build import Model
from hexad.models.inputs import ForwardInputs


@dataclass(slots=True)
class Step:
    """One step on its way through the device."""

    host: HostStep
    device: DeviceStep | None = None
    hidden: torch.Tensor | None = None  # [S, H] of the rows that sample
    decoded: Decoded | None = None  # a captured step was replayed: nothing else is set
    prompt_scores: list[PromptScores] = field(default_factory=list)


@dataclass(slots=True)
class StepOutput:
    """What a step drew: tensors that `Runner.result` turns into a `StepResult`."""

    host: HostStep
    sampled: Sampled | None  # None: no row samples
    prompt_scores: list[PromptScores]

    def to_host(self) -> StepOutput:
        """The same in pinned memory, filled when the stream gets there."""
        sampled = self.sampled.to_cpu() if self.sampled is not None else None
        scores = [PromptScores(s.row, s.first, s.top, [_pinned(part) for part in s.parts]) for s in self.prompt_scores]
        return StepOutput(self.host, sampled, scores)


M = TypeVar("M", bound=Callable[..., Any])


def _inferring(method: M) -> M:
    """`torch.inference_mode`, which costs a decode step on a CPU some 25 microseconds each time, unless the thread is in it already."""

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        if torch.is_inference_mode_enabled():
            return method(*args, **options)
        with torch.inference_mode():
            return method(*args, **options)

    return cast(M, call)


class Runner:
    """Owns the model's state on one device: pages, token table, sampler."""

    def __init__(
        self,
        model: Model,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        use_graphs: bool = False,
        operators: Mapping[str, str] | None = None,
    ) -> None:
        """`vocab_size`: ids that may be drawn (the tokenizer's; the model's rows beyond are padding). `use_graphs`: replay decode steps
        as CUDA graphs. `operators`: forced providers."""
        self.model = model
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.use_graphs = use_graphs
        self._operators = operators
        self.sampler: Sampler
        self.state: BatchState
        self.kv: KVStorage

    def allocate(self, layout: KVLayout, kv_dtype: torch.dtype) -> None:
        """Make the KV pool and everything that is as large as the batch. Called again, it forgets every request."""
        self.sampler = Sampler(self.vocab_size, self.model.spec.vocab_size, self.max_num_seqs, self.device, self._operators)
        self.kv = KVStorage(layout, self.model.spec, kv_dtype, self.device)
        self.state = BatchState(self.max_num_seqs, self.max_model_len, layout.block_size, len(layout.groups))
        width = self.state.table_width
        self._flat_tokens = torch.zeros(self.max_num_seqs * width + 1, dtype=torch.int64, device=self.device)  # the last cell is spare
        self._token_table = self._flat_tokens[:-1].view(self.max_num_seqs, width)
        self._graphs = StepGraphs(self._frame(layout), self.device) if self.use_graphs else None

    def _frame(self, layout: KVLayout) -> StepFrame:
        return StepFrame(
            model=self.model,
            kv_layers=self.kv.layers,
            tokens=self._flat_tokens,
            sampler=self.sampler,
            table_width=self.state.table_width,
            block_size=layout.block_size,
            groups=len(layout.groups),
            max_blocks=self.state.max_blocks,
            max_model_len=self.max_model_len,
        )

    def plan(self, plan: StepPlan) -> Step:
        """Host half of a step."""
        return Step(self.state.step(plan))

    @_inferring
    def forward(self, step: Step, starting: Callable[[], None] | None = None) -> None:
        """Apply arrivals and moves, compute the rows, keep the hidden states that sampling needs.

        `starting` may be called once: when all is prepared and the computation leaves the interpreter.
        """
        host = step.host
        self._update(host)
        if not host.rows:
            return
        if self._graphs is not None and not any(row.masked for row in host.rows):
            step.decoded = self._graphs.run(host, greedy=self.sampler.is_plain(host.sampled_slots))
            if step.decoded is not None:
                return
        pick_last = self.model.picks_last and host.max_query_len > 1 and not host.scored
        device = step.device = to_device(host, self.state.table_width, self.state.block_size, self.device, pick_last=pick_last)
        token_ids = self._flat_tokens.index_select(0, device.token_index)
        hidden = self.model.forward(ForwardInputs(token_ids, device.positions, device.attention, device.last, starting), self.kv.layers)
        if host.scored:
            step.prompt_scores = self._score_prompts(host, hidden)
        if host.sampled:
            step.hidden = hidden if pick_last or len(host.sampled) == hidden.shape[0] else hidden.index_select(0, device.last_token)

    @_inferring
    def sample(self, step: Step, masks: Masks | None = None) -> StepOutput:
        """Draw a token for each row that samples and store it in the token table."""
        decoded = step.decoded
        if decoded is not None:
            if decoded.sampled is not None:
                return StepOutput(step.host, decoded.sampled, step.prompt_scores)
            return self._draw(step, decoded.logits, decoded.drawn_index % self.state.table_width, decoded.drawn_index, masks)
        if step.hidden is None or step.device is None:
            return StepOutput(step.host, None, step.prompt_scores)
        hidden, step.hidden = step.hidden, None
        if self.sampler.is_plain(step.host.sampled_slots, masks):
            return self._store(step, self.sampler.take_best(self.model.scores(hidden)), step.device.drawn_index)
        return self._draw(step, self.model.logits(hidden), step.device.drawn_positions, step.device.drawn_index, masks)

    def _draw(self, step: Step, logits: torch.Tensor, drawn_at: torch.Tensor, drawn_index: torch.Tensor, masks: Masks | None) -> StepOutput:
        host = step.host
        sampled = self.sampler(logits, host.sampled_slots, drawn_at, self._token_table, drawn_at, masks, host.max_seq_len)
        return self._store(step, sampled, drawn_index)

    def _store(self, step: Step, sampled: Sampled, drawn_index: torch.Tensor) -> StepOutput:
        self._flat_tokens.index_copy_(0, drawn_index, sampled.token_ids)
        return StepOutput(step.host, sampled, step.prompt_scores)

    def result(self, output: StepOutput, busy_s: float) -> StepResult:
        """The step's result from host tensors. Any thread."""
        host = output.host
        scores = {score.row: score.entries() for score in output.prompt_scores}
        drawn = _drawn(self.sampler, output)
        results = [_row_result(row.rid, drawn.get(index), scores.get(index, ())) for index, row in enumerate(host.rows)]
        if host.num_decodes < len(host.rows):
            results = [result for _place, result in sorted(zip(host.order, results, strict=True), key=lambda pair: pair[0])]
        return StepResult(step_id=host.step_id, rows=tuple(results), busy_s=busy_s)

    def _update(self, host: HostStep) -> None:
        """What a plan says before its rows: drop, move, add."""
        for slot in host.dropped:
            self.sampler.remove(slot)
        if host.kv_moves:
            self.kv.move(host.kv_moves)
        for arrival in host.arrivals:
            self.sampler.add(arrival.slot, arrival.request)
            self._token_table[arrival.slot, : len(arrival.ids)] = torch.from_numpy(arrival.ids).to(self.device)

    def _score_prompts(self, host: HostStep, hidden: torch.Tensor) -> list[PromptScores]:
        """Prompt log-probabilities of the rows whose request wants them."""
        scores = []
        for index, request in host.scored:
            row, low, top = host.rows[index], int(host.query_start[index]), request.params.prompt_logprobs or 0
            targets = self._token_table[int(host.slots[index]), row.start + 1 : row.start + 1 + num_targets(row, request)]
            parts = score(self.model.logits, hidden[low:], targets, self.sampler, top)
            scores.append(PromptScores(index, row.start == 0, top, parts))
        return scores


Drawn = tuple[int, str | None, TokenLogprobs | None]


def _drawn(sampler: Sampler, output: StepOutput) -> dict[int, Drawn]:
    """(token, error, logprobs) by execution row."""
    if output.sampled is None:
        return {}
    host = sampler.to_host(output.sampled)
    return dict(zip(output.host.sampled, zip(host.token_ids, host.errors, host.logprobs, strict=True), strict=True))


def _row_result(rid: int, drawn: Drawn | None, prompt_logprobs: Sequence[TokenLogprobs | None]) -> RowResult:
    if drawn is None:
        return RowResult(rid=rid, prompt_logprobs=tuple(prompt_logprobs))
    token, error, logprobs = drawn
    if error is not None:
        return RowResult(rid=rid, error=error)
    return RowResult(rid=rid, tokens=(token,), logprobs=() if logprobs is None else (logprobs,), prompt_logprobs=tuple(prompt_logprobs))


def _pinned(tensors: LogprobTensors) -> LogprobTensors:
    return LogprobTensors(*(torch.empty_like(t, device="cpu", pin_memory=True).copy_(t, non_blocking=True) for t in tensors))
