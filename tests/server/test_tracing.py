"""Traces, as a collector gets them over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from hardpoint.cli import main
from hardpoint.server.tracing import Tracing
from tests.server.conftest import Running, serving
from tests.server.test_robust import until

SECRET = "a secret of the prompt"


class Collector:
    """Takes what is sent to it, or refuses it with a status."""

    def __init__(self, status: int = 200) -> None:
        self.received: list[ExportTraceServiceRequest] = []
        self.paths: set[str] = set()
        self.arrived = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.received.append(ExportTraceServiceRequest.FromString(body))
                outer.paths.add(self.path)
                outer.arrived.set()
                self.send_response(status)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,)).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def spans(self) -> list[Any]:
        """All spans, in the order in which they ended."""
        return [
            s
            for request in self.received
            for r in request.resource_spans
            for scope in r.scope_spans
            for s in scope.spans
        ]


def attributes(told: Any) -> dict[str, Any]:
    """Return attributes as a dictionary."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {one.key: plain(one.value) for one in told.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def traced(device: str, collector: Collector) -> Iterator[Running]:
    """A server of the simulated device that sends its traces soon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        tracing = Tracing(collector.url)
    with serving(settings={"backend": device}, tracing=tracing) as running:
        yield running
    tracing.close()


@pytest.fixture
def spans(traced: Running, collector: Collector) -> Iterator[Any]:
    """Return a function that waits for a number of spans of this test and returns them."""
    collector.received.clear()

    def sent(count: int) -> list[Any]:
        until(lambda: len(collector.spans) >= count)
        return collector.spans

    yield sent
    assert SECRET.encode() not in b"".join(request.SerializeToString() for request in collector.received)


def test_a_request_is_a_span_below_its_clients(traced: Running, spans: Any, collector: Collector) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    answer = traced.users.post(
        "/v1/completions",
        json={"prompt": [SECRET, SECRET], "max_tokens": 5, "ignore_eos": True, "user": SECRET},
        headers={"traceparent": f"00-{trace}-{parent}-01", "X-Request-Id": "mine"},
    )
    usage = answer.json()["usage"]
    (span,) = spans(1)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, parent)
    assert span.name == "POST /v1/completions"
    told = attributes(span)
    assert 0 <= told.pop("gen_ai.latency.time_in_queue") < told.pop("gen_ai.latency.time_to_first_token") < 60
    assert told == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "hardpoint.request_id": "mine",
        "gen_ai.request.model": "demo",
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    assert collector.paths == {"/v1/traces"}
    resource = attributes(collector.received[0].resource_spans[0].resource)
    assert resource["service.name"] == "hardpoint"


def test_a_stream_lasts_to_its_end(traced: Running, spans: Any) -> None:
    message = [{"role": "user", "content": SECRET}]
    with traced.openai.chat.completions.create(model="demo", messages=message, max_tokens=8, stream=True) as stream:
        tokens = sum(1 for part in stream if part.choices and part.choices[0].delta.content)
    (span,) = spans(1)
    assert attributes(span)["gen_ai.usage.output_tokens"] >= tokens > 1
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["length"]
    # Steps of 10 ms each.
    assert span.end_time_unix_nano - span.start_time_unix_nano > 60e6


def test_refusals_say_their_status_and_the_kind_of_error(traced: Running, spans: Any) -> None:
    server = traced
    server.users.post("/v1/completions", json={"prompt": SECRET}, headers={"Authorization": "none"})
    server.users.post("/nowhere/at/all", json={})
    server.operators.post("/pause")
    server.users.post("/v1/completions", json={"prompt": SECRET})
    server.operators.post("/resume")
    server.users.get("/v1/models")
    stranger, lost, paused, asleep, resumed = spans(5)
    assert attributes(stranger)["http.response.status_code"] == 401
    # A path that there is not gives no name, of which there would be many.
    assert (lost.name, attributes(lost)["http.response.status_code"]) == ("POST", 404)
    assert (paused.name, resumed.name) == ("POST /pause", "POST /resume")
    assert attributes(asleep)["http.response.status_code"] == 503
    assert attributes(asleep)["error.type"] == "EngineAsleep"
    assert asleep.status.code == 2
    assert not asleep.status.message
    assert not asleep.events


def test_sleep_and_wake_have_a_span_with_their_phases(server: Running, collector: Collector) -> None:
    collector.received.clear()
    tracing = Tracing(collector.url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.model().metrics, "tracing", tracing)
        report = server.operators.post("/models/demo/sleep", json={"level": 1, "tier": "host"}).json()["result"]
        server.operators.post("/models/demo/sleep", json={"level": 1, "tier": "disk"})
        server.operators.post("/models/demo/wake")
    tracing.close()
    sleep, refused, wake = collector.spans
    told = attributes(sleep)
    assert (sleep.name, told["gen_ai.request.model"], told["hardpoint.level"]) == ("sleep", "demo", 1)
    assert told["hardpoint.tier"] == "host"
    assert told["hardpoint.bytes.unmapped"] == report["memory"]["unmapped"] > 0
    assert {event.name: attributes(event)["seconds"] for event in sleep.events} == report["memory"]["seconds"]
    assert (refused.status.code, attributes(refused)["error.type"]) == (2, "SleepRefused")
    assert (wake.name, attributes(wake)["hardpoint.changed"], wake.status.code) == ("wake", True, 0)
    assert "total" in {event.name for event in wake.events}


def test_an_operation_is_below_the_request_that_asked_for_it(traced: Running, spans: Any) -> None:
    traced.operators.post("/models/demo/sleep", json={"level": 0})
    traced.users.post(
        "/v1/completions", json={"prompt": SECRET, "max_tokens": 1}, headers={"X-When-Asleep": "wake"}
    ).raise_for_status()
    sleep, asked, wake, request = spans(4)
    assert (sleep.name, asked.name) == ("sleep", "POST /models/{name}/sleep")
    assert sleep.parent_span_id == asked.span_id
    assert (wake.name, request.name) == ("wake", "POST /v1/completions")
    assert (wake.parent_span_id, wake.trace_id) == (request.span_id, request.trace_id)


def test_a_collector_that_refuses_is_not_noticed_by_requests(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    refuses = Collector(status=503)
    tracing = Tracing(refuses.url)
    try:
        with serving(settings={"backend": device}, tracing=tracing) as running:
            for _ in range(3):
                assert running.users.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        # It is tried again for as long as a try may take; the end waits no longer.
        closing = threading.Thread(target=tracing.close)
        closing.start()
        assert refuses.arrived.wait(240)
        closing.join(240)
        assert not closing.is_alive()
    finally:
        refuses.close()


def test_an_address_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4317")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "demo", "--port", "0"])
    assert ended.value.code
    assert "'localhost:4317'" in capsys.readouterr().err
