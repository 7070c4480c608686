"""Pure ASGI middleware around every request: its id, its access record, and the cap on its body."""

from __future__ import annotations

import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hexad.common.errors import PayloadTooLargeError, RequestError
from hexad.common.log import access
from hexad.common.metrics import MetricsRegistry

if TYPE_CHECKING:
    from hexad.application.api.tracing import Tracing

MAX_LOGGED_PATH_BYTES = 500
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class RequestContext:
    """Gives each request an id (the caller's `X-Request-Id` if it is well formed), returns it, writes one access record and counts it.

    Handlers add to the record through `scope["state"]["record"]`.
    """

    def __init__(
        self, app: ASGIApp, *, metrics: MetricsRegistry, tracing: Tracing | None = None, quiet_paths: frozenset[str] = frozenset()
    ) -> None:
        """`quiet_paths` get no access record and no span: probes would fill the log."""
        self.app = app
        self.metrics = metrics
        self.tracing = tracing
        self.quiet_paths = quiet_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        start_s = time.monotonic()
        request_id = _request_id(scope)
        record: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, record=record)
        if scope["type"] == "websocket":  # has a record for each of its requests
            await self.app(scope, receive, send)
            return
        span = None
        if self.tracing is not None and scope["path"] not in self.quiet_paths:
            span = scope["state"]["span"] = self.tracing.begin(scope["method"], scope["path"], scope["headers"])
        status = 499  # no response: the caller went away first

        async def tag(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", [])
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                if self.tracing is not None and span is not None:
                    message["headers"].append(self.tracing.header(span))
            await send(message)

        try:
            await self.app(scope, receive, tag)
        finally:
            duration_s = time.monotonic() - start_s
            route = getattr(scope.get("route"), "path", "none")
            self.metrics.observe_http(scope["method"] if route != "none" else "any", route, status, duration_s)
            if self.tracing is not None and span is not None:
                self.tracing.end(span, status, record)
            if scope["path"] not in self.quiet_paths:
                access(
                    request_id=request_id,
                    method=scope["method"],
                    path=_shown_path(scope),
                    status=status,
                    duration_s=duration_s,
                    client=(scope.get("client") or ("",))[0],
                    **record,
                )


def _shown_path(scope: Scope) -> str:
    """The path for the log, as it was sent: decoded, it could hold line breaks."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode("ascii", "backslashreplace")
    return raw[:MAX_LOGGED_PATH_BYTES].decode("ascii", "backslashreplace")


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return str(value.decode())
    return uuid.uuid4().hex


class LimitBody:
    """Refuses bodies above `max_bytes`: at once when the length is declared, else when the limit is passed."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"content-length":
                if not value.isdigit():
                    raise RequestError("the header Content-Length is not a number")
                self._check(int(value))
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                self._check(received)
            return message

        await self.app(scope, counted, send)

    def _check(self, size: int) -> None:
        if size > self.max_bytes:
            raise PayloadTooLargeError(f"the body has {size:,} bytes, the limit is {self.max_bytes:,}: send less")
