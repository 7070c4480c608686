"""From the core's outputs to what a client sees: text, ids, log-probabilities, usage. No torch.

One `ChoiceOutput` follows one choice. Streaming and non-streaming answers are made from the same deltas (a non-streaming answer is all of
them joined), so they cannot differ.

Rules
- A token's id and log-probabilities go out with the delta that releases the last character of its text, or later; never before.
- The end-of-sequence or stop token that ended a choice is counted and its id given out, but it has neither text nor a log-probability
  entry, unless `include_stop_str_in_output` asks for its text (a special token also needs `skip_special_tokens` off).
- A stop string ends the choice with the token that completed it: that token is the last one counted and given out. Tokens whose whole text
  is hidden by the stop have an id but no log-probability entry.
- `min_tokens`: a stop string completed by an earlier token than that is ordinary text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from hexad.common.params import SamplingParams
from hexad.engine.plan import TokenLogprobs
from hexad.orchestration.detokenize import TextTokenizer, make_detokenizer
from hexad.orchestration.messages import Output
from hexad.orchestration.stop import StopMatcher


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one push adds to a choice."""

    text: str = ""
    token_ids: tuple[int, ...] = ()  # ids whose text is out now, in order; all deltas joined: exactly the tokens counted
    logprobs: tuple[TokenLogprobs, ...] = ()  # entries of the visible tokens among them, when asked for
    logprob_bytes: tuple[bytes, ...] = ()  # beside `logprobs`: the bytes that each token added to the text
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error"
    stop_reason: str | int | None = None  # the stop string or the stop token id that matched (end of sequence: None)
    error: str | None = None
    error_code: str | None = None
    abort: bool = False  # the text ended at a stop string: the caller must end this choice in the core
    done: bool = False  # the last delta of this choice


EMPTY = Delta()


class _Entry(msgspec.Struct):
    """A token that is not given out yet."""

    token_id: int
    logprobs: TokenLogprobs | None
    raw: bytes
    start: int  # characters of text before it
    decoded: int  # characters of text that it completes
    end: int  # characters of text that show all its bytes: one more than `decoded` while it ends inside a character
    shown: bool = True  # False: the token that ended the choice, without text


