"""What a server does when clients leave, come too many or too slowly, and when its engine sleeps or dies."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hardpoint.engine.async_llm import AsyncLLM
from hardpoint.interfaces.errors import DriverError
from hardpoint.server import connections
from hardpoint.server.run import HardpointServer, ServerSettings, serve
from tests.server.conftest import KEY, Running

LONG: Any = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 100, "extra_body": {"ignore_eos": True}}


def until(holds: Callable[[], bool], seconds: float = 120) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to hold"
        time.sleep(0.01)


def running(server: Running) -> int:
    return int(server.call(server.model().llm.stats()).running)


def ended(server: Running, reason: str) -> float:
    """Return how many requests the server counts that ended for a reason."""
    name = f'hardpoint:request_success_total{{finished_reason="{reason}",model_name="demo"}} '
    lines = server.users.get("/metrics").text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_its_request_along(slow_server: Running, stream: bool) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": stream, "n": 2}
    before = ended(slow_server, "abort")
    if stream:
        with slow_server.users.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            slow_server.users.post("/v1/completions", json=body, timeout=0.5)
    until(lambda: running(slow_server) == 0 and slow_server.model().in_progress == 0)
    assert ended(slow_server, "abort") == before + 2


def test_a_request_that_ends_before_its_first_token_has_no_time_of_it(start: Any, device: str) -> None:
    with start(settings={"backend": device, "max_num_seqs": 1}) as server, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}
        asked = [pool.submit(server.users.post, "/v1/completions", json=body)]
        until(lambda: server.call(server.model().llm.stats()).sampled_tokens > 0)
        asked.append(pool.submit(server.users.post, "/v1/completions", json=body | {"stream": True}))
        until(lambda: server.call(server.model().llm.stats()).waiting == 1)
        server.operators.post("/models/demo/pause", json={"mode": "abort"}).raise_for_status()
        assert [one.result().status_code for one in asked] == [200, 200]
        assert ended(server, "abort") == 2
        shown = server.users.get("/metrics").text
        for name in ("time_to_first_token_seconds", "request_queue_time_seconds"):
            assert f'hardpoint:{name}_count{{model_name="demo"}} 1.0' in shown
        assert 'hardpoint:e2e_request_latency_seconds_count{model_name="demo"} 2.0' in shown


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_beam_search_that_is_aborted_says_so(server: Running, path: str, stream: bool) -> None:
    prompt: Any = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    body = prompt | {"max_tokens": 900, "n": 2, "use_beam_search": True, "ignore_eos": True, "stream": stream}
    before = ended(server, "abort")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.users.post, f"/v1/{path}", json=body)
        until(lambda: running(server) > 0)
        server.operators.post("/sleep", params={"level": "0"}).raise_for_status()
        answer = asked.result()
    server.operators.post("/resume").raise_for_status()
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    parts = events if stream else [answer.json()]
    reasons = [one["finish_reason"] for part in parts for one in part["choices"] if one["finish_reason"] is not None]
    assert reasons == ["abort", "abort"]
    assert ended(server, "abort") == before + 2


@pytest.mark.parametrize(
    ("path", "body"),
    [("v1/embeddings", {"input": ["a " * 900] * 64}), ("score", {"text_1": "a", "text_2": ["b " * 900] * 64})],
)
def test_an_answer_without_a_finish_reason_is_refused_where_it_is_aborted(
    slow_server: Running, path: str, body: Any
) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(slow_server.users.post, f"/{path}", json=body)
        until(lambda: running(slow_server) > 0)
        slow_server.operators.post("/sleep", params={"level": "0"}).raise_for_status()
        answer = asked.result()
    slow_server.operators.post("/resume").raise_for_status()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "request_aborted")
    assert answer.headers["Retry-After"] == "5"


def test_too_many_requests_are_told_when_to_come_back(start_slow: Any) -> None:
    with start_slow(max_requests=2) as server, ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(server.openai.completions.create, **LONG) for _ in range(2)]
        until(lambda: server.model().in_progress == 2)
        with pytest.raises(openai.RateLimitError) as refused:
            server.openai.completions.create(model="demo", prompt="x")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            server.openai.completions.create(model="demo", prompt=["x"] * 2)
        with pytest.raises(openai.BadRequestError, match="3 prompts in one request"):
            server.openai.completions.create(model="demo", prompt=["x"] * 3)
        assert [len(one.result().choices) for one in busy] == [1, 1]
        assert 'hardpoint:requests_refused_total{model_name="demo"} 2.0' in server.users.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request(slow_server: Running, stream: bool) -> None:
    before = ended(slow_server, "abort")
    with pytest.raises((openai.APIStatusError, openai.APIError)) as late:
        for _ in slow_server.openai.completions.create(
            stream=stream, extra_headers={"X-Request-Timeout": "0.3"}, **LONG
        ):
            pass
    assert "0.3 s" in str(late.value)
    until(lambda: running(slow_server) == 0)
    until(lambda: ended(slow_server, "abort") == before + 1)
    bad = slow_server.users.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Timeout": "soon"})
    assert bad.status_code == 400


def test_bodies_have_limits(slow_server: Running) -> None:
    assert slow_server.users.post("/v1/completions", content=b"x" * (33 << 20)).status_code == 413
    host, port = slow_server.server.url.removeprefix("http://").split(":")
    chunk = b"%x\r\n%s\r\n" % (1 << 20, b"x" * (1 << 20))
    with socket.create_connection((host, int(port)), timeout=240) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" % KEY.encode()
        )
        try:
            for _ in range(40):
                raw.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert b" 413 " in raw.recv(1000).split(b"\r\n")[0]


def test_requests_while_the_model_sleeps(server: Running) -> None:
    def ask(policy: str, **more: Any) -> httpx.Response:
        return server.users.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers={"X-When-Asleep": policy} | more
        )

    slept = server.operators.post("/models/demo/sleep", json={"level": 1}).json()
    assert slept["state"] == "succeeded"
    assert slept["result"]["changed"] is True
    again = server.operators.post("/sleep").json()
    assert again["result"]["changed"] is False
    embedding = server.users.post("/v1/embeddings", json={"input": ["x", "y"]})
    for refused in (ask("reject"), embedding):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_asleep")
    assert "retry-after" in refused.headers
    late = ask("queue", **{"X-Request-Timeout": "0.2"})
    assert (late.status_code, late.json()["error"]["code"]) == (408, "request_timeout")
    assert ask("never").status_code == 400
    with ThreadPoolExecutor(4) as pool:
        queued = [pool.submit(ask, "queue") for _ in range(3)]
        time.sleep(0.3)
        assert not any(one.done() for one in queued)
        assert server.operators.post("/wake_up").json()["result"]["state"] == "running"
        assert [one.result().status_code for one in queued] == [200] * 3
    server.operators.post("/sleep", params={"level": "1"})
    with ThreadPoolExecutor(4) as pool:
        woken = [pool.submit(ask, "wake") for _ in range(4)]
        assert [one.result().status_code for one in woken] == [200] * 4
    assert server.operators.get("/is_sleeping").json() == {"is_sleeping": False}


def test_a_request_waits_quietly_for_a_model_on_its_way_to_sleep(
    slow_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, tried = slow_server.model().llm, []

    def generate(*given: Any, **named: Any) -> Any:
        tried.append(given)
        return AsyncLLM.generate(llm, *given, **named)

    with ThreadPoolExecutor(3) as pool:
        pool.submit(slow_server.openai.completions.create, **LONG)
        until(lambda: running(slow_server) == 1)
        monkeypatch.setattr(llm, "generate", generate)
        slept = pool.submit(slow_server.operators.post, "/models/demo/sleep", json={"level": 0, "mode": "wait"})
        until(lambda: slow_server.operators.get("/models/demo").json()["state"] == "draining")
        body = {"prompt": "x", "max_tokens": 2}
        waits = pool.submit(slow_server.users.post, "/v1/completions", json=body, headers={"X-When-Asleep": "queue"})
        assert slept.result().json()["state"] == "succeeded"
        assert not waits.done()
        slow_server.operators.post("/resume")
        assert waits.result().status_code == 200
    assert len(tried) <= 3


def test_an_idle_model_sleeps_and_a_request_wakes_it(start: Any, shallow: str) -> None:
    with start({"demo": shallow}, idle_sleep=0.1) as server:

        def sleeps() -> bool:
            return bool(server.operators.get("/is_sleeping").json()["is_sleeping"])

        expected = server.openai.completions.create(model="demo", prompt="x", max_tokens=8, temperature=0)
        for _ in range(3):
            until(sleeps)
            woken = server.openai.completions.create(model="demo", prompt="x", max_tokens=8, temperature=0)
            assert woken.choices[0].text == expected.choices[0].text
        # One that takes longer than that is not slept upon.
        answer = server.openai.completions.create(**LONG)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 100
        until(sleeps)
        assert server.users.get("/ready").status_code == 200


def test_changes_that_nobody_asked_for_are_counted_where_they_fail(
    slow_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleep of an idle model, or of one that makes room for another, and the wake for a request."""
    model = slow_server.model()

    def failures() -> dict[str, float]:
        lines = slow_server.operators.get("/metrics").text.splitlines()
        found = [line.rsplit(" ", 1) for line in lines if line.startswith("hardpoint:sleep_failures_total")]
        return {name: float(value) for name, value in found if 'error="DriverError"' in name}

    async def fails(*_: Any, **__: Any) -> Any:
        raise DriverError("unmap", 5, "stuck")

    before = failures()
    with monkeypatch.context() as patch:
        patch.setattr(model.llm, "sleep", fails)
        patch.setattr(model, "device_bytes", 1)
        with pytest.raises(DriverError):
            slow_server.call(model.make_way("idle"))
    assert slow_server.operators.post("/sleep", params={"level": "0"}).status_code == 200
    with monkeypatch.context() as patch:
        patch.setattr(model.llm, "wake_up", fails)
        body = {"prompt": "x", "max_tokens": 2}
        refused = slow_server.users.post("/v1/completions", json=body, headers={"X-When-Asleep": "wake"})
        assert refused.status_code >= 500
    slow_server.operators.post("/wake_up")
    now = failures()
    new = {name: now[name] - before.get(name, 0) for name in now}
    label = 'hardpoint:sleep_failures_total{error="DriverError",model_name="demo",operation='
    assert new == {f'{label}"sleep"}}': 1, f'{label}"wake"}}': 1}


