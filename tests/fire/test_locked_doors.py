"""B54 against a real process: nothing but the short table answers without a key, whatever the trick. And no code from outside."""

from __future__ import annotations

import ast
import asyncio
import hmac
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from api_stub import StubEngine, make_state
from firing import Answer, Connection, Watched, get
from tiny_model import served

import hexad
from hexad.application.api.app import build_app
from hexad.application.api.auth import OPEN_PATHS, Keys
from hexad.cli.settings import load_settings
from hexad.common.errors import ConfigError

KEY = "sk-a-key-that-nobody-guesses"
SOURCES = sorted(Path(hexad.__file__).parent.rglob("*.py"))


@pytest.fixture(scope="module")
def locked(tiny: Path) -> Iterator[Watched]:
    with served(tiny, "--api-key", KEY, "--log-level", "error") as process:
        yield Watched(process.url, process.process.pid)


def tricks(path: str) -> list[str]:
    """`path` as servers have been fooled with it."""
    plain = path.replace("{model_id:path}", "tiny")
    first, _, rest = plain[1:].partition("/")
    return [
        plain, plain + "/", "/" + plain, "//" + plain, "/." + plain, f"/x/..{plain}", f"/health/..{plain}", f"/health/%2e%2e{plain}",
        f"/health;{plain}", f"/health%2f..{plain}", f"/health?x={plain}", f"/%{ord(plain[1]):02x}{plain[2:]}", plain.upper(),
        f"/{first}%2f{rest}",
        f"{plain}?api_key={KEY}", f"{plain}?key={KEY}&access_token={KEY}", f"http://x{plain}", f"http://x/health@x{plain}",
        f"{plain}%00", f"{plain}#/health", f"{plain}/../../health", f"/health{plain}", f"/ping{plain}", f"\\health{plain}",
    ]  # fmt: skip


async def answers(server: Watched, requests: list[tuple[str, bytes, bool]]) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    source = iter(requests)

    async def work() -> None:
        for name, data, head in source:
            connection = Connection(server.url)
            found[name] = await connection.send([data], head=head)
            await connection.close()

    await asyncio.gather(*(work() for _ in range(12)))
    return found


async def test_b54_every_route_and_every_trick(locked: Watched) -> None:
    app = build_app(make_state(StubEngine()))
    elsewhere = ["/v1/embeddings", "/invocations", "/v2/embed", "/rerank", "/pooling", "/openapi.json"]
    paths = [*sorted({route.path for route in app.routes}), *elsewhere]
    assert len(paths) > 15
    requests = []
    for target in {target for path in paths for target in tricks(path)}:
        for method in ("GET", "HEAD", "OPTIONS", "POST", "DELETE"):
            version = "1.0" if method == "DELETE" else "1.1"
            request = get(target, "Connection: close", "Content-Length: 2", method=method, version=version) + b"{}"
            requests.append((f"{method} {target}", request, method == "HEAD"))
    found = await answers(locked, requests)
    assert len(found) > 2_000
    let_in = {name for name, answer in found.items() if answer.status not in (400, 401, 0)}
    outside = {name for name in let_in if not _is_open(name.split(" ")[1])}
    assert outside == set()
    assert any(found[f"GET {path}"].status == 200 for path in OPEN_PATHS)
    assert sum(answer.status == 401 for answer in found.values()) > 1_500
    for name, answer in found.items():
        assert KEY.encode() not in answer.body, name


