"""What fits: prompt and output against the model's context and the KV pool. Numbers in the messages are the true ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hexad.common.errors import ContextLengthError, NeverFitsError, RequestError

USUAL_CHARS_PER_TOKEN = 8  # prose has 3 to 5
MAX_CHARS_PER_TOKEN = 64


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


def check_text(texts: Sequence[str], context: int, param: str, count: Callable[[str], int]) -> None:
    """Refuse texts that are far too long, at a cost that the context bounds and not the texts. `count` gives the tokens of a text.

    Raises:
        ContextLengthError: the start alone has more tokens than the context.
        RequestError: more characters than any use has.
    """
    num_chars, limit = sum(map(len, texts)), context * MAX_CHARS_PER_TOKEN
    if num_chars > limit:
        what = f"{param} has {num_chars:,} characters, the limit with a context of {context:,} tokens is {limit:,}"
        raise ContextLengthError(f"{what}: shorten it", param=param)
    start_chars = context * USUAL_CHARS_PER_TOKEN
    if num_chars <= start_chars:
        return  # short enough to count in full, and say how many there are
    while start_chars < num_chars:
        if (found := count("".join(_first(texts, start_chars)))) > context:
            what = f"prompt has more than {found:,} tokens in its first {start_chars:,} of {num_chars:,} characters"
            raise ContextLengthError(f"{what}, model context is {context:,} tokens: shorten it", param=param)
        start_chars *= 2


def _first(texts: Sequence[str], num_chars: int) -> Iterator[str]:
    for text in texts:
        yield text[:num_chars]
        num_chars -= min(num_chars, len(text))


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