def test_an_engine_that_dies_is_started_again(start_slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with start_slow({"one": "demo", "two": "demo"}) as server:
        create, refusals = AsyncLLM.create, [OSError("no more processes")]

        async def refuses_first(*arguments: Any, **settings: Any) -> AsyncLLM:
            if refusals:
                raise refusals.pop(0)
            return await create(*arguments, **settings)

        monkeypatch.setattr(AsyncLLM, "create", refuses_first)
        stream = server.openai.completions.create(stream=True, **LONG | {"model": "one"})
        next(iter(stream))
        pid = server.model("one").llm.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match=r"SIGKILL|died|ended"):
            list(stream)
        refused = server.users.post("/v1/completions", json={"prompt": "x", "model": "one"})
        assert refused.status_code == 503
        assert server.users.get("/ready").status_code == 503
        assert server.openai.completions.create(model="two", prompt="x", max_tokens=2).choices
        until(lambda: server.users.get("/ready").status_code == 200, 60)
        assert server.openai.completions.create(model="one", prompt="x", max_tokens=2).choices
        shown = server.operators.get("/models/one").json()
        assert (shown["restarts"], shown["state"]) == (1, "running")
        counted = server.users.get("/metrics").text
        assert 'hardpoint:engine_deaths_total{model_name="one"} 1.0' in counted
        assert 'hardpoint:request_success_total{finished_reason="error",model_name="one"} 1.0' in counted


