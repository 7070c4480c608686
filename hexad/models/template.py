"""Chat templates: messages -> prompt, as the model's own Jinja template writes it. No torch.

Templates are code from outside, even those that come with a model: they render in Jinja's immutable sandbox, in a process of their own
with limits on time, memory and output (models/templating). Control tokens' names inside messages stay text.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from hexad.common.errors import ModelError, RequestError
from hexad.models.formats.files import read_json
from hexad.models.formats.gguf import GGUFFile, find_gguf
from hexad.models.templating.environment import make_environment
from hexad.models.templating.guard import Guard
from hexad.models.templating.pool import RENDERERS, RenderError
from hexad.models.tokenizer import HasPath, Tokenizer

MAX_SOURCE_BYTES = 2**20
DEFAULT, TOOL_USE = "default", "tool_use"
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names that templates read a message's reasoning under
_CONTINUE = "HEXAD_CONTINUES_HERE "


class ChatTemplate:
    """One model's template, or several by purpose ("default", "tool_use"). Thread-safe; rendering blocks, so it belongs in threads."""

    def __init__(self, sources: Mapping[str, str] | str, tokens: Mapping[str, str] | None = None) -> None:
        """`tokens`: the special tokens that templates refer to, such as {"bos_token": "<s>"}.

        Raises:
            ModelError: no template, or one that is not valid Jinja.
        """
        self._sources = {DEFAULT: sources} if isinstance(sources, str) else dict(sources)
        self._tokens = dict(tokens or {})
        self._guards: weakref.WeakKeyDictionary[Tokenizer, Guard] = weakref.WeakKeyDictionary()
        if not self._sources:
            raise ModelError("the chat template is empty")
        for name, source in self._sources.items():
            _check(name, source)

    @classmethod
    def from_files(cls, files: HasPath | Path | str, override: str | None = None) -> ChatTemplate | None:
        """The template of the model at `files` (a folder or a .gguf file); None if it has none.

        Args:
            override: a file, or the template itself, instead of the model's own.

        Raises:
            ModelError: a template that is not valid Jinja, or files that cannot be read.
        """
        path = Path(files) if isinstance(files, str | Path) else files.path
        is_gguf = path.is_file() or (any(path.glob("*.gguf")) and not (path / "tokenizer_config.json").is_file())
        sources, tokens = _from_gguf(path) if is_gguf else _from_folder(path)
        if override:
            sources = {DEFAULT: _override(override)}
        return cls(sources, tokens) if sources else None

    @property
    def source(self) -> str:
        """The template used without tools."""
        return self._sources.get(DEFAULT) or next(iter(self._sources.values()))

    def mentions(self, name: str) -> bool:
        """Whether any of the templates speaks of `name`, such as "tools" or "enable_thinking"."""
        return any(name in source for source in self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt as text. Values are plain JSON (strings, numbers, lists, objects).

        Raises:
            RequestError: the template refuses the messages (its own words), fails on them, or takes too long.
        """
        given = self._variables(messages, tools, documents, add_generation_prompt, continue_final_message, variables)
        return _continued(self._run(given, tools), continue_final_message)

    def encode(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, add_special_tokens: bool = False, **options: Any
    ) -> tuple[list[int], str]:
        """(ids, text) of the prompt; names of control tokens inside the messages are encoded as text. `options` are `render`'s.

        Raises:
            RequestError: as `render`.
        """
        guard = self._guard(tokenizer)
        wrapped = {"messages": [dict(m) for m in messages], "tools": options.pop("tools", None), "options": options}
        safe, protected = guard.protect(wrapped)
        text = self.render(safe["messages"], tools=safe["tools"], **safe["options"])
        if protected is None:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens), text
        ids = _leading(tokenizer) if add_special_tokens else []
        for piece, is_control in protected.pieces(text):
            ids += tokenizer.encode(piece, add_special_tokens=False, allow_special=is_control)
        return ids, protected.plain(text)

    def _guard(self, tokenizer: Tokenizer) -> Guard:
        guard = self._guards.get(tokenizer)
        if guard is None:
            guard = self._guards[tokenizer] = Guard(name for i in tokenizer.special_ids if (name := tokenizer.id_to_token(i)))
        return guard

    def _variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        documents: Any,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:
        reserved = _RESERVED & variables.keys()
        if reserved:
            raise RequestError(f"template variable {min(reserved)!r} cannot be set", param="chat_template_kwargs")
        turns = [_turn(m, self.mentions("developer")) for m in messages]
        if continue_final_message:
            _mark_end(turns)
        return {
            **self._tokens,
            **variables,
            "messages": turns,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }

    def _run(self, variables: dict[str, Any], tools: Any) -> str:
        source = self._sources.get(TOOL_USE, self.source) if tools else self.source
        try:
            return RENDERERS.render(source, variables)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages and template variables must be plain JSON: {error}", param="messages") from None
        except RenderError as error:
            raise RequestError(_words(error), param="messages", code="template_error") from None


def _words(error: RenderError) -> str:
    if error.kind == "refused":
        return error.message[:500]
    if error.kind == "limit":
        return f"the model's chat template does not finish on these messages: {error.message}; send fewer or shorter ones"
    message = error.message.splitlines()[0][:300] if error.message else "unknown error"
    return f"the model's chat template cannot render these messages: {message}"


def _leading(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts in front of a text."""
    around = tokenizer.encode("", add_special_tokens=True)
    return around[:1] if around and around[0] == tokenizer.bos_token_id else []


def _turn(message: Mapping[str, Any], has_developer: bool) -> dict[str, Any]:
    """A message as templates expect it: no nulls, reasoning under its usual names, roles that the template knows."""
    turn = {key: value for key, value in message.items() if value is not None}
    reasoning = next((turn[key] for key in _REASONING if key in turn), None)
    if reasoning is not None:
        turn = {"thinking": reasoning, **turn, "reasoning_content": reasoning}
    if turn.get("role") == "developer" and not has_developer:
        turn["role"] = "system"
    return turn


def _mark_end(turns: list[dict[str, Any]]) -> None:
    """Tag the end of the last message, where the prompt will be cut."""
    content = turns[-1].get("content") if turns else None
    if isinstance(content, str):
        turns[-1]["content"] = content + _CONTINUE
        return
    texts = [part for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)] if isinstance(content, list) else []
    if not texts:
        raise RequestError("continue_final_message needs a last message with text to continue", param="continue_final_message")
    last = texts[-1]
    turns[-1]["content"] = [{**part, "text": part["text"] + _CONTINUE} if part is last else part for part in content or ()]


