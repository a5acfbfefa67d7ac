"""Traces for OpenTelemetry: a span for each request, and one for each sleep and wake. Nothing of a prompt or an answer is in them.

Imported where traces are asked for, since its packages are the extra `otel`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hardpoint import __version__
from hardpoint.engine.sleep import SleepReport, WakeReport


class Tracing:
    """Makes spans and hands them on, in the background; where they cannot be sent, requests do not notice.

    Names of attributes are OpenTelemetry's conventions for HTTP and generative models where they have one, times in seconds.

    Args:
        endpoint: base address of a collector that speaks OTLP over HTTP.
    """

    def __init__(self, endpoint: str) -> None:
        # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and OTEL_TRACES_SAMPLER are read by the library, and add to this or replace it.
        own = Resource({"service.name": "hardpoint", "service.version": __version__})
        given = Resource.create()
        if str(given.attributes["service.name"]).startswith("unknown_service"):
            given = Resource({name: value for name, value in given.attributes.items() if name != "service.name"})
        self._provider = TracerProvider(resource=own.merge(given), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("hardpoint", __version__)

    def close(self) -> None:
        """Send what is left; where the collector does not answer, within twice OTEL_EXPORTER_OTLP_TIMEOUT (10 s)."""
        self._provider.shutdown()

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return an application whose POST requests have a span each, below that of `traceparent` where the client sent one."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            parent = TraceContextTextMapPropagator().extract(headers)
            with self._tracer.start_as_current_span("POST", parent, SpanKind.SERVER, record_exception=False) as span:
                span.set_attribute("http.request.method", "POST")

                async def answer(message: Message) -> None:
                    if message["type"] == "http.response.start":
                        _note_answer(span, message)
                    await send(message)

                try:
                    await app(scope, receive, answer)
                finally:
                    if (route := getattr(scope.get("route"), "path", None)) is not None:
                        span.update_name(f"POST {route}")
                        span.set_attribute("http.route", route)

        return traced

    @staticmethod
    def note_generation(
        model: str,
        prompt_tokens: int,
        tokens: int,
        reasons: Sequence[str] = (),
        queue_seconds: float | None = None,
        first_token_seconds: float | None = None,
        error: Exception | None = None,
    ) -> None:
        """Write to the present request's span what was done for a prompt; of several prompts tokens add up, and the last times count."""
        span = trace.get_current_span()
        if not span.is_recording():
            return
        before = span.attributes
        span.set_attribute("gen_ai.request.model", model)
        for name, count in (("input", prompt_tokens), ("output", tokens)):
            key = f"gen_ai.usage.{name}_tokens"
            span.set_attribute(key, before.get(key, 0) + count)
        key = "gen_ai.response.finish_reasons"
        span.set_attribute(key, [*before.get(key, ()), *reasons])
        if queue_seconds is not None:
            span.set_attribute("gen_ai.latency.time_in_queue", queue_seconds)
        if first_token_seconds is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", first_token_seconds)
        if error is not None:
            _note_failure(span, error)

    @contextmanager
    def operation(self, model: str, kind: str) -> Iterator[None]:
        """The span of a sleep or wake, below that of the request that asked for it where one did."""
        # The library would record an exception's message and traceback, which may quote a request.
        quiet = {"record_exception": False, "set_status_on_exception": False}
        with self._tracer.start_as_current_span(kind, attributes={"gen_ai.request.model": model}, **quiet) as span:
            try:
                yield
            except Exception as error:
                _note_failure(span, error)
                raise

    @staticmethod
    def note_report(report: SleepReport | WakeReport) -> None:
        """Write to the present operation's span what it did: bytes and tags, and an event for each phase."""
        span = trace.get_current_span()
        span.set_attribute("hardpoint.changed", report.changed)
        span.set_attribute("hardpoint.tags", sorted(report.tags))
        if isinstance(report, SleepReport):
            span.set_attribute("hardpoint.level", report.level)
            if report.tier is not None:
                span.set_attribute("hardpoint.tier", report.tier.value)
        if report.memory is None:
            return
        for kind in ("preserved", "discarded", "skipped", "unmapped"):
            span.set_attribute(f"hardpoint.bytes.{kind}", getattr(report.memory, kind))
        for phase, spent in report.memory.seconds.items():
            span.add_event(phase, {"seconds": spent})


def _note_answer(span: Span, message: Message) -> None:
    span.set_attribute("http.response.status_code", message["status"])
    if message["status"] >= 500:
        span.set_status(Status(StatusCode.ERROR))
    for name, value in message["headers"]:
        if name == b"x-request-id":
            span.set_attribute("hardpoint.request_id", value.decode("latin-1"))


def _note_failure(span: Span, error: Exception) -> None:
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR))
