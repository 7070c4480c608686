"""What fits: prompt and output against the model's context and the KV pool. Numbers in the messages are the true ones."""

from __future__ import annotations

from hexad.common.errors import ContextLengthError, NeverFitsError, RequestError


def fit(prompt_tokens: int, max_tokens: int | None, *, context: int, pool: int) -> int:
    """How many tokens may be generated after `prompt_tokens`; `max_tokens` None means all that remain.

    `context` is the longest sequence of the model, `pool` what the whole KV memory holds (both in tokens).

    Raises:
        RequestError: an empty prompt.
        ContextLengthError: prompt, or prompt plus requested output, exceeds the context.
        NeverFitsError: it exceeds the KV pool.
    """
    if prompt_tokens == 0:
        raise RequestError("the prompt has no tokens: send at least one", param="prompt")
    _check(prompt_tokens, max_tokens, context, ContextLengthError, "model context is")
    _check(prompt_tokens, max_tokens, pool, NeverFitsError, "the KV memory of this server holds")
    return max_tokens if max_tokens is not None else min(context, pool) - prompt_tokens


def _check(prompt: int, output: int | None, limit: int, kind: type[RequestError], what: str) -> None:
    needed = max(1, output) if output is not None else 1
    if prompt + needed <= limit or (output == 0 and prompt <= limit):
        return
    asked = f" and {output:,} output tokens were requested" if output is not None else ""
    if prompt >= limit:
        room = limit - needed
        advice = f"shorten the prompt to at most {room:,} tokens" if room > 0 else "shorten the prompt and lower max_tokens"
    else:
        advice = f"shorten the prompt, or lower max_tokens to at most {limit - prompt:,}"
    message = f"prompt has {prompt:,} tokens{asked}, {what} {limit:,} tokens: {advice}"
    raise kind(message, param="max_tokens" if prompt < limit else "prompt")


def truncate(ids: tuple[int, ...], keep: int | None, *, max_tokens: int | None, context: int) -> tuple[int, ...]:
    """The last `keep` ids (`truncate_prompt_tokens`); -1 keeps as many as leave room for the output; None keeps all.

    Raises:
        RequestError: `keep` is neither -1 nor between 1 and the context.
    """
    if keep is None:
        return ids
    if keep != -1 and not 1 <= keep <= context:
        raise RequestError(
            f"truncate_prompt_tokens is {keep}: it must be -1 or between 1 and {context}",
            param="truncate_prompt_tokens",
        )
    if keep == -1:
        keep = max(1, context - (max_tokens if max_tokens is not None else 1))
    return ids[-keep:]
