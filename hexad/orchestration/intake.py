"""From a submitted message to requests: limits, refusals, choices. No torch."""

from __future__ import annotations

import random
from array import array
from collections import deque

from hexad.common.errors import ContextLengthError, NeverFitsError, OverloadedError, RequestError
from hexad.engine.plan import PromptSegment, TokenSegment
from hexad.orchestration.kv.manager import KVManager
from hexad.orchestration.kv.radix import Namespace
from hexad.orchestration.messages import Submit
from hexad.orchestration.request import HELD, Request, SeedSource, Siblings
from hexad.orchestration.settings import UNLIMITED_BLOCKS, SchedulerSettings

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
DRAIN_SAMPLES = 64  # admissions over which the drain rate is measured


class DrainRate:
    """How fast the queue empties, from the latest admissions."""

    def __init__(self) -> None:
        self._admissions: deque[tuple[float, int]] = deque(maxlen=DRAIN_SAMPLES)  # (when, prompt tokens)

    def admitted(self, now_s: float, num_tokens: int) -> None:
        self._admissions.append((now_s, num_tokens))

    def seconds_for(self, now_s: float, num_requests: int, num_tokens: int) -> float | None:
        """Time to admit so many requests and tokens at the measured rate; None before anything was measured."""
        if len(self._admissions) < 2:
            return None
        span_s = max(now_s - self._admissions[0][0], 1e-3)
        tokens = sum(count for _, count in self._admissions)
        return span_s * max(num_requests / len(self._admissions), num_tokens / max(tokens, 1))


