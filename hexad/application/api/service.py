"""The life of a server process: start the engine, listen, drain on a signal, end. One call, `Service.run`.

- Before the model is up, a signal ends everything at once.
- The first SIGTERM or SIGINT: readiness says 503 and new requests are refused at once; those inside may finish within
  `shutdown_timeout_s`; the rest get an error event; exit code 0. The listener stays open meanwhile, so that refusals are answers.
- The second one ends those inside now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Generator
from importlib.util import find_spec
from typing import Any, TypeVar

import uvicorn

from hexad.application.api.app import build_app
from hexad.application.api.auth import Keys
from hexad.application.api.front_ends import FrontEnds, more_sockets
from hexad.application.api.protocol import guarded
from hexad.application.api.startup import Opened, allow_many_connections
from hexad.application.api.state import ServerState
from hexad.common.config import HexadConfig, ServerConfig
from hexad.common.errors import ConfigError, StartupError

T = TypeVar("T")
log = logging.getLogger("hexad.server")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_WORDS_S = 1.5  # after a kill: time for error events to be written
KEEP_ALIVE_S = 75
BACKLOG = 2_048
MAX_API_SERVERS = 64


class Server(uvicorn.Server):
    """uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Service:
    """One server. `open_server` starts the engine; `on_listening` is told the address."""

    def __init__(
        self,
        config: HexadConfig,
        open_server: Callable[[], Coroutine[Any, Any, Opened]],
        on_listening: Callable[[Opened, str], None] = lambda opened, url: None,
        sock: socket.socket | None = None,
    ) -> None:
        """`sock`: one that is bound already; else the configured address is bound."""
        self._sock = sock
        self._config = config
        self._open_server = open_server
        self._on_listening = on_listening
        self._signals = 0
        self._asked = asyncio.Event()
        self._forced = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal (exit code 0), or until the engine cannot be kept alive (1).

        Raises:
            StartupError: the address is taken, or the engine cannot start.
        """
        allow_many_connections()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            with self._sock or bind(self._config.server) as sock:
                opened = await self._or_signal(self._open_server())
                if opened is None:
                    return 0
                try:
                    serve = self._serve if self._config.server.api_server_count == 1 else self._serve_many
                    return await serve(opened, sock)
                finally:
                    await opened.close()
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self._signals += 1
        self._asked.set()
        if self._signals > 1:
            self._forced.set()

    async def _or_signal(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None when a signal came first (then `work` was cancelled)."""
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            return None
        finally:
            for waiting in (task, asked):
                waiting.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    async def _serve(self, opened: Opened, sock: socket.socket) -> int:
        listen(sock, self._config.server)
        server = Server(uvicorn_config(opened.state, self._config.server))
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        sharing = asyncio.ensure_future(shared.keep_writing(opened.state.metrics)) if (shared := opened.state.shared_metrics) else None
        asked = asyncio.ensure_future(self._asked.wait())
        lost = asyncio.ensure_future(opened.engine.gave_up.wait())
        try:
            while not server.started and not serving.done():
                await asyncio.sleep(0.005)
            self._on_listening(opened, url_of(sock, self._config.server))
            await asyncio.wait({serving, asked, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await self._drain(opened.state)
            return 1 if lost.done() else 0
        finally:
            asked.cancel()
            lost.cancel()
            server.should_exit = True
            await serving
            if sharing is not None:
                sharing.cancel()
                await asyncio.gather(sharing, return_exceptions=True)

    async def _serve_many(self, opened: Opened, sock: socket.socket) -> int:
        """Several API processes serve; this one looks after them and the engine."""
        server = self._config.server
        front_ends = FrontEnds(opened.state.config, more_sockets(sock, server.api_server_count, BACKLOG), opened.engine.address)
        opened.engine.on_restart = lambda client: front_ends.use(client.address)
        try:
            if await self._or_signal(front_ends.start()) is None:
                return 0
            self._on_listening(opened, url_of(sock, server))
            ends = [asyncio.ensure_future(e.wait()) for e in (self._asked, opened.engine.gave_up, front_ends.failed)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            await front_ends.end(server.shutdown_timeout_s, self._forced)
            return 1 if opened.engine.gave_up.is_set() or front_ends.failed.is_set() else 0
        finally:
            await front_ends.close()

    async def _drain(self, state: ServerState) -> None:
        admission, timeout_s = state.admission, self._config.server.shutdown_timeout_s
        admission.draining = True
        log.info("shutting down: %d requests may finish within %g s", admission.in_flight, timeout_s)
        drained = asyncio.ensure_future(admission.drain(timeout_s))
        forced = asyncio.ensure_future(self._forced.wait())
        await asyncio.wait({drained, forced}, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (drained, forced):
            waiting.cancel()
        if admission.in_flight:
            log.warning("shutting down: %d requests did not finish and get an error", admission.in_flight)
            admission.kill()
            await admission.drain(LAST_WORDS_S)


def uvicorn_config(state: ServerState, server: ServerConfig) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # a line for each malformed request would let anyone fill the disk
    return uvicorn.Config(
        build_app(state),
        http=guarded(server.read_timeout_s, server.write_timeout_s),  # type: ignore[arg-type]
        ws=_sockets(server),  # type: ignore[arg-type]
        ws_max_size=server.max_body_bytes,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        ssl_certfile=server.ssl_certfile,
        ssl_keyfile=server.ssl_keyfile,
        ssl_ca_certs=server.ssl_ca_certs,
        ssl_cert_reqs=_callers_certificates(server),
    )


def _sockets(server: ServerConfig) -> Any:
    """The WebSocket protocol; none where the package websockets is missing."""
    if not find_spec("websockets"):
        return "none"
    from hexad.application.api.socket_protocol import guarded_socket

    return guarded_socket(server.write_timeout_s)


def bind(server: ServerConfig) -> socket.socket:
    """A bound socket that does not listen yet. What is wrong on the HTTP side is known before the model is loaded.

    Raises:
        StartupError: the address cannot be had, or a key or certificate is no good.
    """
    Keys(server.api_key)
    _check_certificate(server)
    if server.api_server_count > MAX_API_SERVERS:
        raise ConfigError(f"server.api_server_count = {server.api_server_count}: use at most {MAX_API_SERVERS}, about one a core")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"server.host = {server.host!r}: no such address here ({error.strerror})") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        if server.api_server_count > 1:
            sock = _shareable(sock)  # only now: a port that is shared from the start could be another server's
    except OSError as error:
        sock.close()
        raise StartupError(
            f"cannot listen on {server.host} port {server.port} ({error.strerror}): use another --port, 0 picks one"
        ) from None
    return sock


def _shareable(sock: socket.socket) -> socket.socket:
    """A socket bound to the address of `sock`, which is closed, that others of ours may bind too."""
    address = sock.getsockname()
    another = socket.socket(sock.family, sock.type, sock.proto)
    sock.close()
    another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    another.bind(address)
    return another


def listen(sock: socket.socket, server: ServerConfig) -> None:
    """Start to listen. A bound port is not reserved yet: another process may have been quicker.

    Raises:
        StartupError: it was.
    """
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(server, error) from None


def _cannot_listen(server: ServerConfig, error: OSError) -> StartupError:
    where = f"{server.host} port {server.port}"
    return StartupError(f"cannot listen on {where} ({error.strerror}): use another --port, 0 picks one")


def _callers_certificates(server: ServerConfig) -> ssl.VerifyMode:
    wanted = server.ssl_cert_reqs
    return ssl.VerifyMode(wanted if wanted is not None else 2 if server.ssl_ca_certs else 0)


def _check_certificate(server: ServerConfig) -> None:
    """Raises ConfigError: keys, certificates and authorities cannot be used as they are given."""
    if bool(server.ssl_certfile) != bool(server.ssl_keyfile):
        raise ConfigError("server.ssl_certfile and server.ssl_keyfile belong together: give both")
    if _callers_certificates(server) and not server.ssl_ca_certs:
        raise ConfigError(f"server.ssl_cert_reqs = {server.ssl_cert_reqs}: it needs --ssl-ca-certs, the authorities to trust")
    if server.ssl_ca_certs and not server.ssl_certfile:
        raise ConfigError("server.ssl_ca_certs: callers' certificates need TLS: give --ssl-certfile and --ssl-keyfile, too")
    if not server.ssl_certfile:
        return

    def encrypted() -> str:  # without it, a question on the terminal
        raise ConfigError(f"server.ssl_keyfile = {server.ssl_keyfile!r} is encrypted: give one that is not (openssl pkey)")

    context, what = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), f"server.ssl_certfile = {server.ssl_certfile!r}"
    what += f" with server.ssl_keyfile = {server.ssl_keyfile!r}"
    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, encrypted)
        if server.ssl_ca_certs:
            what = f"server.ssl_ca_certs = {server.ssl_ca_certs!r}"
            context.load_verify_locations(server.ssl_ca_certs)
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror or error}") from None


def url_of(sock: socket.socket, server: ServerConfig) -> str:
    """The address as a client on this machine would write it."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if server.ssl_certfile else 'http'}://{host}:{port}"