def test_a_model_of_several_engines_is_served_as_one_and_started_again_as_one(start: Any, device: str) -> None:
    settings = {"backend": device, "data_parallel_size": 2}
    with start(settings=settings) as server, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.openai.completions.create, **LONG | {"max_tokens": 5}) for _ in range(4)]
        assert [one.result().choices[0].finish_reason for one in asked] == ["length"] * 4
        assert 'hardpoint:generation_tokens_total{model_name="demo"} 20.0' in server.users.get("/metrics").text
        server.operators.post("/pause").raise_for_status()
        assert server.operators.get("/is_sleeping").json() == {"is_sleeping": True}
        server.operators.post("/resume").raise_for_status()
        os.kill(server.model().llm._loop.pids[0], signal.SIGKILL)  # type: ignore[union-attr]
        until(lambda: server.users.get("/ready").status_code == 503)
        until(lambda: server.users.get("/ready").status_code == 200, 60)
        assert server.openai.completions.create(model="demo", prompt="x", max_tokens=2).choices


def test_the_end_lets_requests_finish(start_slow: Any) -> None:
    with start_slow() as server, ThreadPoolExecutor(1) as pool:
        last = pool.submit(server.openai.completions.create, **LONG)
        until(lambda: running(server) == 1)
        server.call(_end(server.server))
        until(lambda: server.users.get("/ready").status_code == 503)
        with pytest.raises(openai.InternalServerError):
            server.openai.completions.create(model="demo", prompt="x")
        answer = last.result()
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 100


