"""OpenTelemetry traces (the extra `otel`): a span per HTTP request, and inside it the time in the queue, in prefill and in decode.

A caller's `traceparent` becomes the parent; ours goes back in the response. Names follow OpenTelemetry's conventions for generative AI.
The only module that knows OpenTelemetry; without `--otlp-traces-endpoint` it is never imported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from hexad.common.version import __version__

if TYPE_CHECKING:
    from hexad.application.api.generation import Run

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/messages": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion"}
FROM_RECORD = {  # key of the access record -> attribute
    "model": "gen_ai.response.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "error": "error.type",
}
EXPORT_TIMEOUT_S = 3.0  # also bounds how long a collector that is gone delays the end of the server
CARRIED = ("traceparent", "tracestate")


class Tracing:
    """Makes spans and hands them to an exporter in the background. Times come as seconds of the monotonic clock."""

    def __init__(self, exporter: SpanExporter, *, at_once: bool = False) -> None:
        """`at_once`: export each span when it ends, for tests. Sampling follows OTEL_TRACES_SAMPLER; the default takes all."""
        resource = Resource.create({SERVICE_NAME: "hexad", SERVICE_VERSION: __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(SimpleSpanProcessor(exporter) if at_once else BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("hexad")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """Send spans to an OTLP/HTTP endpoint, such as http://collector:4318/v1/traces."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))

    def begin(self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]]) -> Span:
        """The span of a request, below the caller's if it sent one."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name.decode("latin-1") in CARRIED}
        attributes = {"http.request.method": method, "url.path": path[:500]}
        if path in OPERATIONS:
            attributes |= {"gen_ai.operation.name": OPERATIONS[path], "gen_ai.provider.name": "hexad"}
        parent = self._propagator.extract(carrier)
        return self._tracer.start_span(f"{method} {path[:200]}", parent, SpanKind.SERVER, attributes=attributes)

    def header(self, span: Span) -> tuple[bytes, bytes]:
        """`traceparent` of the response."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return b"traceparent", carrier.get("traceparent", "").encode()

    def phases(self, span: Span, arrived_s: float, runs: Sequence[Run]) -> None:
        """Spans for queue, prefill and decode of each prompt, as far as it came."""
        offset_s = time.time() - time.monotonic()
        context = set_span_in_context(span)

        def child(name: str, start_s: float, end_s: float) -> None:
            made = self._tracer.start_span(name, context, start_time=int((start_s + offset_s) * 1e9))
            made.end(int((max(start_s, end_s) + offset_s) * 1e9))

        for run in runs:
            scheduled_s = arrived_s + (run.queued_s or 0.0)
            if run.queued_s is not None:
                child("queue", arrived_s, scheduled_s)
            if run.first_s is not None:
                child("prefill", scheduled_s, run.first_s)
                child("decode", run.first_s, run.last_s or run.first_s)
                span.set_attribute("gen_ai.server.time_to_first_token", run.first_s - arrived_s)

    def end(self, span: Span, status: int, record: Mapping[str, Any]) -> None:
        """The request has been answered."""
        span.set_attribute("http.response.status_code", status)
        for key, name in FROM_RECORD.items():
            if key in record:
                span.set_attribute(name, record[key])
        if record.get("finish_reason"):
            span.set_attribute("gen_ai.response.finish_reasons", str(record["finish_reason"]).split(","))
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
