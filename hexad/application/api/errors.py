"""Errors as answers: the OpenAI body, the status, and the headers that belong to it. Everything that fails goes through here."""

from __future__ import annotations

import logging

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from hexad.application.api import wire
from hexad.application.api.admission import retry_after_header
from hexad.common.errors import AuthenticationError, HexadError, NotFoundError, RequestError

log = logging.getLogger("hexad.api")
DEFAULT_RETRY_S = 5.0  # where nobody has an estimate


class MethodNotAllowedError(RequestError):
    """The route exists, not with this method."""

    status = 405
    default_code = "method_not_allowed"


MESSAGES = "/v1/messages"  # whose errors have one key more: "type": "error"


def error_response(error: HexadError, path: str = "") -> Response:
    """`error` as an HTTP response of the route `path`."""
    headers = {}
    if error.retry_after_s is not None or error.status in (429, 503):
        headers["retry-after"] = retry_after_header(error.retry_after_s if error.retry_after_s is not None else DEFAULT_RETRY_S)
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    body = {"type": "error", **error.body()} if path.startswith(MESSAGES) else error.body()
    return Response(wire.encode(body), status_code=error.status, headers=headers, media_type="application/json")


def as_hexad_error(error: BaseException) -> HexadError:
    """`error` itself, or for an unforeseen one a 500 without its text (which is logged)."""
    if isinstance(error, HexadError):
        return error
    log.error("unforeseen error while serving a request", exc_info=error)
    return HexadError("internal error: the server's log has the details")


def from_http_exception(request: Request, error: HTTPException) -> HexadError:
    """What the router raises, in our words."""
    what = f"{request.method[:20]} {request.url.path[:200]}"
    if error.status_code == 404:
        return NotFoundError(f"there is no route {what}: see /openapi.json")
    if error.status_code == 405:
        return MethodNotAllowedError(f"{what} is not allowed: this route takes {(error.headers or {}).get('Allow', 'another method')}")
    return RequestError(f"{what}: {error.detail}")


def noted(error: HexadError, scope: Scope) -> HexadError:
    """`error`, its code written into the access record."""
    scope["state"]["record"]["error"] = error.code
    return error


async def on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(noted(from_http_exception(request, error), request.scope), request.url.path)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def on_hexad_error(request: Request, error: Exception) -> Response:
    return error_response(noted(as_hexad_error(error), request.scope), request.url.path)


class CatchErrors:
    """ASGI middleware: an exception before the response has started becomes an error response; after that the connection ends."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._handshake(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watch)
        except ClientDisconnect:
            noted(RequestError("the caller went away before its request had arrived", code="client_gone"), scope)
        except Exception as error:
            failure = noted(as_hexad_error(error), scope)
            if started:
                raise ConnectionError(failure.message) from None
            await error_response(failure, scope["path"])(scope, receive, send)

    async def _handshake(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A handshake that is refused gets an HTTP error; after it, a failure closes the connection."""
        accepted = False

        async def watch(message: Message) -> None:
            nonlocal accepted
            accepted = accepted or message["type"] != "websocket.close"
            if accepted or "websocket.http.response" not in scope.get("extensions", {}):
                await send(message)
            else:  # what the router says to a path that it does not have
                await refuse_handshake(NotFoundError("there is no WebSocket here: see docs/server.md"), send)

        try:
            await self.app(scope, receive, watch)
        except WebSocketDisconnect:
            pass
        except Exception as error:
            failure = as_hexad_error(error)
            if accepted:
                await send({"type": "websocket.close", "code": 1011})
            elif "websocket.http.response" in scope.get("extensions", {}):
                await refuse_handshake(failure, send)
            else:
                await send({"type": "websocket.close", "code": 1008})


async def refuse_handshake(error: HexadError, send: Send) -> None:
    """An HTTP error in place of a WebSocket."""
    response = error_response(error)
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": response.raw_headers})
    await send({"type": "websocket.http.response.body", "body": bytes(response.body)})
