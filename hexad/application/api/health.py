"""Small routes about the server itself: health, version, load, metrics, models."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hexad.application.api import wire
from hexad.application.api.admission import shutting_down
from hexad.application.api.errors import error_response
from hexad.application.api.state import ServerState
from hexad.common.errors import EngineDeadError, HexadError
from hexad.common.metrics import CONTENT_TYPE
from hexad.common.version import __version__

STATS_TIMEOUT_S = 2.0


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "hexad"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


def json_response(value: object) -> Response:
    return Response(wire.encode(value), media_type="application/json")


async def live(state: ServerState, http: Request) -> Response:
    """This process runs its event loop. 200 also while draining."""
    return json_response({"status": "ok"})


async def ready(state: ServerState, http: Request) -> Response:
    """The server takes requests: the engine answers and nobody has asked it to end."""
    if state.admission.draining:
        return error_response(shutting_down())
    if not state.engine.is_alive:
        return error_response(EngineDeadError("the engine process has ended: it is being started again", retry_after_s=5.0))
    return json_response({"status": "ready"})


async def version(state: ServerState, http: Request) -> Response:
    """The version of this server."""
    return json_response({"version": __version__})


async def load(state: ServerState, http: Request) -> Response:
    """Requests inside this front end, and what the engine says of its queue."""
    stats = await _stats(state)
    engine = {key: stats.get(key) for key in ("num_running", "num_waiting", "kv_usage")} if stats is not None else {}
    return json_response({"server_load": state.admission.in_flight, "draining": state.admission.draining, **engine})


async def metrics(state: ServerState, http: Request) -> Response:
    """Prometheus metrics."""
    state.metrics.set_engine_stats(await _stats(state))
    if state.shared_metrics is not None:
        state.shared_metrics.read(state.metrics)
    return Response(state.metrics.render(), media_type=CONTENT_TYPE)


async def _stats(state: ServerState) -> dict[str, float | int | str | None] | None:
    """The engine's numbers, None when it does not answer in time."""
    try:
        return await state.engine.call("stats", STATS_TIMEOUT_S)
    except HexadError:
        return None


async def models(state: ServerState, http: Request) -> Response:
    """The models that are served."""
    return json_response(ModelList([_card(state, name) for name in state.models]))


async def model(state: ServerState, http: Request) -> Response:
    """One model."""
    return json_response(_card(state, state.resolve_model(http.path_params["model_id"])))


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(id=name, created=state.created_s, root=state.models[0], max_model_len=state.context)
