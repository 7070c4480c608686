"""Write the tables of docs/server.md from the code: `python scripts/server_docs.py`. The prose around them is by hand."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import hexad
from hexad.application.api import (
    admission,
    body,
    completions,
    fields,
    limits,
    prompts,
    protocol,
    sampling,
    schema,
    socket_protocol,
    websocket,
)
from hexad.application.api.app import GET, POST, SOCKETS
from hexad.application.api.auth import OPEN_PATHS
from hexad.application.api.errors import MethodNotAllowedError
from hexad.cli.flags import ALIASES, HELP
from hexad.cli.settings import flag_name
from hexad.common import errors, params
from hexad.common.config import HexadConfig
from hexad.common.metric_table import METRICS

PAGE = Path(__file__).parents[1] / "docs" / "server.md"
TABLE = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

FIELD_NOTES: dict[str, str] = {
    "model": "a name that the server answers to; absent: the first",
    "prompt": "text, token ids, or a list of either (256 at most)",
    "messages": "turns with role system, developer, user, assistant or tool; content is text or parts of type text",
    "n": f"choices, 1 to {params.MAX_N}",
    "best_of": "only equal to n",
    "max_tokens": "default: what the context has left; 0 only computes the prompt",
    "max_completion_tokens": "wins over max_tokens",
    "min_tokens": "no end before this many",
    "temperature": "0 is greedy",
    "top_p": "0 to 1",
    "top_k": "0 or -1: all",
    "min_p": "0 to 1, of the best token's probability",
    "presence_penalty": "-2 to 2",
    "frequency_penalty": "-2 to 2",
    "repetition_penalty": "above 0; 1 changes nothing",
    "logit_bias": "token id to bias, -100 to 100",
    "seed": "same seed, same text, whatever else runs",
    "stop": "a string or a list of them",
    "stop_token_ids": "ids that end a choice",
    "include_stop_str_in_output": "keep the stop string",
    "ignore_eos": "go on past the end token",
    "bad_words": "texts that are never generated",
    "allowed_token_ids": "nothing else is generated",
    "logprobs": "C: how many of the best; Ch: true or false",
    "top_logprobs": f"how many of the best, up to {params.MAX_LOGPROBS}; needs logprobs",
    "prompt_logprobs": "of the prompt's tokens; not in a stream",
    "echo": "the prompt (Ch: the last assistant turn) precedes the answer",
    "stream": "server-sent events",
    "stream_options": "include_usage, continuous_usage_stats",
    "skip_special_tokens": "default true",
    "add_special_tokens": "BOS in front of the prompt; default C: as the tokenizer does, Ch: no, the template writes it",
    "add_generation_prompt": "default true",
    "continue_final_message": "the last assistant turn is the start of the answer",
    "chat_template_kwargs": "variables of the template: " + ", ".join(prompts.TEMPLATE_VARIABLES),
    "return_token_ids": "ids beside the texts",
    "truncate_prompt_tokens": "keep the last k; -1: what fits",
    "cache_salt": "who sends another salt shares no prefix cache",
    "priority": "low first, with --scheduling-policy priority",
    "request_id": "becomes part of the answer's id",
    "deadline_s": "seconds until the answer must be complete, else 504",
    "user": "ignored",
}


# code that an error is raised with beside its kind's own -> when
CODE_NOTES = {
    "chunks_too_small": "A chunked body comes in too many tiny pieces.",
    "client_gone": "The caller went away before its request had arrived (seen in the log alone).",
    "invalid_type": "A field has another JSON type than it takes.",
    "malformed_body": "The body is not JSON, is nested too deeply, or is no object.",
    "malformed_request": "Not a valid HTTP/1.1 request.",
    "missing_required_parameter": "A field that is required is missing.",
    "model_not_found": "The server answers to no such model; the message lists its names.",
    "quarantined": "The engine process died each time that this request ran: it is not run again.",
    "shutting_down": "The server is ending; another one should take the request.",
    "template_error": "The model's chat template refused the messages.",
    "too_many_pipelined": "Too many requests wait on one connection.",
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown. Bars in cells are escaped."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    heads = list(head)
    return "\n".join(["| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *lines]]) + "\n"


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def endpoints() -> str:
    rows = [(f"`GET {path}`", _first_line(handler.__doc__)) for path, handler in GET.items()]
    rows += [(f"`POST {path}`", _first_line(handler.__doc__)) for path, (handler, _) in POST.items()]
    rows += [(f"`WebSocket {path}`", "The same, a message a chunk.") for path in SOCKETS]
    rows += [("`GET /openapi.json`", "This API as an OpenAPI document.")]
    return table(("endpoint", "what"), [(path.replace("{model_id:path}", "{id}"), what) for path, what in rows])


def request_fields() -> str:
    both = {"C": schema.CompletionRequest, "Ch": schema.ChatRequest}
    names = {name: [k for k, model in both.items() if name in model.model_fields] for model in both.values() for name in model.model_fields}
    return table(("field", "where", "what"), [(f"`{name}`", " ".join(where), FIELD_NOTES[name]) for name, where in sorted(names.items())])


def unsupported() -> str:
    return ", ".join(f"`{name}`" for name in sorted(fields.NEUTRAL)) + "\n"


def ignored() -> str:
    silent = sorted(fields.SILENT)
    return table(("", ""), [("silently", _names(silent)), ("named", _names(sorted(fields.WITHOUT_EFFECT - fields.SILENT)))])


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _errors(kind: type[errors.HexadError]) -> Iterator[type[errors.HexadError]]:
    if not issubclass(kind, errors.StartupError):
        yield kind
        for child in kind.__subclasses__():
            yield from _errors(child)


def _raised_codes() -> set[tuple[str, str]]:
    """(class, code) of every call in the package that builds one of the errors above with a code of its own."""
    kinds = {kind.__name__ for kind in _errors(errors.HexadError)}
    found = set()
    for path in sorted(Path(hexad.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", getattr(node.func, "attr", None)) not in kinds:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            values = [inner for keyword in node.keywords if keyword.arg == "code" for inner in ast.walk(keyword.value)]
            found |= {(name, value.value) for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)}
    return found


def error_table() -> str:
    """Every kind of error, and every code that one is raised with; a code without a note is a mistake here (KeyError)."""
    kinds = sorted(_errors(errors.HexadError), key=lambda kind: (kind.status, kind.default_code))
    assert MethodNotAllowedError in kinds
    rows = {(k.status, k.default_code, k.type): _first_line(k.__doc__) for k in kinds}
    rows[(500, "internal_error", "server_error")] = "Something that should not happen; the log says more."
    by_name = {k.__name__: k for k in kinds}
    rows |= {(by_name[name].status, code, by_name[name].type): CODE_NOTES[code] for name, code in _raised_codes()}
    return table(("status", "code", "type", "when"), [(str(s), f"`{code}`", kind, rows[s, code, kind]) for s, code, kind in sorted(rows)])


def limit_table() -> str:
    rows: list[tuple[str, Any]] = [
        ("body", "`--max-body-bytes`"),
        ("bodies that are being received, together", f"{body.BODIES_AT_ONCE} x `--max-body-bytes`, else 503"),
        ("values in a body (commas)", body.MAX_VALUES),
        ("fields of a body", fields.MAX_FIELDS),
        ("request line and headers, bytes", protocol.MAX_HEAD_BYTES),
        ("headers", protocol.MAX_HEADERS),
        ("pipelined requests that wait", protocol.MAX_PIPELINED),
        ("prompts of a request", prompts.MAX_PROMPTS),
        ("choices of a request (prompts x n)", completions.MAX_CHOICES),
        ("messages", fields.MAX_MESSAGES),
        ("characters of a prompt, per token of context", limits.MAX_CHARS_PER_TOKEN),
        ("`n`", params.MAX_N),
        ("`logprobs`, `top_logprobs`, `prompt_logprobs`", params.MAX_LOGPROBS),
        ("`stop` entries, characters each", f"{params.MAX_STOP_STRINGS}, {params.MAX_STOP_CHARS:,}"),
        ("`logit_bias`, `stop_token_ids` entries", params.MAX_BIAS_ENTRIES),
        ("`bad_words` entries", params.MAX_BAD_WORDS // 2),
        ("`priority`", f"±{sampling.MAX_PRIORITY:,}"),
        ("`deadline_s`", sampling.MAX_DEADLINE_S),
        ("WebSocket messages that may wait, bytes together", f"{websocket.MAX_WAITING}, `--max-body-bytes`"),
        (f"chunks of a body below {protocol.SMALL_BYTES} bytes, a second", protocol.MAX_SMALL_PIECES_PER_S),
        (f"WebSocket frames below {socket_protocol.SMALL_BYTES:,} bytes, a second", socket_protocol.MAX_SMALL_FRAMES_PER_S),
        ("`Retry-After`, seconds", admission.MAX_RETRY_S),
    ]
    return table(("what", "at most"), [(what, f"{most:,.0f}" if isinstance(most, int | float) else most) for what, most in rows])


def open_paths() -> str:
    return _names(sorted(OPEN_PATHS)) + "\n"


def flags() -> str:
    rows = []
    for key, default in HexadConfig.keys().items():
        names = ", ".join(f"`{name}`" for name in (flag_name(key), *ALIASES.get(key, ())))
        rows.append((names, f"`{json.dumps(default)}`" if default is not None else "auto", HELP[key]))
    return table(("flag", "default", "what"), rows)


def metrics() -> str:
    rows = [(f"`{m.name}`", m.kind, ", ".join(m.labels), "yes" if m.vllm else "", m.help) for m in METRICS]
    return table(("metric", "kind", "labels", "vllm:", "what"), rows)


TABLES = {
    "endpoints": endpoints,
    "fields": request_fields,
    "unsupported": unsupported,
    "ignored": ignored,
    "errors": error_table,
    "limits": limit_table,
    "open": open_paths,
    "flags": flags,
    "metrics": metrics,
}


def written(text: str) -> str:
    """The page with its tables as the code has them now."""
    return TABLE.sub(lambda match: match[1] + TABLES[match[2]]() + match[4], text)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