def _is_open(target: str) -> bool:
    """Whether the router sees an open path: without query and fragment, unquoted; of a full URL the path."""
    return unquote(target.partition("?")[0].partition("#")[0].removeprefix("http://x")) in OPEN_PATHS


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("Authorization:",),
        ("Authorization: Bearer",),
        ("Authorization: Bearer ",),
        (f"Authorization: Bearer {KEY}x",),
        (f"Authorization: Bearer {KEY[:-1]}",),
        (f"Authorization: Bearer {KEY.upper()}",),
        (f"Authorization: Basic {KEY}",),
        (f"Authorization: Token {KEY}",),
        (f"Authorization: {KEY}",),
        (f"Authorization: Bearer {KEY}, Bearer {KEY}",),
        (f"Authorization: Bearer {KEY}", "Authorization: Bearer x"),
        ("Authorization: Bearer x", f"Authorization: Bearer {KEY}"),
        (f"Authorization: Bearer {KEY}é",),
        (f"X-Api-Key: {KEY}x",),
        (f"Cookie: api_key={KEY}",),
        (f"X-Forwarded-Authorization: Bearer {KEY}",),
        ("X-Original-URL: /health",),
        ("X-HTTP-Method-Override: OPTIONS",),
        ("X-Forwarded-For: 127.0.0.1",),
    ],
)
async def test_b54_header_tricks(locked: Watched, headers: tuple[str, ...]) -> None:
    answer = await locked.ask(get("/v1/models", "Connection: close", *headers))
    assert answer.status == 401, headers
    assert answer.error()["code"] == "invalid_api_key"


async def test_b54_the_right_key_opens(locked: Watched) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert (await locked.ask(get("/v1/models", f"Authorization: {scheme} {KEY}"))).status == 200


async def test_b54_refused_bodies_are_not_read(locked: Watched) -> None:
    """Without a key nothing is parsed: the answer comes before the body."""
    connection = Connection(locked.url)
    answer = await connection.send([b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n"])
    assert answer.status == 401
    connection.abort()


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look-up compares its digest with every configured one; nothing else compares."""
    keys, calls = Keys(["a", "bb", "ccc"]), []
    whole = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        calls.append((len(a), len(b)))
        return whole(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for key in (b"a", b"bb", b"ccc", b"", b"wrong", b"a" * 10_000):
        calls.clear()
        keys.tenant(key)
        assert calls == [(32, 32)] * 3
    tree = ast.parse((Path(hexad.__file__).parent / "application" / "api" / "auth.py").read_text())
    tenant = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "tenant")
    compared = [op for node in ast.walk(tenant) if isinstance(node, ast.Compare) for op in node.ops]
    assert all(isinstance(op, ast.Is | ast.IsNot) for op in compared)


# Code and objects from outside.

FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib",
    "torch.load", "torch.jit.load", "torch.package", "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "os.system", "os.popen", "shell=True", "allow_pickle=True", "trust_remote_code=True", "weights_only=False",
    "jinja2.Environment", "jinja2.Template",
}  # fmt: skip
ALLOWED: dict[tuple[str, str], str] = {}  # (file, name) -> why it is safe


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def dangers(tree: ast.AST) -> set[str]:
    """Which of `FORBIDDEN` a module uses."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found.add(_name(node.func))
            found |= {f"{word.arg}={word.value.value}" for word in node.keywords if isinstance(word.value, ast.Constant)}
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module.partition(".")[0], *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & FORBIDDEN


def test_no_pickle_no_eval_no_torch_load() -> None:
    assert len(SOURCES) > 150
    root = Path(hexad.__file__).parent
    used = {(str(path.relative_to(root)), name) for path in SOURCES for name in dangers(ast.parse(path.read_text()))}
    assert used == set(ALLOWED), "new uses need a reason in ALLOWED; reasons without a use must go"
    for code in (
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "torch.load(p)",
        "np.load(p, allow_pickle=True)",
        "run(c, shell=True)",
    ):
        assert dangers(ast.parse(code)), code


@pytest.mark.parametrize("text", ["", " ", ",", '""', '[""]', "[]"])
def test_b54_a_key_that_is_set_but_empty_opens_nothing(text: str, tmp_path: Path) -> None:
    """A variable that a deployment forgot to fill: the server must not start without keys. Only an empty list says that none is wanted."""
    (tmp_path / "c.yaml").write_text(f"server:\n  api_key: {json.dumps(text)}\n")
    for file, env in ((None, {"HEXAD_SERVER__API_KEY": text}), (str(tmp_path / "c.yaml"), {})):
        try:
            keys = Keys(load_settings({}, file, env).config.server.api_key)
        except ConfigError:
            continue
        assert bool(keys) == (text != "[]"), "the doors are open"
