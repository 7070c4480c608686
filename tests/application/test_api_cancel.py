"""A caller that goes away stops the work, in each window, also behind middleware; normal callers notice nothing."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from typing import Any

import httpx2 as httpx
import pytest
from api_stub import Running, StubEngine, fresh_seed, serving


def send(server: Running, **fields: Any) -> socket.socket:
    body = json.dumps({"model": "m", "prompt": "Write 2000 words", "max_tokens": 400, **fields}).encode()
    sock = socket.create_connection((server.host, server.port))
    sock.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    return sock


def wait_live(engine: StubEngine) -> None:
    end_s = time.monotonic() + 3
    while not engine.live and time.monotonic() < end_s:
        time.sleep(0.005)
    assert engine.live


@pytest.mark.parametrize("window", ["before the first token", "mid-stream", "not streamed"])
@pytest.mark.parametrize("fields", [{}, {"n": 4}, {"prompt": ["a", "b", "c"]}])
def test_b36_disconnect_aborts(window: str, fields: dict[str, Any]) -> None:
    engine = StubEngine()
    engine.first_delay_s = 5.0 if window == "before the first token" else 0.0
    engine.delay_s = 0.02
    with serving(engine) as server:
        sock = send(server, stream=window != "not streamed", **fields)
        wait_live(engine)
        if window == "mid-stream":
            assert b"200 OK" in sock.recv(65_536)
        else:
            time.sleep(0.05)
        sock.close()
        server.wait_idle(1.0)
        assert engine.aborted
        made = engine.made
        time.sleep(0.1)
        assert engine.made == made


@pytest.mark.parametrize("stream", [True, False])
def test_b36_half_closed_socket_counts_as_gone(stream: bool) -> None:
    engine = StubEngine()
    engine.delay_s = 0.02
    with serving(engine) as server:
        sock = send(server, stream=stream)
        wait_live(engine)
        sock.shutdown(socket.SHUT_WR)
        server.wait_idle(1.0)
        sock.close()


def test_b36_random_disconnects_beside_normal_callers() -> None:
    rng = random.Random(fresh_seed())
    engine = StubEngine(context=2048)
    engine.delay_s = 0.001
    with serving(engine, server__allowed_origins=["*"], server__api_key=["k"]) as server:
        answers: list[str] = []

        def normal() -> None:
            with httpx.Client(base_url=server.url, timeout=20, headers={"authorization": "Bearer k"}) as http:
                for _ in range(3):
                    answers.append(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 100}).json()["choices"][0]["text"])

        threads = [threading.Thread(target=normal) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            body = json.dumps({"prompt": "x", "max_tokens": 400, "stream": rng.random() < 0.5, "n": rng.choice([1, 3])}).encode()
            sock = socket.create_connection((server.host, server.port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall((head.encode() + body)[: rng.choice([len(body), 10_000])])
            time.sleep(rng.random() * 0.02)
            sock.close()
        for thread in threads:
            thread.join(20)
        server.wait_idle(2.0)
        assert len(answers) == 12
        assert len(set(answers)) == 1
        assert len(answers[0].encode()) >= 98


def test_b36_a_disconnect_is_counted_as_abort() -> None:
    engine = StubEngine()
    engine.delay_s = 0.02
    with serving(engine) as server:
        sock = send(server, stream=True)
        wait_live(engine)
        sock.close()
        server.wait_idle(1.0)
        text = httpx.get(server.url + "/metrics").text
        assert 'hexad:request_success_total{finished_reason="abort",model_name="m"} 1.0' in text
