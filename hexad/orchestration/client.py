"""A front end's connection to the engine process: submit requests, read their streams, abort them, know when the engine dies.

One callback serves all streams; a token costs a dictionary look-up and a deque append.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from hexad.common.config import HexadConfig
from hexad.common.errors import EngineDeadError, HexadError, StartupError
from hexad.common.wire import Codec
from hexad.orchestration.messages import PROTOCOL_VERSION, Abort, Call, CallResult, Hello, Outputs, Submit, ToClient, ToCore, Welcome
from hexad.orchestration.news_line import LineReader, connect_line
from hexad.orchestration.spawn import DEFAULT_COMMAND, EngineProcess, Progress
from hexad.orchestration.stream import RequestStream

log = logging.getLogger("hexad.client")

Stats = dict[str, float | int | str | None]
HANDSHAKE_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 300.0  # the core loop sends a heartbeat every second except inside one blocking step, which can be long on a CPU


class EngineClient:
    """One DEALER socket to one engine. Make it with `start` (spawns the engine) or `connect` (another process did). Event-loop bound."""

    welcome: Welcome
    config: HexadConfig | None  # the resolved tree, when this client spawned the engine
    notes: tuple[str, ...]  # how "auto" was decided, likewise

    def __init__(self, address: str, silence_timeout_s: float = SILENCE_TIMEOUT_S) -> None:
        """Connects; use `start` or `connect`, which also shake hands."""
        self.address = address
        self.config, self.notes = None, ()
        self.process: EngineProcess | None = None
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._identity = os.urandom(16)
        self._socket.setsockopt(zmq.IDENTITY, self._identity)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 60_000)  # a lost engine is dead to this client; -1 would drop its last messages
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._codec_out: Codec[ToCore] = Codec(ToCore)
        self._codec_in: Codec[ToClient] = Codec(ToClient)
        self._streams: dict[str, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[Stats]] = {}
        self._next_call = 0
        self._death: EngineDeadError | None = None
        self.lost: tuple[Submit, ...] = ()  # requests that were open when the engine died
        self._closed = False
        self._on_death: list[Callable[[EngineDeadError], None]] = []
        self._silence_timeout_s = silence_timeout_s
        self._heard_at = time.monotonic()
        self._num_frames = 0
        self._disconnected = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._line: LineReader | None = None  # where the news of each step comes in

    @classmethod
    async def start(
        cls,
        config: HexadConfig,
        *,
        command: Sequence[str] = DEFAULT_COMMAND,
        on_progress: Callable[[Progress], None] | None = None,
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
    ) -> EngineClient:
        """Spawn an engine process and return once it serves.

        Raises:
            StartupError: or the subclass that the engine raised; nothing is left behind.
        """
        process = EngineProcess(config, command)
        client: EngineClient | None = None
        try:
            ready = await process.wait_ready(on_progress, lambda: client._engine_gone() if client is not None else None)
            client = cls(process.address, silence_timeout_s)
            client.process = process
            client.config, client.notes = HexadConfig.parse(ready.config), ready.notes
            await client._shake_hands(client.config.fingerprint())
        except BaseException:
            if client is not None:
                await client.close(0.0)
            else:
                await process.close(0.0)
            raise
        return client

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        config_hash: str | None = None,
        timeout_s: float = HANDSHAKE_TIMEOUT_S,
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
    ) -> EngineClient:
        """Join an engine that already serves at `address`.

        Raises:
            StartupError: no answer, another protocol version, or another configuration than `config_hash`.
        """
        client = cls(address, silence_timeout_s)
        try:
            await client._shake_hands(config_hash, timeout_s)
        except BaseException:
            await client.close(0.0)
            raise
        return client

    async def _shake_hands(self, config_hash: str | None, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> None:
        line = connect_line(self.address, self._identity)
        if line is not None:
            self._line = LineReader(line, self._hear)
        self._send(Hello(protocol=PROTOCOL_VERSION))
        try:
            frame = await asyncio.wait_for(self._socket.recv(), timeout_s)
        except TimeoutError:
            raise StartupError(f"the engine at {self.address} did not answer in {timeout_s:g} s: is it running?") from None
        try:
            welcome = self._codec_in.decode(frame)
        except msgspec.DecodeError as error:
            raise StartupError(f"the engine at {self.address} answers in another protocol ({error}): restart both sides") from None
        assert isinstance(welcome, Welcome), f"first answer is {type(welcome).__name__}"
        if welcome.protocol != PROTOCOL_VERSION:
            raise StartupError(f"the engine speaks protocol {welcome.protocol}, this process {PROTOCOL_VERSION}: restart both")
        if config_hash is not None and welcome.config_hash != config_hash:
            raise StartupError(f"the engine runs configuration {welcome.config_hash}, this process {config_hash}: restart both")
        self.welcome = welcome
        self._tasks = [asyncio.create_task(work()) for work in (self._read, self._watch_connection, self._watch_silence)]

    # What callers use.

    @property
    def is_alive(self) -> bool:
        return self._death is None and not self._closed

    @property
    def num_streams(self) -> int:
        """Streams that wait for more outputs."""
        return len(self._streams)

    def on_death(self, callback: Callable[[EngineDeadError], None]) -> None:
        """Call `callback` once when the engine is lost (not when this client is closed)."""
        self._on_death.append(callback)

    def submit(self, submit: Submit) -> RequestStream:
        """Send a request; its stream gets every output, also a refusal. `request_id` must not be in use in this client.

        Raises:
            EngineDeadError: the engine is gone.
        """
        self._check_alive()
        assert submit.request_id not in self._streams, f"request id {submit.request_id} is in use"
        stream = RequestStream(submit.request_id, submit.params.n, self._abandon)
        stream.submit = submit
        self._streams[submit.request_id] = stream
        self._send(submit)
        return stream

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Stop a request, or one choice of it; the stream gets finish_reason "abort" for each live choice. Unknown ids are ignored."""
        if self.is_alive and request_id in self._streams:
            self._send(Abort((request_id,), choice))

    async def call(self, method: str, timeout_s: float = 30.0) -> Stats:
        """A utility call: "stats", "reset_prefix_cache", "ping", "drain".

        Raises:
            EngineDeadError: the engine is gone, or did not answer in time.
            HexadError: the engine refused the call.
        """
        self._check_alive()
        self._next_call += 1
        call_id = self._next_call
        future: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send(Call(call_id, method))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise EngineDeadError(f"the engine did not answer {method!r} in {timeout_s:g} s") from None
        finally:
            self._calls.pop(call_id, None)

    async def close(self, timeout_s: float = 10.0) -> int | None:
        """End the connection, and the engine if this client spawned it (killed after `timeout_s`). Open streams get one EngineDeadError.

        Returns the engine's exit code when this client spawned it. Idempotent.
        """
        if not self._closed:
            self._closed = True
            if self._death is None:
                self._send(Call(0, "goodbye"))
            self._fail_all(EngineDeadError("the engine was closed by its front end"))
            for task in self._tasks:
                task.cancel()
            for task in self._tasks:
                with contextlib.suppress(asyncio.CancelledError, zmq.ZMQError):
                    await task
            if self._line is not None:
                self._line.close()
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
            self._context.term()
        return await self.process.close(timeout_s) if self.process is not None else None

    # Inside.

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death.message, retry_after_s=self._death.retry_after_s)
        if self._closed:
            raise EngineDeadError("this client is closed", retry_after_s=5.0)

    def _send(self, message: ToCore) -> None:
        # Without a high-water mark the send completes at once: the future is already done.
        self._socket.send(self._codec_out.encode(message), zmq.NOBLOCK)

    def _abandon(self, request_id: str) -> None:
        """A stream was closed before its end: stop the work, ignore what still comes."""
        if self._streams.pop(request_id, None) is not None and self.is_alive:
            self._send(Abort((request_id,)))

    async def _read(self) -> None:
        while True:
            self._hear(await self._socket.recv())

    def _hear(self, frame: bytes | memoryview) -> None:
        self._heard_at = time.monotonic()
        self._num_frames += 1
        try:
            self._handle(self._codec_in.decode(frame))
        except Exception:  # a reader that dies would hang every stream
            log.exception("a message from the engine could not be handled")

    def _handle(self, message: ToClient) -> None:
        if isinstance(message, Outputs):
            streams = self._streams
            for output in message.items:
                stream = streams.get(output.request_id)
                if stream is not None and stream.feed(output):
                    del streams[output.request_id]
        elif isinstance(message, CallResult):
            future = self._calls.get(message.call_id)
            if future is not None and not future.done():
                if message.error is None:
                    future.set_result(message.value)
                else:
                    future.set_exception(HexadError(message.error))

    async def _watch_connection(self) -> None:
        await recv_monitor_message(self._monitor)
        self._disconnected.set()
        if self.process is None:  # a spawned engine reports its end, with the exit code, through the status pipe
            await self._read_the_rest()
            self._die("the connection to the engine process was lost")

    async def _watch_silence(self) -> None:
        while self._death is None:
            pause_s, asleep_at = min(1.0, self._silence_timeout_s / 4), time.monotonic()
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            if now - asleep_at > 2 * pause_s + 1:
                continue  # it is we who were stopped: what has come meanwhile is not read yet
            self._check_silence("core loop", now - self._heard_at, self._silence_timeout_s)
            if self.process is not None and self.config is not None:
                self._check_silence("process", now - self.process.heard_s, self.config.server.engine_timeout_s)

    def _check_silence(self, what: str, silent_s: float, limit_s: float) -> None:
        if silent_s > limit_s:
            self._die(f"the engine {what} has been silent for {silent_s:.0f} s (limit {limit_s:g} s)")

    def _engine_gone(self) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._report_exit()))

    async def _report_exit(self) -> None:
        """The process ended: its last words come first, and the exit code is known a moment later."""
        assert self.process is not None
        await self._read_the_rest()
        for _ in range(100):
            if self.process.exit_code is not None:
                break
            await asyncio.sleep(0.01)
        self._die(f"the engine process ended (exit code {self.process.exit_code})")

    async def _read_the_rest(self) -> None:
        """Wait until the reader has taken in all that the engine sent before it went."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._disconnected.wait(), 2.0)
        heard = -1
        while heard != self._num_frames:
            heard = self._num_frames
            await asyncio.sleep(0.02)

    def _die(self, reason: str) -> None:
        if self._death is not None or self._closed:
            return
        self._death = EngineDeadError(reason, retry_after_s=5.0)
        log.error("%s; %d open requests fail", reason, len(self._streams))
        self.lost = tuple(stream.submit for stream in self._streams.values() if stream.submit is not None)
        self._fail_all(self._death)
        for callback in self._on_death:
            callback(self._death)

    def _fail_all(self, error: EngineDeadError) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDeadError(error.message, retry_after_s=error.retry_after_s))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(error.message))