class Intake:
    """Checks a `Submit` and makes its requests. Holds no requests itself."""

    def __init__(self, settings: SchedulerSettings, kv: KVManager) -> None:
        self._settings = settings
        self._kv = kv
        self._next_rid = 0
        self._random = random.Random(settings.seed)
        self.drain = DrainRate()
        limit = settings.max_model_len
        self.max_positions = kv.max_positions(limit) if settings.enable_chunked_prefill else min(limit, self._whole_positions())

    def make(self, submit: Submit, front_end: bytes, now_s: float, seed_source: SeedSource | None) -> list[Request]:
        """The requests of one submission, choice 0 first; the others are HELD behind it.

        Raises:
            RequestError: the prompt is empty or has impossible ids.
            ContextLengthError: prompt plus output exceed `max_model_len`.
            NeverFitsError: the KV pool could not hold it even if nothing else ran.
        """
        ids = prompt_ids(submit.prompt)
        max_output = self._max_output(len(ids), submit.params.max_tokens)
        seed = submit.params.seed
        if seed is None:
            seed = seed_source() if seed_source is not None else self._random.getrandbits(64)
        private_id = self._next_rid + 1 if submit.params.n > 1 and not self._settings.enable_prefix_caching else 0
        namespace: Namespace = (submit.cache_salt, submit.adapter_id, self._settings.model_revision, "", private_id)
        requests = []
        for choice in range(submit.params.n):
            request = Request(
                rid=self._next_rid,
                request_id=submit.request_id,
                front_end=front_end,
                choice=choice,
                prompt=submit.prompt,
                ids=ids[:],
                params=submit.params,
                seed=seed & (2**64 - 1),
                eos_token_ids=submit.eos_token_ids,
                max_output=max_output,
                arrival_s=now_s,
                num_groups=self._kv.num_groups,
                namespace=namespace,
            )
            self._next_rid += 1
            request.priority = submit.priority
            request.tenant = submit.tenant
            request.adapter_id = submit.adapter_id
            request.deadline_s = None if submit.deadline_s is None else now_s + submit.deadline_s
            request.looks_up = self._settings.enable_prefix_caching or (choice > 0 and private_id > 0)
            if self._settings.enable_prefix_caching:
                request.cache_limit_blocks = UNLIMITED_BLOCKS
            requests.append(request)
        if len(requests) > 1:
            self._tie(requests, namespace if private_id else None)
        return requests

    def refuse_overload(self, submit: Submit, num_waiting: int, num_waiting_tokens: int, num_running: int, now_s: float) -> None:
        """Raise `OverloadedError` if the queue has no room for the submission."""
        settings = self._settings
        count = max(1, submit.params.n)
        tokens = sum(len(segment.ids) for segment in submit.prompt)
        if settings.max_num_queued_reqs is not None:
            startable = max(0, settings.max_num_seqs - num_running)
            beyond = num_waiting + count - startable - settings.max_num_queued_reqs
            if beyond > 0:
                raise OverloadedError(
                    f"{num_waiting} requests wait, the limit is {settings.max_num_queued_reqs} (max_num_queued_reqs): try again later",
                    retry_after_s=self._retry_after_s(now_s, beyond, 0),
                )
        if settings.max_queued_tokens is not None and num_waiting:
            beyond = num_waiting_tokens + tokens - settings.max_queued_tokens
            if beyond > 0:
                raise OverloadedError(
                    f"{num_waiting_tokens} prompt tokens wait and {tokens} more came, the limit is {settings.max_queued_tokens} "
                    "(max_queued_tokens): try again later",
                    retry_after_s=self._retry_after_s(now_s, 0, beyond),
                )

    def _tie(self, requests: list[Request], private: Namespace | None) -> None:
        leader = requests[0]
        siblings = Siblings(leader, private)
        for request in requests:
            request.siblings = siblings
            if request is not leader:
                request.status = HELD
                siblings.held.append(request)
        siblings.num_unadmitted = len(siblings.held)
        if private is not None:
            leader.cache_limit_blocks = leader.prompt_len // self._kv.block_size

    def _retry_after_s(self, now_s: float, num_requests: int, num_tokens: int) -> float:
        """The estimated drain time, spread by a quarter so that those refused do not come back together."""
        estimate_s = self.drain.seconds_for(now_s, num_requests, num_tokens)
        spread = self._random.uniform(0.75, 1.25)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, (estimate_s if estimate_s is not None else 4.0) * spread))

    def _whole_positions(self) -> int:
        """Positions that fit the pool when a prompt is computed in one go, window or not."""
        return self._kv.pool.num_blocks // self._kv.num_groups * self._kv.block_size

    def _max_output(self, prompt_len: int, max_tokens: int | None) -> int:
        """How many tokens the choice may have: what was asked, or what context and pool allow. The last one needs no KV."""
        limit, pool = self._settings.max_model_len, self.max_positions
        if prompt_len + (1 if max_tokens is None else max_tokens) > limit:
            raise _too_long(prompt_len, max_tokens, limit)
        positions = prompt_len + max(0, (1 if max_tokens is None else max_tokens) - 1)
        if positions > pool:
            raise self._never_fits(prompt_len, max_tokens, positions)
        return min(limit, pool + 1) - prompt_len if max_tokens is None else max_tokens

    def _never_fits(self, prompt_len: int, max_tokens: int | None, positions: int) -> NeverFitsError:
        pool, layout = self.max_positions, self._kv.layout
        asked = f"prompt has {prompt_len:,} tokens" + (f" and max_tokens is {max_tokens:,}" if max_tokens else "")
        holds = f"the whole KV pool holds {pool:,} for one request ({layout.num_blocks:,} blocks of {layout.block_size})"
        if prompt_len < pool and max_tokens:
            advice = f"send max_tokens of at most {pool - prompt_len + 1:,}, or give the server more KV memory"
        else:
            advice = f"shorten the prompt to at most {pool:,} tokens, or give the server more KV memory"
        return NeverFitsError(f"{asked}: {positions:,} tokens of KV are needed, {holds}: {advice}")


def prompt_ids(prompt: tuple[PromptSegment, ...]) -> array[int]:
    """All ids of a prompt.

    Raises:
        RequestError: none at all, or ids that no vocabulary has.
    """
    ids: array[int] = array("I")
    for segment in prompt:
        assert isinstance(segment, TokenSegment)
        try:
            ids.extend(segment.ids)
        except (OverflowError, TypeError):
            raise RequestError(
                "the prompt has ids that are negative or beyond 32 bits: send ids of the model's vocabulary", param="prompt"
            ) from None
    if not ids:
        raise RequestError("the prompt has no tokens: send at least one", param="prompt")
    return ids


def _too_long(prompt_len: int, max_tokens: int | None, limit: int) -> ContextLengthError:
    if prompt_len >= limit + (max_tokens == 0) or not max_tokens:
        return ContextLengthError(
            f"prompt has {prompt_len:,} tokens, model context is {limit:,}: shorten it to at most {limit - (max_tokens != 0):,} tokens",
            param="prompt",
        )
    return ContextLengthError(
        f"prompt has {prompt_len:,} tokens and max_tokens is {max_tokens:,}, model context is {limit:,}: "
        f"send max_tokens of at most {limit - prompt_len:,} or shorten the prompt",
        param="max_tokens",
    )
