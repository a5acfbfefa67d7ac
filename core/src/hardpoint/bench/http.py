"""HTTP/1.1 as a load generator needs it: kept connections, and an answer's pieces taken the moment that they come.

httptools parses, as it does for uvicorn. General clients wake a task for each piece, which costs more than most servers spend on a token.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

Take = Callable[[int, bytes], None]
"""Takes the status and the next piece of an answer's body."""


class NotConnected(Exception):
    """There is no connection to the server."""


class BrokenOff(Exception):
    """The connection ended before the answer did, or what came is no HTTP.

    Args:
        is_unanswered: nothing of an answer had come.
    """

    def __init__(self, text: str, *, is_unanswered: bool = False) -> None:
        super().__init__(text)
        self.is_unanswered = is_unanswered


class HttpClient:
    """Requests to one server, each on a connection of its own, which is kept for another one.

    Args:
        url: where the server is: http or https; of its path nothing is used.
        headers: of each request; raises ValueError where one cannot be sent.
        timeout: seconds of a request; None for no limit.
    """

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float | None) -> None:
        parts = urlsplit(url)
        self._host, self._timeout = parts.hostname or "", timeout
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        lines = [f"{name}: {value}" for name, value in {"Host": parts.netloc.rpartition("@")[2], **headers}.items()]
        for line in lines:
            if not line.isprintable():
                raise ValueError(f"a header has a character that cannot be sent: {line.partition(':')[0]}")
        self._headers = "\r\n".join(lines).encode("latin-1")
        self._free: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes, take: Take) -> int:
        """Return the status of the answer, whose body `take` was given.

        Raises NotConnected, BrokenOff, TimeoutError, and what `take` raises.
        """
        head = b"%s %s HTTP/1.1\r\n%s\r\nContent-Length: %d\r\n\r\n" % (
            method.encode(),
            path.encode(),
            self._headers,
            len(body),
        )
        try:
            async with asyncio.timeout(self._timeout):
                return await self._answered(head + body, take)
        except TimeoutError as error:
            raise TimeoutError(f"no whole answer within {self._timeout:g} s") from error

    async def _answered(self, message: bytes, take: Take) -> int:
        try:
            return await self._sent(self._kept() or await self._connect(), message, take)
        except BrokenOff as error:
            # The server may have closed a kept connection just then: a new one carries what was not answered.
            if not error.is_unanswered:
                raise
            return await self._sent(await self._connect(), message, take)

    def _kept(self) -> _Connection | None:
        """Return a connection that the server has not closed meanwhile."""
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                return connection
        return None

    async def _sent(self, connection: _Connection, message: bytes, take: Take) -> int:
        try:
            status = await connection.send(message, take)
        except BaseException:
            connection.abort()
            raise
        if connection.is_open:
            self._free.append(connection)
        return status

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        # UnicodeError: a label of the name is empty or too long, so it cannot be looked up.
        except (OSError, UnicodeError) as error:
            raise NotConnected(f"{self._host}:{self._port}: {error}") from error
        return connection

    def close(self) -> None:
        """Close the connections."""
        for connection in self._free:
            connection.abort()
        self._free.clear()


class _Connection(asyncio.Protocol):
    """One connection; `on_` methods are called by the parser."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport
        self._ended: asyncio.Future[int] | None = None
        self._take: Take
        self._parser: httptools.HttpResponseParser
        self._status = 0
        self._is_framed = False

    async def send(self, message: bytes, take: Take) -> int:
        """Send a request, and return the status once its answer has come whole."""
        if not self.is_open:
            raise BrokenOff("the server disconnected", is_unanswered=True)
        self._ended, self._take = asyncio.get_running_loop().create_future(), take
        self._parser, self._status, self._is_framed = httptools.HttpResponseParser(self), 0, False
        self._transport.write(message)
        return await self._ended

    def abort(self) -> None:
        """Close it now."""
        self.is_open, self._ended = False, None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none by inheritance.
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        if self._ended is None:  # nothing was asked for
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # What a callback raised comes wrapped.
            self._fail(
                error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else BrokenOff(repr(error))
            )

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._status >= 200 and not self._is_framed and error is None:
            self._finish()  # a body without a length ends with its connection
        else:
            self._fail(
                BrokenOff(
                    f"the server disconnected: {error or 'the connection was closed'}", is_unanswered=not self._status
                )
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        self._is_framed = self._is_framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self._take(self._status, piece)

    def on_message_complete(self) -> None:
        if self._status < 200:  # hints, before the answer
            self._status, self._is_framed = 0, False
            return
        self.is_open = self.is_open and self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None and not ended.done():
            ended.set_result(self._status)

    def _fail(self, error: BaseException | None) -> None:
        ended, self._ended = self._ended, None
        if ended is not None and not ended.done():
            ended.set_exception(error or BrokenOff("what came is no HTTP"))
