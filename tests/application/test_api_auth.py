"""B54: every route needs a key, except a short list; and what browsers need."""

from __future__ import annotations

import hashlib
import socket

import httpx2 as httpx
import pytest
from api_stub import StubEngine, make_state, serving

from hexad.application.api.app import build_app
from hexad.application.api.auth import OPEN_PATHS, Keys
from hexad.common.errors import ConfigError

KEY = "sk-very-secret"
OPEN = {"/health", "/health/live", "/health/ready", "/ping"}


async def routes() -> list[tuple[str, str]]:
    app = build_app(make_state(StubEngine()))
    return [(route.path, method) for route in app.routes for method in sorted(getattr(route, "methods", None) or ["GET"])]


async def test_b54_the_open_routes_are_the_short_list() -> None:
    table = await routes()
    assert len(table) > 15
    assert set(OPEN_PATHS) == OPEN
    with serving(server__api_key=[KEY, "other"]) as server, httpx.Client(base_url=server.url) as http:
        reachable = set()
        for path, method in table:
            response = http.request(method, path.replace("{model_id:path}", "m"), json={} if method == "POST" else None)
            if response.status_code != 401:
                reachable.add(path)
            elif method != "HEAD":
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        assert reachable == OPEN


def raw(server: object, request: str) -> bytes:
    with socket.create_connection((server.host, server.port)) as sock:  # type: ignore[attr-defined]
        sock.settimeout(3)
        sock.sendall(request.encode("latin-1"))
        data = b""
        while b"\r\n\r\n" not in data and (piece := sock.recv(4096)):
            data += piece
    return data


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models",
        "/v1/../v1/models",
        "/V1/models",
        "/v1/%6dodels",
        "/v1/models/",
        "/v1%2fmodels",
        "/health/../v1/models",
        "/health/%2e%2e/v1/models",
        "/v1/models?api_key=" + KEY,
        "http://x/v1/models",
        "/health/x",
        "/docs",
        "/openapi.json",
    ],
)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_b54_path_tricks(target: str, version: str) -> None:
    with serving(server__api_key=[KEY]) as server:
        for method in ("GET", "HEAD", "OPTIONS", "POST"):
            answer = raw(server, f"{method} {target} HTTP/{version}\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            assert answer.split(b" ")[1] in (b"401", b"400"), answer


def test_b54_header_forms() -> None:
    with serving(server__api_key=[KEY, "sha256:" + hashlib.sha256(b"hashed").hexdigest()]) as server:

        def status(*headers: str) -> str:
            lines = "".join(f"{line}\r\n" for line in headers)
            return raw(server, f"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{lines}\r\n").split(b" ")[1].decode()

        assert status(f"Authorization: Bearer {KEY}") == "200"
        assert status(f"authorization: bearer {KEY}") == "200"
        assert status("Authorization: Bearer hashed") == "200"
        refused = [
            (),
            ("Authorization: Bearer",),
            ("Authorization: Bearer ",),
            ("Authorization: Bearer wrong",),
            (f"Authorization: Basic {KEY}",),
            (f"Authorization: {KEY}",),
            (f"Authorization: Bearer  {KEY}x",),
            (f"Authorization: Bearer {KEY}é",),
            (f"Authorization: Bearer {KEY}", f"Authorization: Bearer {KEY}"),
            ("Authorization: Bearer sha256:" + hashlib.sha256(b"hashed").hexdigest(),),
        ]
        for headers in refused:
            assert status(*headers) == "401", headers
        upgrade = raw(server, "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert b" 200 " not in upgrade.split(b"\r\n")[0]
        wrong = httpx.get(server.url + "/v1/models", headers={"authorization": "Bearer wrong-key-here"})
        assert "wrong-key-here" not in wrong.text


def test_tenants_follow_from_keys() -> None:
    engine = StubEngine()
    with serving(engine, server__api_key=["a", "b"]) as server:
        for key in ("a", "b", "a"):
            body = {"prompt": "x", "max_tokens": 1}
            httpx.post(server.url + "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    tenants = [submit.tenant for submit in engine.submitted]
    assert tenants[0] == tenants[2] != tenants[1]
    assert "a" not in tenants


def test_keys_refuse_nonsense() -> None:
    for bad in ("", "  ", "sha256:xyz", "sha256:00"):
        with pytest.raises(ConfigError):
            Keys([bad])
    assert KEY not in str(vars(Keys([KEY])))


def test_cors_by_flag() -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with serving(server__allowed_origins=["https://a.example"], server__api_key=[KEY]) as server, httpx.Client(base_url=server.url) as http:
        allowed = http.options("/v1/completions", headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        assert (
            "access-control-allow-origin"
            not in http.options("/v1/completions", headers={**preflight, "origin": "https://b.example"}).headers
        )
        refused = http.get("/v1/models", headers={"origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
    with serving() as server:
        assert httpx.options(server.url + "/v1/completions", headers=preflight).status_code == 405
