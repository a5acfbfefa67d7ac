"""Connections of clients that take their time, or never end what they begin."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEADER_SECONDS = 60.0
"""In which the headers of a request must have come whole."""
HEADER_BYTES = 64 << 10
"""Of headers, with the request's first line; and of the trailers that may follow a body in chunks."""


class _Parser(httptools.HttpRequestParser):
    """Reads a request that offers to go on in another protocol as one that offers nothing: no other protocol is spoken here.

    Java's client offers HTTP/2 with each request (`Upgrade: h2c`). httptools passes over the body behind such an offer.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection
        with suppress(AttributeError):  # httptools before 0.6.3; as uvicorn does
            self.set_dangerous_leniencies(lenient_data_after_close=True)

    def offers_upgrade(self) -> bool:
        """Whether the request is to be read again without its offer. CONNECT, which has no other meaning, is refused by uvicorn."""
        return bool(self.should_upgrade()) and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # uvicorn gives bytes alone
        """Read what came."""
        while True:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if not self.offers_upgrade():
                    raise
                method, version = self.get_method(), self.get_http_version().encode()
                head = [b"%s %s HTTP/%s" % (method, self._connection.url, version)]
                head += [b"%s: %s" % header for header in self._connection.headers if header[0] != b"upgrade"]
                data = b"\r\n".join([*head, b"", data[offer.args[0] :]])


class Connection(HttpToolsProtocol):
    """Uvicorn's connection, which it closes itself while it is idle between two requests; here also where headers do not come to an end.

    Trailers are passed over: what is said of a request once its body has come changes nothing. A body's limits are `Gate`'s.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.parser: _Parser = _Parser(self)
        self._cycles: list[RequestResponseCycle] = []  # of the last request, and of those not answered when it came
        self._timer: asyncio.TimerHandle | None = None
        self._received = 0  # since the last that was neither headers nor what stands around the pieces of a body
        self._trailers = 0
        self._in_headers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more, and tell all requests; uvicorn tells the last one alone, which waits where several were sent at once."""
        self._stop_waiting()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, and close the connection where that are headers or trailers without end."""
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._wait()
        self._received += len(data)
        super().data_received(data)
        if self._received > HEADER_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        """Take the first of a request's headers."""
        self._in_headers = True
        self._begin_to_count()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; pass over a trailer, and refuse those that are too large."""
        if self._in_headers:
            super().on_header(name, value)
            return
        self._trailers += _size(name, value)
        if self._trailers > HEADER_BYTES:
            self._refuse("trailers", self._trailers)

    def on_headers_complete(self) -> None:
        """Wait no more; refuse headers that came with what ended them, and are too large."""
        if self.parser.offers_upgrade():
            return
        self._stop_waiting()
        self._in_headers = False
        self._received = self._trailers = 0
        size = len(self.url) + sum(_size(name, value) for name, value in self.headers)
        if size > HEADER_BYTES:
            self._refuse("headers", size)
        super().on_headers_complete()
        self._cycles = [*(one for one in self._cycles if not one.response_complete), self.cycle]

    def on_message_complete(self) -> None:
        """Take a body's end; where the request is read again, that is still to come."""
        if not self.parser.offers_upgrade():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._begin_to_count()
        super().on_body(body)

    def _begin_to_count(self) -> None:
        # All bytes that come while headers are waited for count: also the rest of a body that was refused.
        if self._timer is None:
            self._received = 0

    def _refuse(self, what: str, size: int) -> NoReturn:
        self.transport.close()
        # An exception in a callback makes the parser stop its work on this connection.
        raise ValueError(f"a request's {what} have {size} bytes")

    def _wait(self) -> None:
        self._received = 0
        self._timer = self.loop.call_later(HEADER_SECONDS, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _size(name: bytes, value: bytes) -> int:
    """Return the bytes of a header or a trailer."""
    return len(name) + len(value) + len(": \r\n")