def test_the_end_ends_requests_whose_time_is_over(start_slow: Any) -> None:
    with start_slow(drain_seconds=0.2) as server:
        stream = server.openai.completions.create(stream=True, **LONG)
        next(iter(stream))
        server.call(_end(server.server))
        reasons = [choice.finish_reason for part in stream for choice in part.choices]
        assert reasons[-1] == "abort"


async def _end(server: HardpointServer) -> None:
    server.end()


def test_the_log_says_nothing_of_prompts(slow_server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    secret = "a secret of mine"
    for body in ({"prompt": secret, "max_tokens": 2}, {"prompt": secret, "n": -1}, {"prompt": secret, "secret": 1}):
        slow_server.users.post("/v1/completions", json=body)
        slow_server.users.post(f"/v1/completions?q={secret}", json=body)
    # A line is written once the answer was sent: that of the last request is waited for.
    slow_server.users.post("/v1/completions", json={"prompt": secret, "n": -1}, headers={"x-request-id": "the-last"})
    until(lambda: any(line.endswith(" the-last") for line in caplog.messages))
    assert any("POST /v1/completions 200" in record.getMessage() for record in caplog.records)
    assert secret not in caplog.text
    assert secret not in slow_server.users.get("/metrics").text
    assert secret not in slow_server.operators.get("/models").text


def test_a_request_writes_one_line_of_the_log(slow_server: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hardpoint.access")
    # Told by its identifier: a line is written once the answer was sent, and those of the test before may still come.
    asked = slow_server.users.get("/a%0AGET /b 200", headers={"x-request-id": "of-this-test"})
    assert asked.status_code == 404
    until(lambda: any(line.endswith(" of-this-test") for line in caplog.messages))
    lines = [line for line in caplog.messages if line.endswith(" of-this-test")]
    assert [line.partition(" 404 ")[0] for line in lines] == ["GET /a%0AGET%20/b%20200"]


def address(server: Running) -> tuple[str, int]:
    host, port = server.server.url.removeprefix("http://").split(":")
    return host, int(port)


def test_2000_slow_clients_hold_nobody_up(slow_server: Running) -> None:
    """Two files for each, since both ends are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard >= 4200, "raise the hard limit of open files (ulimit -Hn) to at least 4,200"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4200), hard))
    slow = []
    try:
        slow += [socket.create_connection(address(slow_server), timeout=240) for _ in range(2000)]
        for byte in b"POST":
            for one in slow:
                one.sendall(bytes([byte]))
            assert slow_server.openai.completions.create(model="demo", prompt="x", max_tokens=2).choices
        # They are served as soon as they have said what they want.
        slow[7].sendall(
            b" /nothing HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: 0\r\n\r\n" % KEY.encode()
        )
        assert b" 404 " in slow[7].recv(1000).split(b"\r\n")[0]
    finally:
        for one in slow:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_closed(one: socket.socket) -> bool:
    """Read what was still to come, an answer's body perhaps, to the end; raises TimeoutError where there is none."""
    with suppress(ConnectionResetError):
        while one.recv(1000):
            pass
    return True


def test_headers_that_never_end_end_their_connection(slow_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.4)
    again = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(slow_server.openai.completions.create, **LONG)
        with (
            socket.create_connection(address(slow_server), timeout=240) as silent,
            socket.create_connection(address(slow_server), timeout=240) as slow,
            socket.create_connection(address(slow_server), timeout=240) as second,
        ):
            second.sendall(again)
            assert b" 200 " in second.recv(1000)
            for one in (slow, second):
                one.sendall(b"\r\n" if one is second else b"GET /")
            assert is_closed(silent)
            assert is_closed(slow)
            assert is_closed(second)
            # Those of a request that takes longer have come.
            assert long.result().choices
    with socket.create_connection(address(slow_server), timeout=240) as large:
        with suppress(ConnectionResetError, BrokenPipeError):
            large.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * (1 << 20))
        assert is_closed(large)


def test_headers_have_a_limit_however_packets_fall(slow_server: Running) -> None:
    def request(size: int) -> bytes:
        return b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: %s\r\n" % (b"x" * 1000) * size + b"\r\n"

    def is_answered(*packets: bytes) -> bool:
        with socket.create_connection(address(slow_server), timeout=240) as one:
            for packet in packets:
                one.sendall(packet)
                time.sleep(0.05)
            return b" 200 " in one.recv(1000).split(b"\r\n")[0]

    small, large = request(60), request(70)
    assert is_answered(small)
    assert is_answered(small[:50_000], small[50_000:])
    assert not is_answered(large)
    assert not is_answered(large[:50_000], large[50_000:])
    assert not is_answered(b"GET /health?%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * 70_000))
    # A body beside them is none of theirs.
    body = b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n" + b"x" * 90_000
    with socket.create_connection(address(slow_server), timeout=240) as one:
        one.sendall(body + small)
        answers = b""
        while answers.count(b"HTTP/1.1") < 2:
            answers += (part := one.recv(10_000))
            assert part, answers
    # Nor may those of the next request that come while one is answered be without end.
    ask = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n" % KEY.encode()
    content = b'{"prompt": "a", "max_tokens": 900, "ignore_eos": true}'
    ask += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)
    with socket.create_connection(address(slow_server), timeout=240) as one:
        one.sendall(ask + b"GET /health HTTP/1.1\r\nX: ")
        sent = 0
        with suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(100):
                one.sendall(b"x" * 10_000)
                sent += 10_000
                time.sleep(0.01)
        assert sent < 500_000
    until(lambda: running(slow_server) == 0 and slow_server.model().in_progress == 0)


def test_an_offer_of_another_protocol_is_passed_over(slow_server: Running) -> None:
    """As Java's client sends it with each request; the body is read all the same, however packets fall."""
    content = b'{"prompt": "a", "max_tokens": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n" % KEY.encode()
    head += b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\nContent-Type: application/json\r\n"
    sized = head + b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(content), content)
    for packets in ([sized + chunked], [sized[:-40], sized[-40:-5], sized[-5:] + chunked[:-20], chunked[-20:]]):
        with socket.create_connection(address(slow_server), timeout=240) as one:
            for packet in packets:
                one.sendall(packet)
                time.sleep(0.02)
            answers = b""
            while answers.count(b'"usage"') < 2:
                answers += (part := one.recv(10_000))
                assert part, answers
            assert answers.count(b"HTTP/1.1 200 ") == 2


