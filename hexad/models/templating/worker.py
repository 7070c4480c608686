"""The rendering process: reads requests on stdin, answers on stdout, and can be killed at any time.

A frame is a 4-byte little-endian length and that many bytes of ASCII JSON. Request: {"source", "variables"}; a null "variables" only
compiles. Answer: {"text"} or {"error": "refused" | "syntax" | "failed" | "limit", "message"}.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
import time
from typing import IO, Any

import jinja2

from hexad.models.templating.environment import RefusedError, make_environment

MAX_TEXT_CHARS = 32 * 2**20
MAX_MEMORY_BYTES = 2**29
_CACHED_TEMPLATES = 16


class _TimeUpError(Exception):
    pass


def main(cpu_limit_s: float) -> None:
    """Serve until stdin ends."""
    _limit_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGPROF"):
        signal.signal(signal.SIGPROF, _on_time_up)
    renderer = _Renderer()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (request := read_frame(source)) is not None:
        with _cpu_limit(cpu_limit_s):
            answer = renderer.answer(request)
        write_frame(sink, answer)


class _Renderer:
    def __init__(self) -> None:
        self._environment = make_environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            template = self._template(request["source"])
            if request["variables"] is None:
                return {"text": ""}
            return _within_limit(template, request["variables"])
        except RefusedError as error:
            return _failure("refused", error)
        except jinja2.TemplateSyntaxError as error:
            return _failure("syntax", error)
        except _TimeUpError:
            return {"error": "limit", "message": "it takes too long"}
        except MemoryError:
            return {"error": "limit", "message": "it needs too much memory"}
        except Exception as error:  # whatever the template's expressions raise
            return _failure("failed", error)

    def _template(self, source: str) -> jinja2.Template:
        template = self._compiled.get(source)
        if template is None:
            if len(self._compiled) >= _CACHED_TEMPLATES:
                self._compiled.clear()
            template = self._compiled[source] = self._environment.from_string(source)
        return template


def _within_limit(template: jinja2.Template, variables: dict[str, Any]) -> dict[str, Any]:
    pieces: list[str] = []
    chars = 0
    for piece in template.generate(**variables):
        pieces.append(piece)
        chars += len(piece)
        if chars > MAX_TEXT_CHARS:
            return {"error": "limit", "message": f"it writes more than {MAX_TEXT_CHARS:,} characters"}
    return {"text": "".join(pieces)}


def _failure(kind: str, error: Exception) -> dict[str, Any]:
    return {"error": kind, "message": str(error)[:1000]}


def _on_time_up(number: int, frame: Any) -> None:
    raise _TimeUpError


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Any:
    """Raise in Python code after `seconds` of CPU time; a call that does not come back to Python is killed within two seconds more."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds) + 1, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


def read_frame(source: IO[bytes]) -> dict[str, Any] | None:
    """The next frame; None at the end of the stream."""
    head = source.read(4)
    if len(head) < 4:
        return None
    frame: dict[str, Any] = json.loads(source.read(int.from_bytes(head, "little")))
    return frame


def write_frame(sink: IO[bytes], frame: dict[str, Any]) -> None:
    data = json.dumps(frame).encode()
    sink.write(len(data).to_bytes(4, "little") + data)
    sink.flush()
