"""The shorter way to the routes that generate: what it takes, and what it leaves to the application."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict

from hardpoint.interfaces.errors import EngineDead
from hardpoint.server import errors
from hardpoint.server.direct import Direct
from hardpoint.server.errors import ApiError
from hardpoint.server.http import Gate

PATH = "/v1/made"


class Made(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    number: int
    text: str | None = None


def routes() -> APIRouter:
    made = APIRouter()

    @made.post(PATH)
    async def make(body: Made, request: Request) -> Response:
        match body.text:
            case "refuse":
                raise ApiError(429, "too many", "queue_full", retry_after=2)
            case "die":
                raise EngineDead("the engine is dead")
            case "fail":
                raise ZeroDivisionError
        return Response(json.dumps([body.number, body.text, request.headers.get("x-of")]))

    return made


class Counting:
    """The application, and how many requests came to it."""

    def __init__(self, app: Any) -> None:
        self.app, self.count = app, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.count += 1
        await self.app(scope, receive, send)


def asked(app: Any, body: bytes, content_type: str, method: str = "POST") -> tuple[int, bytes, dict[bytes, bytes]]:
    sent: list[Any] = []
    came = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return came.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", content_type.encode()), (b"content-length", b"%d" % len(body)), (b"x-of", b"test")]
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": PATH, "raw_path": PATH.encode(), "root_path": "",
        "scheme": "http", "query_string": b"", "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    with suppress(ZeroDivisionError):  # uvicorn logs it
        asyncio.run(app(scope, receive, send))
    start, *rest = sent
    kept = {name: value for name, value in start["headers"] if name != b"x-request-id"}
    return start["status"], b"".join(one.get("body", b"") for one in rest), kept


@pytest.fixture(scope="module")
def both() -> tuple[Counting, Gate, Gate]:
    """Return the application, which is counted, with the direct way before it, and without."""
    made, app = routes(), FastAPI()
    errors.install(app)
    app.include_router(made)
    counting = Counting(app)
    return counting, Gate(Direct(counting, [made])), Gate(app)


@pytest.mark.parametrize("text", [None, "ä\u2028", "refuse", "die", "fail"])
@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", "application/x+json"])
def test_a_good_request_does_not_pass_the_application(
    both: tuple[Counting, Gate, Gate], text: str | None, content_type: str
) -> None:
    app, direct, usual = both
    app.count = 0
    body = json.dumps({"number": 3, "text": text}).encode()
    found = asked(direct, body, content_type)
    assert app.count == 0
    assert found == asked(usual, body, content_type)
    assert found[0] == {"refuse": 429, "die": 503, "fail": 500}.get(text or "", 200)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"number": 3}', "text/plain"),
        (b'{"number": "3"}', "application/json"),
        (b'{"number": 3, "other": 1}', "application/json"),
        (b'{"number": 3', "application/json"),
        (b"", "application/json"),
        (b"[3]", "application/json"),
        (b'\xff{"number": 3}', "application/json"),
        ('{"number": 3}'.encode("utf-16"), "application/json"),
        (b'{"number": 3, "text": "\\ud800"}', "application/json"),
        (b'{"number": 3.5}', "application/json"),
        (b'{"number": %s}' % (b"9" * 5000), "application/json"),
        (b'{"number": 1, "text": ' + b"[" * 3000, "application/json"),
    ],
)
def test_what_is_no_good_request_is_left_to_the_application(
    both: tuple[Counting, Gate, Gate], body: bytes, content_type: str
) -> None:
    app, direct, usual = both
    app.count = 0
    found = asked(direct, body, content_type)
    assert app.count == 1
    assert found == asked(usual, body, content_type)
    assert asked(direct, body, content_type, "GET")[0] == 405
