"""The FastAPI application: routes, and the middleware around them. No state of its own."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from hexad.application.api import health, tokens
from hexad.application.api.auth import OPEN_PATHS, Authenticate, Keys
from hexad.application.api.chat import answer_chat, chat_completions
from hexad.application.api.completions import answer_completion, completions
from hexad.application.api.errors import CatchErrors, on_hexad_error, on_http_exception
from hexad.application.api.messages import count_tokens, messages
from hexad.application.api.messages_body import CountRequest, MessagesRequest
from hexad.application.api.middleware import LimitBody, RequestContext
from hexad.application.api.responses import responses
from hexad.application.api.responses_body import ResponsesRequest
from hexad.application.api.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from hexad.application.api.state import ServerState
from hexad.application.api.websocket import Answer, serve_socket
from hexad.common.errors import HexadError
from hexad.common.version import __version__

Handler = Callable[[ServerState, Request], Awaitable[Response]]

GET: dict[str, Handler] = {
    "/health": health.ready,
    "/health/live": health.live,
    "/health/ready": health.ready,
    "/ping": health.ready,
    "/version": health.version,
    "/load": health.load,
    "/metrics": health.metrics,
    "/v1/models": health.models,
    "/v1/models/{model_id:path}": health.model,
}
POST: dict[str, tuple[Handler, type[Any]]] = {
    "/v1/completions": (completions, CompletionRequest),
    "/v1/chat/completions": (chat_completions, ChatRequest),
    "/v1/responses": (responses, ResponsesRequest),
    "/v1/messages": (messages, MessagesRequest),
    "/v1/messages/count_tokens": (count_tokens, CountRequest),
    "/tokenize": (tokens.tokenize, TokenizeRequest),
    "/detokenize": (tokens.detokenize, DetokenizeRequest),
}
SOCKETS: dict[str, Answer] = {
    "/v1/completions": answer_completion,
    "/v1/chat/completions": answer_chat,
}


def build_app(state: ServerState) -> FastAPI:
    """Everything between the socket and the handlers.

    From outside in: id and access record, CORS, errors, keys, body size, routes. Bodies are read by the handlers themselves (FastAPI
    would answer 422 in its own format), so the schema in /openapi.json is given beside the route.
    """
    app = FastAPI(title="Hexad", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    for path, handler in GET.items():
        extra = {"parameters": _path_parameters(path)}
        app.add_api_route(path, _endpoint(handler, state), methods=["GET"], response_class=Response, name=path, openapi_extra=extra)
        app.add_api_route(path, _endpoint(handler, state), methods=["HEAD"], include_in_schema=False)
    for path, (handler, schema) in POST.items():
        body = {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema(schema)}}}}
        app.add_api_route(path, _endpoint(handler, state), methods=["POST"], response_class=Response, name=path, openapi_extra=body)
    for path, answer in SOCKETS.items():
        app.add_api_websocket_route(path, _socket(answer, state), name=f"websocket {path}")
    app.add_exception_handler(HexadError, on_hexad_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    server = state.config.server
    app.add_middleware(LimitBody, max_bytes=server.max_body_bytes)  # the one added last is outermost
    app.add_middleware(Authenticate, keys=Keys(server.api_key))
    app.add_middleware(CatchErrors)
    if server.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-hexad-ignored", "retry-after"],
        )
    app.add_middleware(RequestContext, metrics=state.metrics, tracing=state.tracing, quiet_paths=OPEN_PATHS | {"/metrics"})
    return app


def _endpoint(handler: Handler, state: ServerState) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(state, request)

    endpoint.__doc__ = handler.__doc__
    return endpoint


def _socket(answer: Answer, state: ServerState) -> Callable[[WebSocket], Awaitable[None]]:
    async def endpoint(websocket: WebSocket) -> None:
        await serve_socket(state, websocket, answer)

    return endpoint


def _path_parameters(path: str) -> list[dict[str, Any]]:
    """The OpenAPI description of what stands in braces; handlers read it from the request, so FastAPI does not know."""
    names = re.findall(r"\{(\w+)", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _schema(model: type[Any]) -> dict[str, Any]:
    """The JSON schema of a request, with its definitions put in place of the references to them."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inline(definitions[node["$ref"].rpartition("/")[2]])
            return {key: inline(value) for key, value in node.items()}
        return [inline(item) for item in node] if isinstance(node, list) else node

    result: dict[str, Any] = inline(schema)
    return result
