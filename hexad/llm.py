"""Hexad without a server: `LLM(model).generate(prompts)`. The core loop runs in the caller's process and thread."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from hexad.common.clock import SystemClock
from hexad.common.config import DEFAULT_MODEL, HexadConfig
from hexad.common.errors import ConfigError, ContextLengthError, EngineDeadError, RequestError, nearest
from hexad.common.params import SamplingParams
from hexad.orchestration.messages import Output
from hexad.orchestration.result import RequestOutput, RequestWork

if TYPE_CHECKING:
    from hexad.models.tokenizer import Tokenizer
    from hexad.orchestration.core import CoreLoop

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


class LLM:
    """A model, ready to generate. Not thread-safe; use it as a context manager, or `close` it.

    Options are the keys of the configuration without their section: `dtype=`, `max_model_len=`, `device=`, `enable_prefix_caching=`, ...
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        """Load the model (fetching it first if it is not here).

        Raises:
            ConfigError: an unknown option (names the nearest known one) or a value that cannot be served.
            ModelError, OutOfMemoryError: the model cannot be loaded.
        """
        from hexad import compose

        engine = compose.build(config_from_options({"model": model, **options}))
        self.config: HexadConfig = engine.config  # resolved
        self._tokenizer, self._template = engine.opened.text(engine.config)
        self._defaults = engine.opened.sampling_defaults(engine.config)
        self._core: CoreLoop = engine.core
        self._max_len = engine.welcome.max_len
        self._vocab_size = engine.welcome.vocab_size
        own_eos = self._tokenizer.eos_token_id
        self._eos_token_ids = engine.opened.spec.eos_token_ids or ((own_eos,) if own_eos is not None else ())
        self._clock = SystemClock()
        self._ids = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend (generation_config.json), else neutral values."""
        return SamplingParams(**self._defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generate for every prompt, batched; results come in the order of the prompts.

        Args:
            prompts: a text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; or a list of these.
            sampling_params: one for all, or one per prompt.
            use_tqdm: show progress on stderr.

        Raises:
            RequestError: a prompt or an option that cannot be served; nothing has run then.
            EngineDeadError: the engine failed as a whole.
        """
        parsed = [self._parse(prompt) for prompt in _as_list(prompts)]
        params = _spread(sampling_params or self.get_default_sampling_params(), len(parsed))
        works = [self._work(text, ids, each) for (text, ids), each in zip(parsed, params, strict=True)]
        for work in works:
            self._core.check(work.as_submit(self._eos_token_ids))
        return self._run(works, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """`generate` on one conversation or several, each put through the model's chat template.

        Raises:
            RequestError: also if the model has no chat template.
        """
        if self._template is None:
            raise RequestError("this model has no chat template: use generate, or give chat_template=", param="messages")
        conversations: Sequence[Any] = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        options = dict(chat_template_kwargs or {})
        prompts = []
        for conversation in conversations:
            ids, text = self._template.encode(
                self._tokenizer,
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **options,
            )
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stats(self) -> dict[str, float | int | str | None]:
        """The engine's counters and gauges."""
        return self._core.stats()

    def close(self) -> None:
        """Release the device. Idempotent."""
        self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Inside.

    def _parse(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text if known, ids)."""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise RequestError(f"a prompt has the keys {sorted(prompt)}: give prompt or prompt_token_ids", param="prompt")
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            return text, list(ids) if ids is not None else self._encode(text)
        if isinstance(prompt, str):
            return prompt, self._encode(prompt)
        return None, list(prompt)

    def _encode(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"a prompt is {type(text).__name__}: give text or token ids", param="prompt")
        return list(self._tokenizer.encode(text, add_special_tokens=True))

    def _work(self, text: str | None, ids: list[int], params: SamplingParams) -> RequestWork:
        params.validate(self._vocab_size)
        room = self._max_len - len(ids)
        if room < (params.max_tokens or 1):
            wanted = f" and max_tokens is {params.max_tokens}" if params.max_tokens else ""
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens{wanted}, the model's context is {self._max_len}: shorten the prompt or ask for at most "
                f"{max(room, 0)} tokens",
                param="prompt",
            )
        return RequestWork(str(next(self._ids)), text, ids, params, self._tokenizer, self._clock.now())

    def _run(self, works: list[RequestWork], use_tqdm: bool) -> list[RequestOutput]:
        open_works = {work.request_id: work for work in works}
        try:
            with _progress(len(works), use_tqdm) as advance:
                for work in works:
                    self._core.submit(work.as_submit(self._eos_token_ids))
                while open_works:
                    self._check(open_works)
                    for output in self._core.step().get(b"", ()):
                        if self._take(open_works.get(output.request_id), output):
                            del open_works[output.request_id]
                            advance()
        finally:  # an interrupt, or a failure: leave nothing running
            for request_id in open_works:
                self._core.abort(request_id)
        return [work.result() for work in works]

    def _check(self, open_works: Mapping[str, RequestWork]) -> None:
        if not self._core.has_work():
            death = self._core.death or EngineDeadError(f"the engine lost {len(open_works)} requests")
            raise EngineDeadError(death.message)

    def _take(self, work: RequestWork | None, output: Output) -> bool:
        """Give an output to its request; True when the request is complete."""
        if work is None:
            return False
        if work.push(output, self._clock.now()):
            self._core.abort(work.request_id, choice=output.choice)
        return work.complete


def config_from_options(options: Mapping[str, Any]) -> HexadConfig:
    """A tree from flat options: keys without their section. `None` means the default.

    Raises:
        ConfigError: an unknown option (names the nearest known one) or a bad value.
    """
    paths = HexadConfig.keys()
    known = {path.partition(".")[2]: path for path in paths if not path.startswith("server.")}
    tree: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        if name not in known:
            near = nearest(name, known, 3)
            raise ConfigError(
                f"there is no option {name!r}: " + (f"did you mean {near!r}?" if near else f"known are {', '.join(sorted(known))}")
            )
        if value is not None:
            section, _, key = known[name].partition(".")
            tree.setdefault(section, {})[key] = value
    return HexadConfig.parse(tree)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(Prompt, prompts)]  # one prompt of token ids
    return list(cast(Sequence[Prompt], prompts))


def _spread(params: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params for {count} prompts: give one, or one per prompt", param="sampling_params")
    return params


def _progress(total: int, show: bool) -> AbstractContextManager[Any]:
    """A context whose value is called once per finished prompt."""
    if not show:
        return nullcontext(lambda: None)
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import Progress

    @contextmanager
    def bar() -> Iterator[Any]:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("prompts", total=total)
            yield lambda: progress.advance(task)

    return bar()
