"""The runner: a step plan becomes device tensors, a forward pass, tokens, and a result.

Token ids never leave the device between steps: a table [request slot, position] holds every id. Prompts are written when a request arrives,
drawn tokens after sampling, and the next step's inputs are gathered from it, so that step n + 1 can be launched before the host knows what
step n drew.

Calls come in two orders that must not be mixed up:
- `plan` runs on the caller's thread, in the order of the plans, and touches host state alone (`BatchState`).
- `forward` and `sample` run in the device's order (a worker thread on a CPU, a stream on a GPU) and touch everything on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hexad.engine.batch_state import BatchState, HostStep
from hexad.engine.executor.seam import Masks
from hexad.engine.kv import KVStorage
from hexad.engine.plan import KVLayout, RowResult, StepPlan, StepResult, TokenLogprobs
from hexad.engine.prompt_logprobs import chunk_logprobs, entries, num_targets
from hexad.engine.step_inputs import DeviceStep, to_device
from hexad.models.build import Model
from hexad.models.inputs import ForwardInputs

NAN_ERROR = "the model's output for this request is not a number (NaN): its weights or its keys and values are damaged"


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities of one row's prompt tokens, on the device."""

    row: int  # execution row
    targets: torch.Tensor
    columns: tuple[torch.Tensor, ...]  # logprob, rank, top ids, top logprobs


@dataclass(slots=True)
class Step:
    """One step on its way through the device."""

    host: HostStep
    device: DeviceStep | None = None
    hidden: torch.Tensor | None = None  # [S, H] of the rows that sample
    prompt_scores: list[PromptScores] = field(default_factory=list)


@dataclass(slots=True)
class StepOutput:
    """What a step drew: tensors that `Runner.result` turns into a `StepResult`."""

    step: Step
    tokens: torch.Tensor  # [S] int64
    failed: torch.Tensor  # [S] bool

    def to_host(self) -> StepOutput:
        """The same in pinned memory, filled when the stream gets there."""
        scores = [PromptScores(s.row, _pinned(s.targets), tuple(map(_pinned, s.columns))) for s in self.step.prompt_scores]
        step = Step(self.step.host, prompt_scores=scores)
        return StepOutput(step, _pinned(self.tokens), _pinned(self.failed))


class Runner:
    """Owns the model's state on one device: pages, token table, sampler."""

    def __init__(self, model: Model, device: torch.device, *, max_num_seqs: int, max_model_len: int) -> None:
        self.model = model
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.state: BatchState
        self.kv: KVStorage

    def allocate(self, layout: KVLayout, kv_dtype: torch.dtype) -> None:
        """Make the KV pool and everything that is as large as the batch."""
        self.kv = KVStorage(layout, self.model.spec, kv_dtype, self.device)
        self.state = BatchState(self.max_num_seqs, self.max_model_len, layout.block_size, len(layout.groups))
        table = torch.zeros(self.max_num_seqs, self.state.table_width, dtype=torch.int64, device=self.device)
        self._token_table = table
        self._flat_tokens = table.view(-1)

    def plan(self, plan: StepPlan) -> Step:
        """Host half of a step."""
        return Step(self.state.step(plan))

    @torch.inference_mode()
    def forward(self, step: Step) -> None:
        """Apply arrivals and moves, compute the rows, keep the hidden states that sampling needs."""
        host = step.host
        if host.arrivals:
            self._admit(host)
        if host.kv_moves:
            self.kv.move(host.kv_moves)
        if not host.rows:
            return
        device = step.device = to_device(host, self.state.table_width, self.state.block_size, self.device)
        inputs = ForwardInputs(self._flat_tokens.index_select(0, device.token_index), device.positions, device.attention)
        hidden = self.model.forward(inputs, self.kv.layers)
        self._score_prompts(step, hidden)
        if host.sampled:
            step.hidden = hidden if len(host.sampled) == hidden.shape[0] else hidden.index_select(0, device.last_token)

    @torch.inference_mode()
    def sample(self, step: Step, masks: Masks | None = None) -> StepOutput:
        """Draw a token for each row that samples and store it in the token table."""
        if step.hidden is None or step.device is None:
            empty = torch.empty(0, dtype=torch.int64)
            return StepOutput(step, empty, empty.bool())
        logits = self.model.logits(step.hidden)
        step.hidden = None
        best, tokens = logits.max(-1)
        self._flat_tokens.index_copy_(0, step.device.drawn_index, tokens)
        return StepOutput(step, tokens, best.isnan())

    def result(self, output: StepOutput, busy_s: float) -> StepResult:
        """The step's result on the host. Blocks until the device has it."""
        host = output.step.host
        drawn = dict(zip(host.sampled, zip(output.tokens.tolist(), output.failed.tolist(), strict=True), strict=True))
        scores = {score.row: _prompt_entries(score, host) for score in output.step.prompt_scores}
        results = [_row_result(row.rid, drawn.get(index), scores.get(index, ())) for index, row in enumerate(host.rows)]
        if host.num_decodes < len(host.rows):
            results = [result for _place, result in sorted(zip(host.order, results, strict=True), key=lambda pair: pair[0])]
        return StepResult(step_id=host.step_id, rows=tuple(results), busy_s=busy_s)

    def _admit(self, host: HostStep) -> None:
        for arrival in host.arrivals:
            self._token_table[arrival.slot, : len(arrival.ids)] = torch.from_numpy(arrival.ids).to(self.device)

    def _score_prompts(self, step: Step, hidden: torch.Tensor) -> None:
        """Prompt log-probabilities of the rows whose request wants them."""
        host = step.host
        for index, request in host.scored:
            row = host.rows[index]
            count, low = num_targets(row, request), int(host.query_start[index])
            targets = self._token_table[int(host.slots[index]), row.start + 1 : row.start + 1 + count].clone()
            top = request.params.prompt_logprobs or 0
            step.prompt_scores.append(PromptScores(index, targets, chunk_logprobs(self.model.logits, hidden[low:], targets, top)))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _row_result(rid: int, drawn: tuple[int, bool] | None, prompt_logprobs: tuple[TokenLogprobs | None, ...]) -> RowResult:
    if drawn is None:
        return RowResult(rid=rid, prompt_logprobs=prompt_logprobs)
    token, failed = drawn
    if failed:
        return RowResult(rid=rid, error=NAN_ERROR)
    return RowResult(rid=rid, tokens=(token,), prompt_logprobs=prompt_logprobs)


def _prompt_entries(score: PromptScores, host: HostStep) -> tuple[TokenLogprobs | None, ...]:
    chosen, ranks, ids, best = score.columns
    columns = (chosen.tolist(), ranks.tolist(), ids.tolist(), best.tolist())
    return entries(host.rows[score.row], score.targets.tolist(), columns)
