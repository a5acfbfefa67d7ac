"""What every request passes on its way in and out: keys, limits, ids and the log; streams, and clients that leave."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Collection
from contextlib import suppress
from secrets import token_hex
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hardpoint.interfaces.errors import HardpointError
from hardpoint.server.errors import ApiError

_log = logging.getLogger("hardpoint.access")

T = TypeVar("T")

_SEND = "hardpoint.send"
"""Of a request's scope: its server's own `send`, past the layers that look at the beginning of an answer alone."""

BODY = "hardpoint.body"
"""Of a request's scope: its body, whole."""

_BODY_SECONDS = 60.0
"""In which a request's body must have come whole."""
_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")


class Gate:
    """The outermost part of an application: who may enter, how much a body may hold, and one log line for each request.

    The log has method, path, status, seconds and the request's id, and nothing of a query, header or body. The id is the client's
    (`X-Request-Id`) where it sent a plain one, and is in the answer.

    Args:
        keys: one of which a request must bear (`Authorization: Bearer KEY`); none lets everybody in.
        open_paths: for which no key is asked.
        max_body: bytes of a body.
        streamed: methods whose bodies the application reads itself, piece by piece, with a limit of its own.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Collection[str] = (),
        open_paths: Collection[str] = (),
        max_body: int = 32 << 20,
        streamed: Collection[str] = (),
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = frozenset(open_paths)
        self._max_body = max_body
        self._streamed = frozenset(streamed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.match(given) else token_hex(16)
        start, status = time.perf_counter(), 499  # nginx's: the client left before an answer

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        scope[_SEND] = send
        try:
            self._check_key(scope["path"], headers)
            if scope["method"] in self._streamed:
                await self._app(scope, receive, answer)
            elif (body := await self._body(headers, receive)) is not None:
                scope[BODY] = body
                await self._app(scope, _replay(body, receive), answer)
        except ApiError as error:
            await error.response()(scope, receive, answer)
        finally:
            seconds = time.perf_counter() - start
            # The path is quoted again: a line break in it would forge a line of the log.
            _log.info("%s %s %d %.3fs %s", scope["method"], quote(scope["path"]), status, seconds, request_id)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._keys or path in self._open_paths:
            return
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        # All keys are compared, so that the time says nothing of which one nearly fits.
        fits = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(fits):
            raise ApiError(401, "a valid key is needed: Authorization: Bearer KEY", "invalid_api_key")

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """Return the whole body, None where the client left."""
        told = headers.get(b"content-length", b"0")
        if not told.isdigit() or int(told) > self._max_body:
            raise self._too_large()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                parts, size, more = [], 0, True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size > self._max_body:
                        raise self._too_large()
                    parts.append(part)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {_BODY_SECONDS:g} s", "request_timeout") from None
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body} bytes", "body_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return what gives a body that was read already, and then what else comes."""
    is_read = False

    async def again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return what some work returns; it is cancelled when the client leaves, which raises ClientLeft, or when this is.

    The work has a task of its own, and the client is waited for in this one: what resumes a task goes through all of its frames, of which
    a request has a dozen before its work, for each token.
    """
    task = asyncio.current_task()
    assert task is not None
    cancelling, is_waiting = task.cancelling(), True

    def wake(_: asyncio.Future[T]) -> None:
        if is_waiting:
            task.cancel()

    working = asyncio.ensure_future(work)
    working.add_done_callback(wake)
    try:
        with suppress(Exception):  # no more can be received
            while (await receive())["type"] != "http.disconnect":
                pass
    except asyncio.CancelledError:
        # As `asyncio.timeout` does: `uncancel` tells our own cancellation from somebody else's.
        if not working.done() or task.uncancel() > cancelling:
            raise
    finally:
        is_waiting = False
        if not working.done():
            working.cancel()
            await asyncio.wait([working])
    if working.cancelled():
        raise ClientLeft(499, "the client left", "client_closed_request")
    return working.result()


class ClientLeft(ApiError):
    """Nobody reads the answer any more."""


class _EventStream(StreamingResponse):
    """A stream that ends when its client leaves. Starlette's own looks for that by a task group, a fifth of the time of a short answer.

    Args:
        first: the first event.
        rest: those that follow it.
    """

    def __init__(self, first: bytes, rest: AsyncIterator[bytes]) -> None:
        super().__init__(rest, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with suppress(ClientLeft):
            await until_gone(receive, self._events(send, scope.get(_SEND, send)))

    async def _events(self, begin: Send, send: Send) -> None:
        """Send the beginning of the answer, and then its events, one for each token, by the shorter way."""
        try:
            await begin({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            last = b"data: [DONE]\n\n"
            try:
                async for event in self._rest:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except (ApiError, HardpointError) as error:
                told = error if isinstance(error, ApiError) else ApiError.of(error)
                last = b"data: " + told.response().body + b"\n\n"
            await send({"type": "http.response.body", "body": last})
        finally:
            await aclose(self._rest)


STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"description": "With stream=true, the parts of the answer"}}}}
}
"""What the OpenAPI document says of routes that can stream their answers, beside the answer as one."""


async def event_stream(request: Request, events: AsyncIterator[bytes]) -> StreamingResponse:
    """Return a stream of server-sent events that begins once there is a first one, so that a refusal still has a status of its own.

    An error in the middle is an event, OpenAI's, and the last one.
    """
    try:
        first = await until_gone(request.receive, anext(events))
    except BaseException:
        await aclose(events)
        raise

    return _EventStream(first, events)


async def aclose(events: AsyncIterator[object]) -> None:
    """End a generator now, and not when it is collected."""
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()