def _continued(text: str, continue_final_message: bool) -> str:
    """Cut at the tag; if the template trimmed the tag's own space, trim what is before it likewise."""
    if not continue_final_message:
        return text
    at = text.rfind(_CONTINUE.strip())
    if at < 0:
        raise RequestError("the model's chat template drops the final message, so it cannot be continued", param="continue_final_message")
    return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()


def _check(name: str, source: str) -> None:
    if len(source.encode(errors="replace")) > MAX_SOURCE_BYTES:
        raise ModelError(f"chat template {name!r} has {len(source):,} characters; at most {MAX_SOURCE_BYTES:,} bytes are read")
    try:
        make_environment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"chat template {name!r} is not valid Jinja: {error.message} (line {error.lineno})") from None
    except RecursionError:
        raise ModelError(f"chat template {name!r} is nested too deeply") from None


def _override(value: str) -> str:
    """The template in a file, or written out."""
    if "{" in value or "\n" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"chat template {value[:200]!r} is neither a readable file nor a template: {error}") from None


def _from_gguf(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    metadata = GGUFFile.open(find_gguf(path)).metadata
    key = "tokenizer.chat_template"
    sources = {DEFAULT: metadata[key]} if isinstance(metadata.get(key), str) else {}
    sources |= {k.removeprefix(f"{key}."): v for k, v in metadata.items() if k.startswith(f"{key}.") and isinstance(v, str)}
    names = metadata.get("tokenizer.ggml.tokens")
    tokens = {}
    for ours, theirs in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        index = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(names, list) and isinstance(index, int) and 0 <= index < len(names):
            tokens[ours] = names[index]
    return sources, tokens


def _from_folder(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """chat_template.jinja and additional_chat_templates/, else what tokenizer_config.json or chat_template.json has."""
    config = read_json(folder / "tokenizer_config.json") or {}
    names = {**(read_json(folder / "special_tokens_map.json") or {}), **config}
    tokens = {key: content for key in _TOKENS if (content := _content(names.get(key)))}
    sources = _named(config.get("chat_template")) or _named((read_json(folder / "chat_template.json") or {}).get("chat_template"))
    if (folder / "chat_template.jinja").is_file():
        sources[DEFAULT] = _override(str(folder / "chat_template.jinja"))
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _override(str(path))
    return sources, tokens


def _content(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _named(value: Any) -> dict[str, str]:
    """A template, or a list of {name, template}."""
    if isinstance(value, str):
        return {DEFAULT: value}
    entries = [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []
    named = {entry.get("name"): entry.get("template") for entry in entries}
    return {name: source for name, source in named.items() if isinstance(name, str) and isinstance(source, str)}
