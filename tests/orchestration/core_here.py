"""A core loop with the fake device, served by a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hexad import compose
from hexad.common.clock import SystemClock
from hexad.common.config import HexadConfig
from hexad.common.params import SamplingParams
from hexad.engine.plan import TokenSegment
from hexad.orchestration import server as server_module
from hexad.orchestration.messages import Submit
from hexad.orchestration.server import EngineServer

CONFIG = HexadConfig.parse({"model": {"model": "fake"}, "device": {"device": "fake"}, "server": {"log_level": "error"}})


def request(request_id: str, max_tokens: int) -> Submit:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    return Submit(request_id=request_id, prompt=(TokenSegment((1, 2)),), params=params)


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


@contextmanager
def impatient_core(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, str]]:
    """(the core loop, its address); a front end may lag 50 messages behind."""
    monkeypatch.setattr(server_module, "SEND_QUEUE_FRAMES", 50)
    engine, address = compose.build(CONFIG), f"ipc://{folder}/core"
    server = EngineServer(engine.core, engine.welcome, address, SystemClock())
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield engine.core, address
    finally:
        server.stop.set()
        thread.join(5.0)
        server.close()
