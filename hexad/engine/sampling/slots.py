"""What the sampler knows of one request, worked out once on the host when it is added."""

from __future__ import annotations

from dataclasses import dataclass

from hexad.common.params import SamplingParams
from hexad.engine.plan import NewRequest
from hexad.engine.sampling.rng import row_key


@dataclass(frozen=True, slots=True)
class SlotState:
    """One request in one slot. Immutable: everything that changes from step to step is on the device."""

    rid: int
    params: SamplingParams
    prompt_len: int
    key: int  # randomness of this request and choice
    banned: tuple[int, ...]  # single ids that may never be drawn
    sequences: tuple[tuple[int, ...], ...]  # longer ones: the last id is banned when the others were just generated
    ending: tuple[int, ...]  # ids masked while fewer than min_tokens were generated

    @property
    def edited(self) -> bool:
        """True when the logits are changed before the arg max or the draw."""
        p = self.params
        return bool(self.banned or self.sequences or self.ending or p.logit_bias or p.allowed_token_ids is not None or p.penalised)


def make_state(request: NewRequest) -> SlotState:
    """Digest a request. With `ignore_eos`, end-of-sequence ids are ordinary tokens, so min_tokens does not mask them."""
    params = request.params
    ending: tuple[int, ...] = ()
    if params.min_tokens > 0:
        ending = tuple({*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)})
    return SlotState(
        rid=request.rid,
        params=params,
        prompt_len=request.prompt_len,
        key=row_key(request.seed, request.choice),
        banned=tuple({word[0] for word in params.bad_words_ids if len(word) == 1}),
        sequences=tuple(word for word in params.bad_words_ids if len(word) > 1),
        ending=ending,
    )
