"""Connections of clients that take their time, or never end what they begin."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 60.0
"""In which the headers of a request must have come whole."""
HEADER_BYTES = 64 << 10
"""Of headers, with the request's first line."""
_BESIDE_HEADER = len(": \r\n")


class Connection(HttpToolsProtocol):
    """Uvicorn's connection, which it closes itself while it is idle between two requests; here also where headers do not come to an end.

    A body's limits are `Gate`'s.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._timer: asyncio.TimerHandle | None = None
        self._received = 0
        self._in_headers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, and close the connection where that are headers without end."""
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._wait()
        was_in_headers = self._in_headers
        super().data_received(data)
        # Those of a next request that comes while one is answered are not waited for, but do not come without end either.
        if self._timer is not None or (was_in_headers and self._in_headers):
            self._received += len(data)
            if self._received > HEADER_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        """Take the first of a request's headers."""
        self._in_headers = True
        if self._timer is None:
            self._received = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Wait no more; refuse headers that came with what ended them, and are too large."""
        self._stop_waiting()
        self._in_headers = False
        size = len(self.url) + sum(len(name) + len(value) + _BESIDE_HEADER for name, value in self.headers)
        if size > HEADER_BYTES:
            self.transport.close()
            # What the parser is told so ends its work on this connection.
            raise ValueError(f"a request's headers have {size} bytes")
        super().on_headers_complete()

    def _wait(self) -> None:
        self._received = 0
        self._timer = self.loop.call_later(HEADER_SECONDS, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
