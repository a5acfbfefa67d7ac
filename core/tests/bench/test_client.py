"""The client against a server whose times are known."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from timed_endpoint import FIRST, GAP, Endpoint

from hardpoint.bench.answers import Answer
from hardpoint.bench.client import Client, EventReader
from hardpoint.bench.sending import Sent, send
from hardpoint.interfaces.errors import ConfigError

LATE = 60.0
"""Seconds by which something may be late on a loaded machine."""


def asked(endpoint: Endpoint, *bodies: dict[str, Any], timeout: float | None = None) -> list[Answer]:
    async def whole() -> list[Answer]:
        async with Client(endpoint.url, chat=False, key=None, timeout=timeout) as client:
            return await asyncio.gather(*(client.ask(json.dumps(body).encode()) for body in bodies))

    return asyncio.run(whole())


@given(
    some.lists(some.text(some.characters(exclude_characters="\r\n", exclude_categories=("Cs",)))),
    some.lists(some.integers(0, 400)),
    some.sampled_from(["\n", "\r\n"]),
)
def test_events_are_the_same_wherever_the_stream_is_cut(texts: list[str], cuts: list[int], end: str) -> None:
    stream = "".join(f": ping{end}{end}data: {text}{end}{end}" for text in texts).encode()
    reader, found, at = EventReader(), [], 0
    for cut in [*sorted(cut for cut in cuts if cut < len(stream)), len(stream)]:
        found += list(reader.feed(stream[at:cut]))
        at = cut
    assert found == [text.encode().strip() for text in texts]


@pytest.mark.parametrize("model", ["steady", "uncounted"])
def test_times_and_tokens_are_the_servers(endpoint: Endpoint, model: str) -> None:
    start = time.perf_counter()
    (answer,) = asked(endpoint, {"model": model, "prompt": "x", "max_tokens": 4})
    whole = time.perf_counter() - start
    assert answer.error is None
    assert answer.ttft is not None
    assert FIRST <= answer.ttft < FIRST + LATE
    assert len(answer.itl) == 3
    # A part that was late shortens the gap after it, and no more than it was late.
    assert answer.times[-1] - answer.started >= FIRST + 3 * GAP
    assert answer.e2e <= whole
    assert answer.output_tokens == 4
    assert answer.prompt_tokens == (7 if model == "steady" else 0)


def test_a_call_of_a_tool_is_a_part_too(endpoint: Endpoint) -> None:
    (answer,) = asked(endpoint, {"model": "calling"})
    assert (answer.error, len(answer.times), answer.output_tokens) == (None, 1, 1)


@pytest.mark.parametrize(
    ("model", "kind", "said"),
    [
        ("refusing", "http_429", "too busy"),
        ("closed", "broken_off", "disconnected"),
        ("cut", "broken_off", ""),
        ("unended", "broken_off", "[DONE]"),
        ("failing", "error_event", "a step failed"),
        ("babbling", "malformed_event", ""),
        ("silent", "timeout", "0.3 s"),
    ],
)
def test_failures_are_told_apart(endpoint: Endpoint, model: str, kind: str, said: str) -> None:
    (answer,) = asked(
        endpoint, {"model": model, "prompt": "x", "max_tokens": 2}, timeout=0.3 if kind == "timeout" else 60.0
    )
    assert answer.error == kind
    assert said in answer.detail


def test_a_kept_connection_that_the_server_closes_costs_a_second_try(endpoint: Endpoint) -> None:
    endpoint.bodies.clear()
    (answer,) = asked(endpoint, {"model": "closing", "prompt": "x", "max_tokens": 2})
    assert (answer.error, answer.output_tokens) == (None, 2)
    assert len(endpoint.bodies) == 2


def test_a_server_that_is_not_there(endpoint: Endpoint) -> None:
    gone = Endpoint()
    gone.url = "http://127.0.0.1:9"
    (answer,) = asked(gone, {"model": "steady", "prompt": "x", "max_tokens": 2})
    assert answer.error == "no_connection"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "", "http://"])
def test_an_address_that_is_none(url: str) -> None:
    async def whole() -> None:
        with pytest.raises(ConfigError, match="not a URL"):
            Client(url, chat=False, key=None, timeout=None)

    asyncio.run(whole())


@pytest.mark.parametrize("url", ["http://[::1/v1", "http://127.0.0.1:99999", "http://127.0.0.1:x"])
def test_an_address_that_cannot_be_read(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot be sent"):
        Client(url, chat=False, key=None, timeout=None)


@pytest.mark.parametrize("url", ["http://" + "a" * 64, "http://a..b"])
def test_an_address_that_leads_nowhere(url: str) -> None:
    async def whole() -> str:
        async with Client(url, chat=False, key=None, timeout=60.0) as client:
            return (await client.ask(b"{}")).error or ""

    assert asyncio.run(whole()) == "no_connection"


class Waiting:
    """Answers after a while, and knows how many requests are in progress."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def ask(self, body: bytes) -> Answer:
        answer = Answer(time.perf_counter())
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(float(body))
        self.running -= 1
        answer.ended = time.perf_counter()
        return answer


def sent(client: Waiting, bodies: list[bytes], offset: float, concurrency: int | None, stop_after: float = 60) -> Sent:
    async def whole() -> Sent:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(stop_after, stop.set)
        return await send(client, bodies, [offset * number for number in range(len(bodies))], concurrency, stop)

    return asyncio.run(whole())


@pytest.mark.parametrize(("concurrency", "most"), [(2, 2), (None, 6), (9, 6)])
def test_no_more_requests_at_a_time_than_asked_for(concurrency: int | None, most: int) -> None:
    client = Waiting()
    run = sent(client, [b"0.05"] * 6, 0.0, concurrency)
    assert client.most == most
    assert (len(run.answers), run.unfinished, client.running) == (6, 0, 0)
    assert run.seconds >= 0.05 * 6 / most
    # What waits for its turn is not late by it.
    assert min(answer.e2e for answer in run.answers) <= run.seconds * most / 6


def test_requests_are_sent_at_their_times() -> None:
    run = sent(Waiting(), [b"0"] * 3, 0.1, None)
    first = run.answers[0].started
    assert all(answer.started - first >= 0.1 * number - 0.05 for number, answer in enumerate(run.answers))
    assert 0.2 <= run.seconds < 0.2 + LATE


def test_a_run_that_is_stopped_keeps_what_it_has() -> None:
    run = sent(Waiting(), [b"0", b"60", b"60"], 0.01, None, stop_after=0.2)
    assert (len(run.answers), run.unfinished) == (1, 2)
    assert run.seconds < LATE


def test_an_error_of_the_client_itself_is_raised() -> None:
    with pytest.raises(ExceptionGroup) as failed:
        sent(Waiting(), [b"no number"], 0.0, None)
    assert failed.group_contains(ValueError)
