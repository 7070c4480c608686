"""One API request at work in the engine: a submission per prompt, their choices followed side by side, usage counted once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hexad.application.api.admission import Ticket
from hexad.application.api.prompts import Prompt
from hexad.application.api.sse import Lane
from hexad.application.api.state import ServerState
from hexad.application.api.wire import PromptTokensDetails, Usage
from hexad.common.errors import HexadError
from hexad.common.metrics import RequestRecord
from hexad.common.params import SamplingParams
from hexad.engine.plan import TokenLogprobs, TokenSegment
from hexad.orchestration.messages import Output, Submit
from hexad.orchestration.output import ChoiceOutput, Delta
from hexad.orchestration.stream import RequestStream, output_error


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is sent to the engine for one prompt."""

    prompt: Prompt
    params: SamplingParams  # max_tokens is set


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """What holds for all prompts of a request."""

    request_id: str  # unique in this process
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    deadline_s: float | None = None


@dataclass
class Choice:
    """One choice of one prompt, as far as it has come."""

    index: int  # in the answer: prompt by prompt, n each
    run: Run
    output: ChoiceOutput
    finish_reason: str | None = None
    heard_s: float | None = None  # when its newest output came


@dataclass
class Run:
    """One prompt in the engine. Times are of the monotonic clock."""

    work: Work
    stream: RequestStream
    first_s: float | None = None
    last_s: float | None = None
    queued_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    failed: bool = False
    choices: list[Choice] = field(default_factory=list)
    num_cached: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    held: list[News] = field(default_factory=list)  # deltas that came before all prompt log-probabilities had

    @property
    def prompt_complete(self) -> bool:
        return self.work.params.prompt_logprobs is None or len(self.prompt_logprobs) >= len(self.work.prompt.ids)


class News(NamedTuple):
    """A delta of one choice. The first ones of a run come after its prompt log-probabilities are complete."""

    choice: Choice
    delta: Delta


