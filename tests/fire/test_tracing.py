"""OpenTelemetry: one span a request with the caller's as its parent, the phases inside it, nothing when it is off."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from api_stub import StubEngine, serving
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tiny_model import served

from hexad.application.api.tracing import Tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def finished(exporter: InMemorySpanExporter, count: int) -> tuple[Any, ...]:
    """Its spans, once there are `count`: the last one ends just after the answer has been read."""
    end_s = time.monotonic() + 5
    while len(exporter.get_finished_spans()) < count and time.monotonic() < end_s:
        time.sleep(0.01)
    return exporter.get_finished_spans()


@pytest.mark.parametrize("stream", [False, True])
def test_spans_of_a_request(stream: bool) -> None:
    exporter, engine = InMemorySpanExporter(), StubEngine()
    engine.first_delay_s, engine.delay_s = 0.05, 0.01
    with serving(engine, tracing=Tracing(exporter, at_once=True)) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = httpx.post(server.url + "/v1/chat/completions", json={**CHAT, "stream": stream, "n": 2}, headers=headers)
        assert answer.status_code == 200
        httpx.get(server.url + "/health")
        spans = {span.name: span for span in finished(exporter, 4)}
    whole = spans.pop("POST /v1/chat/completions")
    assert whole.context.trace_id == int(TRACE, 16)
    assert whole.parent.span_id == int(PARENT, 16)
    assert answer.headers["traceparent"] == f"00-{TRACE}-{whole.context.span_id:016x}-01"
    said = dict(whole.attributes)
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.response.model"] == "m"
    assert said["gen_ai.usage.output_tokens"] == 10
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    assert said["http.response.status_code"] == 200
    assert set(spans) == {"queue", "prefill", "decode"}
    for span in spans.values():
        assert span.parent.span_id == whole.context.span_id
        assert span.start_time <= span.end_time
        assert whole.start_time - 20_000_000 <= span.start_time  # two clocks
    assert spans["queue"].end_time <= spans["prefill"].end_time <= spans["decode"].end_time
    assert "hi" not in str(said.values())


@pytest.mark.parametrize("value", ["", "x", "00-0-0-00", f"ff-{TRACE}-{PARENT}-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é" * 300])
def test_malformed_parents_start_a_new_trace(value: str) -> None:
    exporter = InMemorySpanExporter()
    with serving(tracing=Tracing(exporter, at_once=True)) as server:
        headers: Any = [(b"traceparent", value.encode("latin-1", "replace"))]
        assert httpx.post(server.url + "/v1/chat/completions", json={**CHAT, "temperature": -1}, headers=headers).status_code == 400
        (span,) = finished(exporter, 1)
    assert span.parent is None
    assert span.attributes["error.type"] == "invalid_value"
    assert span.attributes["http.response.status_code"] == 400


def test_spans_reach_a_collector(tiny: Path) -> None:
    bodies: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
    with served(tiny, "--otlp-traces-endpoint", endpoint, "--log-level", "error") as process:
        assert httpx.post(process.url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=20).status_code == 200
        assert process.end() == 0
    collector.shutdown()
    assert {path for path, _ in bodies} == {"/v1/traces"}
    assert b"gen_ai.usage.input_tokens" in b"".join(body for _, body in bodies)


def test_a_collector_that_is_not_there_harms_nobody(tiny: Path) -> None:
    with served(tiny, "--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces", "--log-level", "error") as process:
        for _ in range(5):
            assert httpx.post(process.url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=20).status_code == 200
        assert process.end(20) == 0


def test_off_means_not_imported() -> None:
    code = "import sys, hexad.application.api.service, hexad.application.api.startup; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
