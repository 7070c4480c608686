"""Requests that a server must survive: a fixed corpus of malformed HTTP and JSON, and a generator of endless variants.

Each `Shot` says what is sent; `judge` says what is wrong with an answer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from firing import Answer, get, post

from hexad.application.api import messages_body, responses_body
from hexad.application.api.fields import NEUTRAL, WITHOUT_EFFECT
from hexad.application.api.messages_body import CountRequest, MessagesRequest
from hexad.application.api.responses_body import ResponsesRequest
from hexad.application.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
COUNT, RESPONSES = "/v1/messages/count_tokens", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 2},
    CHAT: {"messages": HI, "max_tokens": 2},
    MESSAGES: {"messages": HI, "max_tokens": 2},
    COUNT: {"messages": HI},
    RESPONSES: {"input": "hello", "max_output_tokens": 2},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [65, 66]},
}
SCHEMAS = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatRequest,
    MESSAGES: MessagesRequest,
    COUNT: CountRequest,
    RESPONSES: ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
NUMBERS = (
    "-1", "0", "-0", "-0.0", "1", "0.5", "2147483647", "2147483648", "-2147483649", "4294967296",
    "9223372036854775807", "9223372036854775808",
    "-9223372036854775809", "18446744073709551616", "1e308", "-1e308", "1e309", "5e-324", "NaN", "Infinity",
    "-Infinity", "1.0", "1.5", "1e2",
    "9" * 400, "1" * 5000, "0." + "3" * 3000, "1e-999", "1e999999999",
)  # fmt: skip
OTHERS = (
    'null', 'true', 'false', '""', '"0"', '"x"', '[]', '{}', '[[]]', '[null]', '[NaN]', '{"a":1}', '["a",1]', '"\\ud800"', '"\\u0000"',
    '"\\ud83d\\ude00"', '[1e308]', '[-1]', '[2147483648]', '[9223372036854775808]', '{"-1":1}', '{"0":NaN}', '{"0":1e308}', '{"\\ud800":1}',
    '{"":1}', '{"1e5":1}', '{"99999999999999999999":1}', '{"٣":1}', '{"³":1}', '[""]', '["a","a","a","a","a"]', '[true]', '[0.5]', '"NaN"',
)  # fmt: skip


@dataclass(frozen=True)
class Shot:
    """One attack."""

    name: str
    pieces: tuple[bytes, ...]
    pause_s: float = 0.0
    half_close: bool = False  # end our side after the last piece
    may_close: bool = False  # no answer is an answer: what was sent is not, or not all of, a request
    head: bool = False  # the answer has no body
    deadline: bool = False  # 504 is what was asked for


def shot(name: str, data: bytes, **options: Any) -> Shot:
    return Shot(name, (data,), deadline=b"deadline_s" in data, **options)


def judge(attack: Shot, answer: Answer) -> str | None:
    """What is wrong with `answer`, or None."""
    status = answer.status
    if status == 0:
        return None if attack.may_close else "no answer"
    if 200 <= status < 300:
        return _judge_stream(answer)
    if status == 504 and attack.deadline:
        return None
    if status == 503 and "retry-after" not in answer.headers:
        return "503 without Retry-After"
    if status in (408, 431) and not attack.may_close:
        return f"{status} for a request whose head is small and came at once"
    if not (400 <= status < 500 or status == 503):
        return f"status {status}: {answer.body[:300]!r}"
    if attack.head or answer.body.startswith(b"Failed to open a WebSocket connection"):
        return None  # a broken upgrade is refused by the protocol, before there is a request
    error = answer.error()
    if set(error) != {"message", "type", "param", "code"}:
        return f"{status} without an error object: {answer.body[:300]!r}"
    if not error["message"] or len(error["message"]) > 2_000:
        return f"{status} with a message of {len(error['message'])} characters"
    sent = b"".join(attack.pieces)  # a message may quote what it refuses
    words = ("Traceback", "{%", "site-packages", "object at 0x", "pydantic")
    leaks = [word for word in words if word in error["message"] and word.encode() not in sent]
    return f"{status} whose message shows {leaks}" if leaks else None


def _judge_stream(answer: Answer) -> str | None:
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        return None
    for line in answer.body.split(b"\n"):
        if line.startswith(b"data: {"):
            error = json.loads(line[6:]).get("error")
            if error and error["code"] in ("internal_error", "request_failed"):
                return f"an error event in a stream: {line[:300]!r}"
    last = answer.body.rpartition(b"event: ")[2]
    ended = answer.body.endswith(b"data: [DONE]\n\n") or last.startswith(
        (b"message_stop\n", b"response.completed\n", b"response.incomplete\n")
    )
    return None if ended or b'"error":{' in answer.body else "a stream without an end"


# Bodies: one field of a valid request replaced.


def with_field(path: str, name: str, value: str, **more: Any) -> bytes:
    """A valid body with `name` set to the JSON text `value`, which need not be valid."""
    body = {**BASES[path], **more}
    body.pop(name, None)
    return (json.dumps(body)[:-1] + f", {json.dumps(name)}: {value}" + "}").encode("utf-8", "surrogatepass")


@cache
def fields(path: str) -> tuple[str, ...]:
    """Every field that the server knows at `path`."""
    more = {MESSAGES: messages_body.NEUTRAL, COUNT: messages_body.NEUTRAL, RESPONSES: responses_body.NEUTRAL}.get(path, {})
    return tuple(sorted({*SCHEMAS[path].model_fields, *NEUTRAL, *WITHOUT_EFFECT, *more}))


def every_field() -> Iterator[Shot]:
    """Each field of each endpoint with each number and each wrong type."""
    for path in BASES:
        for name in fields(path):
            for value in NUMBERS + OTHERS:
                yield shot(f"{path} {name}={value[:30]}", post(path, with_field(path, name, value)))


def nested(depth: int, opening: str = "[", closing: str = "]", core: str = "1") -> str:
    return opening * depth + core + closing * depth


JINJA = (
    "{{ 1/0 }}", "{% for i in range(99999999) %}{% for j in range(99999999) %}x{% endfor %}{% endfor %}", "{{ 'x' * 10**9 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ '%1000000000d' % 1 }}", "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% raw %}{{", "{{ messages | map(attribute='__class__') | list }}", "{{ '{:>999999999}'.format(1) }}",
    "{{ range(10**9) | list | length }}",
)  # fmt: skip
REGEXES = (
    "(a+)+$",
    "(a|a)*b",
    "((a{1,1000}){1,1000}){1,1000}",
    "(?=(a+))a*b\\1",
    "[" * 500,
    "\\",
    "(?P<x",
    ".{0,999999999}",
    "(" * 900 + ")" * 900,
)


def bombs() -> Iterator[tuple[str, str, bytes]]:
    """(name, path, body): bodies that cost more than they weigh."""
    for i, source in enumerate(JINJA):
        yield f"jinja content {i}", CHAT, json.dumps({"messages": [{"role": "user", "content": source}], "max_tokens": 1}).encode()
        yield (
            f"jinja name {i}",
            CHAT,
            json.dumps({"messages": [{"role": "user", "content": "x", "name": source}], "max_tokens": 1}).encode(),
        )
        yield f"jinja template {i}", CHAT, with_field(CHAT, "chat_template", json.dumps(source))
        for key in ("chat_template", "messages", "enable_thinking", "custom_instructions", "date_string", "bos_token", "self", "loop"):
            yield f"jinja kwargs {key} {i}", CHAT, with_field(CHAT, "chat_template_kwargs", json.dumps({key: source}))
    for i, regex in enumerate(REGEXES):
        for name in ("guided_regex", "stop", "bad_words"):
            value = json.dumps([regex] if name == "bad_words" else regex)
            yield f"regex {name} {i}", COMPLETIONS, with_field(COMPLETIONS, name, value)
        for kind in ("regex", "grammar"):
            yield f"regex structured {kind} {i}", CHAT, with_field(CHAT, "structured_outputs", json.dumps({kind: regex}))
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": regex}}}
        yield f"regex schema {i}", CHAT, with_field(CHAT, "response_format", json.dumps(schema))
    schema_deep = '{"properties":{"a":' * 200 + "{}" + "}}" * 200
    yield (
        "schema deep",
        CHAT,
        with_field(CHAT, "response_format", '{"type":"json_schema","json_schema":{"name":"x","schema":' + schema_deep + "}}"),
    )
    recursive = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}}
    yield "schema recursive", CHAT, with_field(CHAT, "structured_outputs", json.dumps({"json": recursive}))
    for depth in (100, 900, 1_100, 5_000, 100_000):
        yield f"deep list {depth}", COMPLETIONS, nested(depth).encode()
        yield f"deep object {depth}", COMPLETIONS, nested(depth, '{"a":', "}").encode()
        for path, name in (
            (COMPLETIONS, "prompt"),
            (CHAT, "messages"),
            (CHAT, "metadata"),
            (CHAT, "x_unknown"),
            (CHAT, "chat_template_kwargs"),
        ):
            yield f"deep {name} {depth}", path, with_field(path, name, nested(depth))
        arguments = nested(depth, '{"a":', "}")
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        yield (
            f"deep arguments {depth}",
            CHAT,
            json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}, *HI], "max_tokens": 1}).encode(),
        )
        kwargs = f'{{"thinking": {nested(depth)}}}'
        yield f"deep kwargs {depth}", CHAT, with_field(CHAT, "chat_template_kwargs", kwargs)
    yield from large()


def large() -> Iterator[tuple[str, str, bytes]]:
    """Bodies with a great many of something."""
    yield "long prompt", COMPLETIONS, with_field(COMPLETIONS, "prompt", json.dumps("a b " * 500_000))
    yield "long unspaced prompt", COMPLETIONS, with_field(COMPLETIONS, "prompt", json.dumps("a" * 300_000))
    yield "long ids", COMPLETIONS, with_field(COMPLETIONS, "prompt", json.dumps([1] * 300_000))
    yield "many prompts", COMPLETIONS, with_field(COMPLETIONS, "prompt", json.dumps(["a"] * 10_000))
    yield "many empty lists", COMPLETIONS, with_field(COMPLETIONS, "prompt", json.dumps([[]] * 100))
    yield "many messages", CHAT, with_field(CHAT, "messages", json.dumps(HI * 20_000))
    yield (
        "many parts",
        CHAT,
        with_field(CHAT, "messages", json.dumps([{"role": "user", "content": [{"type": "text", "text": "a"}] * 50_000}])),
    )
    yield "many stops", COMPLETIONS, with_field(COMPLETIONS, "stop", json.dumps(["a"] * 100_000))
    yield "long stop", COMPLETIONS, with_field(COMPLETIONS, "stop", json.dumps("a" * 1_000_000))
    yield "many stop ids", COMPLETIONS, with_field(COMPLETIONS, "stop_token_ids", json.dumps([1] * 100_000))
    yield "many biases", COMPLETIONS, with_field(COMPLETIONS, "logit_bias", json.dumps({str(i): 1 for i in range(100_000)}))
    yield "many allowed", COMPLETIONS, with_field(COMPLETIONS, "allowed_token_ids", json.dumps([1] * 200_000))
    yield "many bad words", COMPLETIONS, with_field(COMPLETIONS, "bad_words", json.dumps(["ab"] * 10_000))
    yield (
        "many unknown fields",
        COMPLETIONS,
        json.dumps({"prompt": "a", "max_tokens": 1, **{f"zz_unknown_{i}": i for i in range(20_000)}}).encode(),
    )
    yield "long field name", COMPLETIONS, json.dumps({"prompt": "a", "max_tokens": 1, "q" * 1_000_000: 1}).encode()
    yield "long model", COMPLETIONS, with_field(COMPLETIONS, "model", json.dumps("m" * 1_000_000))
    yield "long role", CHAT, with_field(CHAT, "messages", json.dumps([{"role": "r" * 1_000_000, "content": "x"}]))
    yield "long salt", COMPLETIONS, with_field(COMPLETIONS, "cache_salt", json.dumps("s" * 1_000_000))
    yield "long request id", COMPLETIONS, with_field(COMPLETIONS, "request_id", json.dumps("r" * 1_000_000))
    yield "many tool calls", CHAT, json.dumps({"messages": [{"role": "assistant", "tool_calls": [{}] * 10_000}, *HI]}).encode()
    yield "many ids", "/detokenize", json.dumps({"tokens": [65] * 300_000}).encode()


def texts() -> Iterator[tuple[str, bytes]]:
    """(name, body) of what is hardly JSON."""
    good = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    yield "empty", b""
    yield from (
        (f"constant {text[:12]!r}", text) for text in (b"null", b"true", b"1", b'""', b"[]", b"{}", b"NaN", b"{", b'{"', b"\0", b"[" * 50)
    )
    yield from ((f"cut at {i}", good[:i]) for i in range(1, len(good), 3))
    yield "bytes", bytes(range(256)) * 8
    yield "bad utf-8", b'{"prompt": "\xff\xfe", "max_tokens": 1}'
    yield "overlong utf-8", b'{"prompt": "\xc0\xaf", "max_tokens": 1}'
    yield "raw surrogate", b'{"prompt": "\xed\xa0\x80", "max_tokens": 1}'
    yield "bom", b"\xef\xbb\xbf" + good
    yield from ((encoding, good.decode().encode(encoding)) for encoding in ("utf-16", "utf-16-le", "utf-32"))
    yield "trailing text", good + b" {}"
    yield "trailing comma", good[:-1] + b",}"
    yield "comments", b"/* x */" + good
    yield "single quotes", good.replace(b'"', b"'")
    yield "control character", b'{"prompt": "a\nb", "max_tokens": 1}'
    yield "duplicate keys", b'{"prompt": "a", "prompt": 7, "max_tokens": 1, "max_tokens": -5}'
    yield "duplicate messages", b'{"prompt": "a", "max_tokens": -5, "max_tokens": 1}'
    yield "lone surrogate", b'{"prompt": "\\ud800", "max_tokens": 1}'
    yield "lone surrogate key", b'{"prompt": "a", "max_tokens": 1, "\\udfff": 1}'
    yield "proto", b'{"prompt": "a", "max_tokens": 1, "__proto__": {"a": 1}, "__class__": 1, "self": 1}'
    yield "form", b"prompt=hello&max_tokens=1"
    yield "xml", b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'
    yield "pickle", b"cos\nsystem\n(S'id'\ntR."
    yield "gzip", b"\x1f\x8b\x08\x00" + bytes(64)


# HTTP itself.

TARGETS = (
    "/", "//", "/v1", "/v1/", "//v1/models", "/v1/../v1/models", "/v1/./models", "/V1/models", "/v1/%6dodels",
    "/v1%2fmodels", "/v1/models/",
    "/v1/models/..", "/v1/models/../../etc/passwd", "/v1/models/%00", "/v1/models/%0d%0aX-Injected:%201", "/v1/models/%ff%fe",
    "/v1/models/" + "a" * 4_000, "/v1/models/" + "%2e%2e%2f" * 500, "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd",
    "/health/..;/v1/models",
    "/v1/models?" + "a=b&" * 1_000, "/v1/models?\"><script>", "/v1/models#x", "http://x/v1/models",
    "http://evil:99999/v1/models", "*", "/v1/models;a",
    "/metrics/", "/openapi.json", "/docs", "/redoc", "/favicon.ico", "/.env", "/.git/config", "/v1/models/tiny/x",
    "/invocations", "/v2/embed",
    "/v1/embeddings", "/v1/batches", "/v1/files", "/shutdown", "/reset_prefix_cache", "/sleep", "/debug", "/\\..\\..", "/v1\\models",
)  # fmt: skip
METHODS = ("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "POST")


def wire() -> Iterator[Shot]:
    """What is not, or hardly, HTTP."""
    good = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    for target in TARGETS:
        for method in METHODS:
            for version in ("1.1", "1.0"):
                request = get(target, "Connection: close", "Content-Length: 0", method=method, version=version)
                yield shot(f"{method} {target[:40]} {version}", request, head=method == "HEAD", may_close="#" in target or "\\" in target)
    for length in ("-1", "abc", "1e3", "99999999999999999999", "0x10", "+5", "5, 5", " ", "9223372036854775807"):
        data = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
        yield shot(f"length {length}", data, may_close=True, half_close=True)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n".encode()
    broken = {
        "two lengths": head + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n{}  ",
        "length and chunked": head + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        "chunked twice": head + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        "unknown coding": head + b"Transfer-Encoding: lzma\r\n\r\n0\r\n\r\n",
        "bad chunk size": head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        "huge chunk size": head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}",
        "negative chunk": head + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
        "chunk extension": head + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"a" * 30_000 + b"\r\n{}\r\n0\r\n\r\n",
        "no chunk end": head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
        "short body": head + b"Content-Length: 500\r\n\r\n" + good,
        "header without colon": head + b"nonsense\r\n\r\n",
        "header with nul": head + b"X: a\0b\r\n\r\n",
        "folded header": head + b"X: a\r\n b\r\n\r\n",
        "space before colon": head + b"X : a\r\n\r\n",
        "bare newlines": b"GET /v1/models HTTP/1.1\nHost: x\n\n",
        "no version": b"GET /v1/models\r\n\r\n",
        "version 9": b"GET /v1/models HTTP/9.9\r\nHost: x\r\n\r\n",
        "version word": b"GET /v1/models HTTP/one\r\nHost: x\r\n\r\n",
        "lower case method": b"get /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        "unknown method": b"BREW /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        "connect": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        "http/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(32),
        "tls hello": bytes.fromhex("16030100c8010000c40303") + bytes(200),
        "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
        "two hosts": b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "non-ascii path": "GET /v1/modèles HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        "space in path": b"GET /v1 /models HTTP/1.1\r\nHost: x\r\n\r\n",
        "newlines only": b"\r\n" * 1_000,
        "nothing": b"",
        "zeros": bytes(4_096),
        "line of 1 MB": b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        "header of 1 MB": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n",
        "10,000 headers": b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(10_000)) + b"\r\n",
        "endless header": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 500_000,
    }
    for name, data in broken.items():
        yield shot(name, data, may_close=True, half_close=True)
    upgrades = ("websocket", "h2c", "TLS/1.0", "")
    for upgrade in upgrades:
        yield shot(
            f"upgrade {upgrade!r}", get("/v1/models", "Connection: Upgrade, close", f"Upgrade: {upgrade}"), may_close=True, half_close=True
        )
    yield shot("expect", post(COMPLETIONS, good, "Expect: 100-continue"))
    yield shot("expect nonsense", post(COMPLETIONS, good, "Expect: 200-maybe"))
    yield shot("content encoding", post(COMPLETIONS, good, "Content-Encoding: gzip"))
    yield shot("content type", post(COMPLETIONS, good, "Content-Type: text/plain; charset=utf-7"))
    for value in ("x" * 10_000, "a b", "é", "a\tb", "'; drop table", "${jndi:ldap://x}"):
        yield shot(f"request id {value[:10]}", post(COMPLETIONS, good, f"X-Request-Id: {value}"))
        yield shot(f"key {value[:10]}", post(COMPLETIONS, good, f"Authorization: Bearer {value}"))
        yield shot(f"origin {value[:10]}", post(COMPLETIONS, good, f"Origin: {value}"))
    slow = post(COMPLETIONS, good)
    yield Shot("slow body", tuple(slow[i : i + 40] for i in range(0, len(slow), 40)), pause_s=0.05)
    yield Shot("byte by byte", tuple(slow[i : i + 1] for i in range(len(slow))), pause_s=0.002)


def corpus() -> list[Shot]:
    """The fixed part, without the product of all fields and values."""
    shots = list(wire())
    shots += [shot(f"bomb: {name}", post(path, body)) for name, path, body in bombs()]
    shots += [shot(f"{path} text: {name}", post(path, body)) for path in BASES for name, body in texts()]
    return shots


# The generator.

STREAMS = ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}, {"n": 3, "stream": True}, {"n": 2})


def random_value(rng: random.Random) -> str:
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(OTHERS)
    if kind == 2:
        return str(rng.choice((1, -1)) * rng.randrange(2 ** rng.randrange(1, 70)))
    if kind == 3:
        return repr(rng.choice((1, -1)) * rng.uniform(0, 10.0 ** rng.randrange(-10, 10)))
    return json.dumps("".join(chr(rng.choice((rng.randrange(1, 128), rng.randrange(1, 0xD7FF)))) for _ in range(rng.randrange(40))))


def random_body(rng: random.Random) -> tuple[str, bytes]:
    """(path, body): a valid request with one to three fields made wrong."""
    path = rng.choices(list(BASES), (4, 4, 3, 1, 3, 1, 1))[0]
    options = (
        dict(rng.choice(STREAMS))
        if path in (CHAT, COMPLETIONS)
        else {"stream": rng.random() < 0.5}
        if path in (MESSAGES, RESPONSES)
        else {}
    )
    body = with_field(path, rng.choice(fields(path)), random_value(rng), **options)
    for _ in range(rng.randrange(3)):
        body = body[:-1] + f", {json.dumps(rng.choice(fields(path)))}: {random_value(rng)}}}".encode("utf-8", "surrogatepass")
    return path, body


def mutated(rng: random.Random, data: bytes) -> bytes:
    """`data` with a few bytes changed, dropped or doubled."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(max(1, len(out)))
        rng.choice(_MUTATIONS)(rng, out, at)
    return bytes(out)


_MUTATIONS: tuple[Callable[[random.Random, bytearray, int], None], ...] = (
    lambda rng, out, at: out.__setitem__(slice(at, at + 1), bytes([rng.randrange(256)])),
    lambda rng, out, at: out.__delitem__(slice(at, at + rng.randrange(1, 9))),
    lambda rng, out, at: out.__setitem__(slice(at, at), out[at : at + rng.randrange(1, 30)]),
    lambda rng, out, at: out.__setitem__(slice(at, at), rng.choice((b"\0", b"\r\n", b'"', b"{", b"\xff", b"%", b"\\u"))),
)


def random_shot(rng: random.Random) -> Shot:
    """One attack of the endless kind."""
    path, body = random_body(rng)
    kind = rng.randrange(10)
    if kind < 7:
        return shot(f"{path} {body[:150]!r}", post(path, body))
    if kind < 9:
        broken = mutated(rng, body)
        return shot(f"mutated {path} {broken[:150]!r}", post(path, broken))
    request = mutated(rng, post(path, body, "Connection: close"))
    return shot(f"mutated request {request[:150]!r}", request, may_close=True, half_close=True, head=bool(re.match(rb"HEAD ", request)))