class Generation:
    """Runs the work of one request. `batches` is consumed once, by one task; closing it aborts what has not ended."""

    def __init__(self, state: ServerState, work: Sequence[Work], envelope: Envelope, ticket: Ticket) -> None:
        self.work = work
        self.runs: list[Run] = []
        self._state = state
        self._envelope = envelope
        self._ticket = ticket
        self._failure: Exception | None = None  # on the short way

    def usage(self) -> Usage:
        """Tokens so far: each prompt once, the outputs of all choices."""
        prompt = sum(len(work.prompt.ids) for work in self.work)
        completion = sum(choice.output.num_tokens for run in self.runs for choice in run.choices)
        cached = sum(run.num_cached for run in self.runs)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    @property
    def arrived_s(self) -> float:
        """When it was admitted."""
        return self._ticket.start_s

    @property
    def finish_reason(self) -> str:
        """Of all choices, for the access record."""
        return ",".join(sorted({choice.finish_reason or "abort" for run in self.runs for choice in run.choices}))

    async def batches(self) -> AsyncGenerator[list[News], None]:
        """Deltas in the order in which they came, several at a time when the reader is slower than the engine.

        Raises:
            HexadError: the engine refused or failed the request.
        """
        try:
            for number, work in enumerate(self.work):
                self.runs.append(self._submit(number, work))
            if len(self.runs) == 1:
                run = self.runs[0]
                while batch := await run.stream.next_batch():
                    if news := self._take(run, batch):
                        yield news
                if self._failure is not None:
                    raise self._failure
            else:
                merged = _merge(self.runs)
                try:
                    async for run, batch in merged:
                        if news := self._take(run, batch):
                            yield news
                finally:
                    await merged.aclose()
        finally:
            for run in self.runs:
                run.stream.cancel()
                self._observe(run)

    def attach(self, lane: Lane, frames: Callable[[Sequence[News]], bytes]) -> None:
        """From now on write the frames of ordinary outputs to `lane` while it is open; `batches` gives the others, and none out of turn."""
        run = self.runs[0]
        if len(self.runs) != 1 or not run.prompt_complete or run.stream.ended:
            return

        def take(output: Output) -> bool:
            if output.finish_reason is not None or output.error is not None or not lane.is_open:
                return False
            try:
                news = self._push(run, output, time.monotonic())
                if news is None:
                    return True
                if data := frames((news,)):
                    lane.write(data)
                if news.delta.done and all(choice.output.done for choice in run.choices):
                    run.stream.cancel()
            except Exception as error:  # `batches` raises it
                self._failure = error
                run.stream.cancel()
            return True

        run.stream.sink = take

    def _observe(self, run: Run) -> None:
        """The metrics of one prompt that ended."""
        reasons = [choice.finish_reason or "abort" for choice in run.choices]
        record = RequestRecord(
            prompt_tokens=len(run.work.prompt.ids),
            generation_tokens=sum(choice.output.num_tokens for choice in run.choices),
            finish_reason="error" if run.failed else max(reasons, key=reasons.count),
            arrived_s=self._ticket.start_s,
            ended_s=time.monotonic(),
            first_token_s=run.first_s,
            last_token_s=run.last_s,
            queued_s=run.queued_s,
            cached_tokens=run.num_cached,
            gaps_s=tuple(run.gaps_s),
        )
        self._state.metrics.observe_request(record)

    def _submit(self, number: int, work: Work) -> Run:
        envelope, params = self._envelope, work.params
        submit = Submit(
            request_id=f"{envelope.request_id}-{number}",
            prompt=(TokenSegment(work.prompt.ids),),
            params=params,
            eos_token_ids=self._state.eos_token_ids,
            priority=envelope.priority,
            tenant=envelope.tenant,
            cache_salt=envelope.cache_salt,
            deadline_s=envelope.deadline_s,
            client_time_s=time.time(),
        )
        run = Run(work, self._state.engine.submit(submit))
        for i in range(params.n):
            output = ChoiceOutput(self._state.tokenizer, params, work.prompt.ids, i)
            run.choices.append(Choice(number * params.n + i, run, output))
        return run

    def _take(self, run: Run, batch: Sequence[Output]) -> list[News]:
        """Deltas of `batch`; ends the run in the engine once all its choices are done for the caller."""
        now_s = time.monotonic()
        self._ticket.started = True
        news = [found for output in batch if (found := self._push(run, output, now_s)) is not None]
        if all(choice.output.done for choice in run.choices):
            run.stream.cancel()  # if a stop string ended the last one, the engine does not know yet
        elif not run.prompt_complete:
            run.held.extend(news)
            return []
        news, run.held = run.held + news, []
        return news

    def _push(self, run: Run, output: Output, now_s: float) -> News | None:
        choice = run.choices[output.choice]
        _note(run, choice, output, now_s)
        delta = choice.output.push(output)
        if delta.error is not None:
            run.failed = True
            raise output_error(output) or HexadError(delta.error)
        if delta.done:
            choice.finish_reason = delta.finish_reason
            if delta.abort and len(run.choices) > 1:
                self._state.engine.abort(run.stream.request_id, output.choice)
        return News(choice, delta) if delta.text or delta.token_ids or delta.done else None


def _note(run: Run, choice: Choice, output: Output, now_s: float) -> None:
    """What an output says beside its tokens."""
    if output.num_cached is not None:
        run.num_cached = output.num_cached
    if output.queued_s is not None:
        run.queued_s = output.queued_s
    if output.prompt_logprobs:
        run.prompt_logprobs.extend(output.prompt_logprobs)
    if output.token_ids:
        run.first_s, run.last_s = run.first_s or now_s, now_s
        if choice.heard_s is not None:
            run.gaps_s.append(now_s - choice.heard_s)
        choice.heard_s = now_s


async def _merge(runs: Sequence[Run]) -> AsyncGenerator[tuple[Run, list[Output]], None]:
    """Batches of all runs as they come."""
    queue: asyncio.Queue[tuple[Run, list[Output]] | BaseException | None] = asyncio.Queue()

    async def follow(run: Run) -> None:
        try:
            while batch := await run.stream.next_batch():
                queue.put_nowait((run, batch))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(follow(run)) for run in runs]
    try:
        live = len(tasks)
        while live:
            item = await queue.get()
            if item is None:
                live -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
