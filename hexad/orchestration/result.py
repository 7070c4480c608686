"""One request, from its submission to its whole result: what an offline caller gets back. No torch."""

from __future__ import annotations

import msgspec

from hexad.common.params import SamplingParams
from hexad.engine.plan import TokenLogprobs, TokenSegment
from hexad.orchestration.detokenize import TextTokenizer
from hexad.orchestration.messages import Output, Submit
from hexad.orchestration.output import ChoiceOutput


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop" | "length" | "abort" | "error"
    stop_reason: str | int | None = None  # the stop string or stop token id that matched (end of sequence: None)
    logprobs: list[TokenLogprobs] | None = None  # one per visible token, when asked for
    cumulative_logprob: float | None = None  # their sum
    error: str | None = None  # this choice failed in the engine; the others did not


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Seconds, from the submission of the request."""

    ttft_s: float | None  # time to first token; None: there was none
    latency_s: float
    queued_s: float | None
    num_cached_tokens: int
    num_preemptions: int


class RequestOutput(msgspec.Struct, kw_only=True):
    """All choices of one prompt."""

    request_id: str
    prompt: str | None  # None: the prompt was given as ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None  # one per prompt token (the first has none), when asked for
    metrics: RequestMetrics


class RequestWork:
    """One prompt on its way through the engine: takes its outputs, joins its choices."""

    def __init__(
        self, request_id: str, text: str | None, ids: list[int], params: SamplingParams, tokenizer: TextTokenizer, started_s: float
    ) -> None:
        self.request_id = request_id
        self._text, self._ids, self._params = text, ids, params
        self._choices = [ChoiceOutput(tokenizer, params, ids, index) for index in range(params.n)]
        self._results = [CompletionOutput(index=index, text="", token_ids=[], finish_reason=None) for index in range(params.n)]
        self._pieces: list[list[str]] = [[] for _ in range(params.n)]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(params.n)]
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        self._metrics = RequestMetrics(ttft_s=None, latency_s=0.0, queued_s=None, num_cached_tokens=0, num_preemptions=0)
        self._started_s = started_s
        self._open = params.n

    @property
    def complete(self) -> bool:
        return self._open == 0

    def as_submit(self, eos_token_ids: tuple[int, ...]) -> Submit:
        return Submit(
            request_id=self.request_id, prompt=(TokenSegment(tuple(self._ids)),), params=self._params, eos_token_ids=eos_token_ids
        )

    def push(self, output: Output, now_s: float) -> bool:
        """Take one output; True when its choice ended at a stop string that the engine does not know of."""
        choice = self._choices[output.choice]
        if choice.done:
            return False
        self._measure(output, now_s)
        self._prompt_logprobs.extend(output.prompt_logprobs)
        delta = choice.push(output)
        result = self._results[output.choice]
        self._pieces[output.choice].append(delta.text)
        self._logprobs[output.choice].extend(delta.logprobs)
        result.token_ids.extend(delta.token_ids)
        if delta.done:
            result.finish_reason, result.stop_reason, result.error = delta.finish_reason, delta.stop_reason, delta.error
            self._open -= 1
        return delta.abort

    def _measure(self, output: Output, now_s: float) -> None:
        metrics = self._metrics
        metrics.latency_s = now_s - self._started_s
        metrics.num_preemptions += output.num_preemptions
        if metrics.ttft_s is None and output.token_ids:
            metrics.ttft_s = metrics.latency_s
        if metrics.queued_s is None:
            metrics.queued_s = output.queued_s
        metrics.num_cached_tokens = output.num_cached or metrics.num_cached_tokens

    def result(self) -> RequestOutput:
        for result, pieces, logprobs in zip(self._results, self._pieces, self._logprobs, strict=True):
            result.text = "".join(pieces)
            if self._params.logprobs is not None:
                result.logprobs = logprobs
                result.cumulative_logprob = sum(entry.logprob for entry in logprobs)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._text,
            prompt_token_ids=self._ids,
            outputs=self._results,
            prompt_logprobs=self._prompt_logprobs if self._params.prompt_logprobs is not None else None,
            metrics=self._metrics,
        )