class ChoiceOutput:
    """Detokenises, looks for stop strings and aligns log-probabilities for one choice. Not thread-safe."""

    def __init__(self, tokenizer: TextTokenizer, params: SamplingParams, prompt_ids: Sequence[int], choice: int = 0) -> None:
        self.choice = choice
        self.num_tokens = 0  # completion tokens, for usage
        self.done = False
        self._params = params
        self._detokenizer = make_detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._plain = self._matcher is None and params.logprobs is None
        self._waiting: deque[_Entry] = deque()
        self._decoded = 0  # characters of text decoded
        self._released = 0  # characters of text given out

    def push(self, output: Output) -> Delta:
        """Take the next output of this choice. After `done`, everything is ignored."""
        if self.done:
            return EMPTY
        if self._plain and len(output.token_ids) == 1 and not self._waiting and output.finish_reason is None and output.error is None:
            return self._push_plain(output.token_ids)
        text = self._take_tokens(output)
        if self._stopped:
            return self._finish(text, "stop", abort=output.finish_reason is None and output.error is None)
        if output.error is not None:
            return self._finish(text + self._flush_text(), "error", error=output.error, error_code=output.error_code)
        if output.finish_reason is None:
            return self._delta(text)
        text += self._flush_text()
        if self._stopped:
            return self._finish(text, "stop")
        return self._finish(text, output.finish_reason, stop_token_id=output.stop_token_id)

    def _push_plain(self, token_ids: tuple[int, ...]) -> Delta:
        """One token, no stop strings, no log-probabilities, nothing held back: what the rules above come to then."""
        detokenizer = self._detokenizer
        start, text = self._decoded, detokenizer.push(token_ids[0])
        self.num_tokens += 1
        self._decoded = self._released = start + len(text)
        if not detokenizer.pending:
            return Delta(text=text, token_ids=token_ids)
        self._waiting.append(_Entry(token_ids[0], None, b"", start, self._decoded, self._decoded + 1))
        return Delta(text=text) if text else EMPTY

    def flush(self, finish_reason: str = "abort") -> Delta:
        """End the choice without a terminal output: what was held back is given out."""
        if self.done:
            return EMPTY
        text = self._flush_text()
        return self._finish(text, "stop" if self._stopped else finish_reason)

    @property
    def _stopped(self) -> bool:
        return self._matcher is not None and self._matcher.match is not None

    def _take_tokens(self, output: Output) -> str:
        """Feed ids until a stop string matches; returns the text released."""
        shown = []
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            logprobs = output.logprobs[index] if index < len(output.logprobs) else None
            self.num_tokens += 1
            if index == last and output.stop_token_id is not None and not self._params.include_stop_str_in_output:
                self._waiting.append(_Entry(token_id, logprobs, b"", self._decoded, self._decoded, self._decoded, shown=False))
                break
            shown.append(self._push_token(token_id, logprobs))
            if self._stopped:
                break
        return "".join(shown)

    def _push_token(self, token_id: int, logprobs: TokenLogprobs | None) -> str:
        detokenizer = self._detokenizer
        start = self._decoded
        text = detokenizer.push(token_id)
        self._decoded += len(text)
        end = self._decoded + (1 if detokenizer.pending else 0)
        self._waiting.append(_Entry(token_id, logprobs, detokenizer.raw(token_id, text), start, self._decoded, end))
        return self._show(text)

    def _show(self, text: str) -> str:
        if self._matcher is not None and text:
            text = self._matcher.push(text, armed=self.num_tokens >= self._params.min_tokens)
        self._released += len(text)
        return text

    def _flush_text(self) -> str:
        """What detokeniser and matcher still hold."""
        rest = self._detokenizer.flush()
        self._decoded += len(rest)
        text = self._show(rest)
        if self._matcher is not None and self._matcher.match is None:
            tail = self._matcher.flush()
            self._released += len(tail)
            text += tail
        return text

    def _delta(self, text: str) -> Delta:
        """The ordinary case: tokens go out as far as their text did."""
        entries = []
        while self._waiting and self._waiting[0].end <= self._released:
            entries.append(self._waiting.popleft())
        if not text and not entries:
            return EMPTY
        return self._make(text, entries)

    def _finish(
        self,
        text: str,
        finish_reason: str,
        *,
        stop_token_id: int | None = None,
        abort: bool = False,
        error: str | None = None,
        error_code: str | None = None,
    ) -> Delta:
        self.done = True
        stop_reason: str | int | None = stop_token_id if stop_token_id in self._params.stop_token_ids else None
        entries = list(self._waiting)
        self._waiting.clear()
        match = self._matcher.match if self._matcher is not None else None
        if match is not None:
            stop_reason = match.stop
            entries = self._up_to_stop(entries, match.end)
        delta = self._make(text, entries)
        return msgspec.structs.replace(
            delta, finish_reason=finish_reason, stop_reason=stop_reason, abort=abort, error=error, error_code=error_code, done=True
        )

    def _up_to_stop(self, entries: list[_Entry], stop_end: int) -> list[_Entry]:
        """Drop what follows the token that completed the stop string; hide the entries that show nothing."""
        count = next((i + 1 for i, entry in enumerate(entries) if entry.decoded >= stop_end), len(entries))
        self.num_tokens -= len(entries) - count
        kept = entries[:count]
        for entry in kept:
            entry.shown = entry.start < self._released
        return kept

    def _make(self, text: str, entries: Sequence[_Entry]) -> Delta:
        visible = [entry for entry in entries if entry.shown and entry.logprobs is not None]
        return Delta(
            text=text,
            token_ids=tuple(entry.token_id for entry in entries),
            logprobs=tuple(entry.logprobs for entry in visible if entry.logprobs is not None),
            logprob_bytes=tuple(entry.raw for entry in visible),
        )
