"""Seam 1: the step plan and its result, between the scheduler and an executor. No torch.

Contract
- A plan is immutable once built and complete: together with the plans before it, it says everything that an executor needs.
  New requests come whole (`new`), known ones as differences (`rows`). Plans can be recorded and replayed offline.
- There are no phases. A row computes positions `start .. start + num_tokens` of one request: a whole prompt, a chunk of one, one
  decode token, or one token and drafts; the runner does not ask which.
- The ids at computed positions are either known to the host (they came in `NewRequest.prompt`) or were sampled by the executor
  itself, which keeps them on the device. A plan never repeats a sampled id; a request resumed after preemption comes as `new` again,
  with all its confirmed ids as prompt segments.
- Positions are 0-based. A row whose `samples` is true draws the token at position `start + num_tokens` from the logits at
  `start + num_tokens - 1`. Randomness is keyed by (seed, choice, position of the drawn token, purpose).
- KV for position p of KV group g lies in block `table_g[p // block_size]` at offset `p % block_size`. A block id names one page of
  the one pool that all groups share (all groups have pages of equal bytes). A table entry of `NO_BLOCK` was never needed or fell
  out of the group's window: it is not read.
- Order inside a step: `finished` state is dropped, `kv_moves` are copied, `new` is added, then `rows` are computed.
- Plans are executed in the order of `step_id`. A block freed by the scheduler is not reused before every plan in flight that
  names it has retired.
"""

from __future__ import annotations

import msgspec

from hexad.common.params import SamplingParams

NO_BLOCK = -1


class TokenSegment(msgspec.Struct, frozen=True, gc=False, tag="ids"):
    """A run of prompt given as token ids."""

    ids: tuple[int, ...]


PromptSegment = TokenSegment  # a union with embeddings later: executors must dispatch on the type, not assume ids


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the executor has not seen, or has forgotten (preempted)."""

    rid: int  # unique in this engine process, never reused
    prompt: tuple[PromptSegment, ...]  # every id the host knows: the caller's prompt, then outputs confirmed before a preemption
    prompt_len: int  # how many of those ids are the caller's prompt (penalties and min_tokens tell them apart)
    params: SamplingParams
    choice: int = 0  # 0..n-1: part of the randomness key
    seed: int = 0  # the effective seed (the caller's, or drawn when the request arrived), 0..2^64-1
    eos_token_ids: tuple[int, ...] = ()  # masked while fewer than min_tokens were generated
    block_ids: tuple[tuple[int, ...], ...] = ()  # per KV group: the whole table so far, cached blocks first
    num_cached: int = 0  # positions whose KV is already in `block_ids`
    adapter_id: int | None = None
    want_prompt_logprobs: bool = False  # prompt logprobs not delivered yet: rows over the prompt return them


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one request in this step."""

    rid: int
    start: int  # first position computed
    num_tokens: int  # positions computed, drafts included; at least 1
    samples: bool  # the last position is the newest one: draw a token after it
    new_block_ids: tuple[tuple[int, ...], ...] = ()  # per KV group: appended to the table before computing (() = none for any)
    drafts: tuple[int, ...] = ()  # host-known drafts: ids of the last len(drafts) computed positions, to be verified
    num_drafts: int = 0  # how many of `num_tokens` are drafts, also when their ids are only on the device
    masked: bool = False  # a grammar constrains this row: `StepHandle.sample` is given its mask


class KVMove(msgspec.Struct, frozen=True, gc=False):
    """Copy the first `num_tokens` slots of one block onto another, in every layer of the group."""

    group: int
    source_block: int
    target_block: int
    num_tokens: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the engine."""

    step_id: int  # 0, 1, 2, ... without gaps
    rows: tuple[Row, ...]
    new: tuple[NewRequest, ...] = ()
    finished: tuple[int, ...] = ()  # rids to forget: finished, aborted, failed or preempted
    kv_moves: tuple[KVMove, ...] = ()
    num_tokens: int = 0  # sum over rows


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position, after penalties and masks, before temperature."""

    token_id: int  # the sampled token, or the prompt's own
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[tuple[int, float], ...] = ()  # the k most likely (id, logprob), best first


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one row gave."""

    rid: int
    tokens: tuple[int, ...] = ()  # accepted drafts, then the drawn token; empty when the row did not sample or failed
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, when asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # for the computed prompt positions (position 0: None), when asked for
    num_accepted: int = 0  # drafts accepted
    pooled: tuple[float, ...] | None = None  # a pooled vector, for requests that want one
    error: str | None = None  # this request failed (NaN logits ...); its neighbours did not


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one plan gave; rows in the plan's order."""

    step_id: int
    rows: tuple[RowResult, ...]
    kv_done: tuple[int, ...] = ()  # transfers that completed (later: KV connectors)
    busy_s: float = 0.0  # device time where known, else wall time of the step


class KVGroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One set of layers that share a block table."""

    kind: str  # "full" | "sliding" | "cross" | "latent"
    num_layers: int
    window: int | None = None  # "sliding": keys visible to a query, itself included


class KVBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What `Executor.kv_bytes` answers: how much memory KV may take and how it was reached."""

    available_bytes: int
    page_bytes: int  # bytes of one block over all layers of one group
    block_size: int  # tokens a block
    groups: tuple[KVGroupSpec, ...]
    breakdown: dict[str, int]  # name -> bytes, the sum that led to available_bytes, for the log and for errors


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What the core decides and `Executor.allocate` makes."""

    num_blocks: int
    block_size: int
    groups: tuple[KVGroupSpec, ...]