def test_a_client_that_leaves_takes_along_all_it_asked_for_at_once(slow_server: Running) -> None:
    ask = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n" % KEY.encode()
    content = b'{"prompt": "a", "max_tokens": 900, "ignore_eos": true, "stream": true}'
    ask += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)
    before = ended(slow_server, "abort")
    with socket.create_connection(address(slow_server), timeout=240) as one:
        one.sendall(ask + ask)
        assert one.recv(1000)
    until(lambda: running(slow_server) == 0 and slow_server.model().in_progress == 0)
    assert ended(slow_server, "abort") == before + 1


def test_trailers_have_the_limit_of_headers(slow_server: Running) -> None:
    """They follow a body in chunks; they are no headers, and may be as long together."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n" % KEY.encode()
    content = b'{"prompt": "a", "max_tokens": 2}'
    head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    # Chunks whose packets end behind their sizes, and are longer than trailers may be.
    spaces = b" " * 90_000
    packets = [head + b"%x\r\n" % len(spaces)]
    packets += [spaces + b"\r\n%x\r\n" % len(spaces)] * 3 + [spaces + b"\r\n"]
    packets += [b"%x\r\n%s\r\n" % (len(content), content)]

    def answered(*last: bytes) -> bytes:
        with socket.create_connection(address(slow_server), timeout=240) as one, suppress(ConnectionError):
            for packet in (*packets, *last):
                one.sendall(packet)
                time.sleep(0.02)
            return one.recv(1000).split(b"\r\n")[0]
        return b""

    def trailers(size: int) -> bytes:
        return b"X: %s\r\n" % (b"x" * 1000) * size

    assert b" 200 " in answered(b"0\r\n\r\n")
    assert b" 200 " in answered(b"0\r\n" + trailers(60) + b"\r\n")
    # What is said once the body began cannot change the request.
    assert b" 200 " in answered(b"0\r\nX-Request-Timeout: soon\r\n\r\n")
    assert answered(b"0\r\n" + trailers(70) + b"\r\n") == b""
    assert answered(b"0\r\n" + trailers(35), trailers(35) + b"\r\n") == b""
    for beginning in (b"0\r\nX: ", b"0\r\n", b"1;"):
        sent = 0
        with socket.create_connection(address(slow_server), timeout=240) as one:
            for packet in packets:
                one.sendall(packet)
            one.sendall(beginning)
            with suppress(ConnectionError):
                while sent < 10_000_000:
                    one.sendall(b"X: x\r\n" * 2000 if beginning == b"0\r\n" else b"x" * 10_000)
                    sent += 10_000
                    time.sleep(0.01)
        assert sent < 500_000, beginning
    until(lambda: running(slow_server) == 0 and slow_server.model().in_progress == 0)


def test_a_control_socket_is_its_owners_alone(tmp_path: Path, device: str) -> None:
    import asyncio

    from hardpoint.server.metrics import Metrics
    from hardpoint.server.served_model import ServedModel, ServingOptions
    from tests.server.conftest import ENGINE

    path = tmp_path / "control"
    found: dict[str, Any] = {}

    async def whole() -> None:
        metrics = Metrics()
        model = ServedModel("demo", "demo", ENGINE | {"backend": device}, ServingOptions(), metrics.of("demo"))
        server = HardpointServer(ServerSettings(port=0, control_socket=str(path)), [model], metrics)
        ready = asyncio.Event()
        running = asyncio.create_task(serve(server, ready))
        await ready.wait()
        found["mode"] = path.stat().st_mode & 0o777
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://x") as client:
            found["models"] = (await client.get("/models")).json()["models"]
        os.kill(os.getpid(), signal.SIGTERM)
        await running

    assert threading.current_thread() is threading.main_thread()
    asyncio.run(whole())
    assert found["mode"] == 0o600
    assert [one["name"] for one in found["models"]] == ["demo"]
    assert not path.exists()


@pytest.mark.parametrize(
    ("body", "kind", "status", "code", "told"),
    [
        (b"{bad", "application/json", 400, "invalid_json", "at character 1"),
        (b"", "application/json", 400, "invalid_value", "there is no body"),
        (b'{"seed": %s}' % (b"9" * 5000), "application/json", 400, "invalid_json", "thousands of digits"),
        (b"[1]", "application/json; charset=utf-8", 400, "invalid_value", "not an object"),
        (b'{"prompt": "a"}', "text/plain", 415, "unsupported_media_type", "Content-Type: application/json"),
        (b"prompt=a", "application/x-www-form-urlencoded", 415, "unsupported_media_type", "Content-Type"),
    ],
)
def test_a_body_that_is_no_json_object_is_told_so(
    slow_server: Running, body: bytes, kind: str, status: int, code: str, told: str
) -> None:
    answer = slow_server.users.post("/v1/completions", content=body, headers={"Content-Type": kind})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, None)
    assert told in error["message"]
