"""The load generator's HTTP, against a server that sends what it is told, byte by byte where that matters."""

from __future__ import annotations

import asyncio

import pytest

from hardpoint.bench.http import BrokenOff, HttpClient, NotConnected

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers the n-th request of each connection with the n-th of its answers; None closes the connection."""

    def __init__(self, *answers: bytes | None, cut: bool = False) -> None:
        self.answers, self.cut = answers, cut
        self.connections = 0
        self.requests: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        for answer in self.answers:
            try:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            except asyncio.IncompleteReadError:
                break
            if answer is None:
                break
            for piece in [answer[i : i + 1] for i in range(len(answer))] if self.cut else [answer]:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()


def asked(server: Server, count: int = 1, timeout: float | None = 20.0, *, after: int = 0) -> list[tuple[int, bytes]]:
    """Return status and body of `after` requests at once, and then of so many, one after the other."""

    async def whole() -> list[tuple[int, bytes]]:
        listening = await asyncio.start_server(server, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", {"X-Of": "test"}, timeout)

        async def one() -> tuple[int, bytes]:
            body = bytearray()
            status = await client.request("GET", "/v1/x", b"", lambda _, piece: body.extend(piece))
            return status, bytes(body)

        try:
            found = await asyncio.gather(*[one() for _ in range(after)])
            for _ in range(count):
                found.append(await one())
        finally:
            client.close()
            listening.close()
        return found

    return asyncio.run(whole())


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK,
    ],
    ids=["length", "chunks", "after hints"],
)
def test_an_answer_is_read_wherever_it_is_cut_and_its_connection_is_kept(answer: bytes, cut: bool) -> None:
    server = Server(answer, answer, cut=cut)
    assert asked(server, 2) == [(200, b"ok")] * 2
    assert server.connections == 1
    assert server.requests[0].startswith(b"GET /v1/x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nX-Of: test\r\n" in server.requests[0]


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    server = Server(b"HTTP/1.1 200 OK\r\n\r\nok")
    assert asked(server, 2) == [(200, b"ok")] * 2
    assert server.connections == 2


def test_a_connection_that_the_server_will_not_keep_is_not_used_again() -> None:
    server = Server(OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"), OK)
    assert asked(server, 2) == [(200, b"ok")] * 2
    assert server.connections == 2


def test_a_kept_connection_that_was_closed_is_replaced_once() -> None:
    server = Server(OK, None)
    assert asked(server, 2) == [(200, b"ok")] * 2
    assert server.connections == 2
    silent = Server(None)
    with pytest.raises(BrokenOff, match="disconnected") as broken:
        asked(silent)
    assert broken.value.is_unanswered
    assert silent.connections == 2


def test_all_kept_connections_may_have_been_closed() -> None:
    server = Server(OK, None)
    assert asked(server, after=3) == [(200, b"ok")] * 4
    assert server.connections == 4


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
    ],
)
def test_half_an_answer_is_none(answer: bytes) -> None:
    server = Server(answer)
    with pytest.raises(BrokenOff) as broken:
        asked(server)
    assert not broken.value.is_unanswered
    assert server.connections == 1  # what was answered in part is not asked again


def test_what_is_no_http_is_refused() -> None:
    with pytest.raises(BrokenOff):
        asked(Server(b"220 mail.example.org ESMTP\r\n"))


def test_time_is_limited_and_what_takes_the_body_may_refuse_it() -> None:
    with pytest.raises(TimeoutError):
        asked(Server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", OK), timeout=0.2)

    async def refused() -> None:
        listening = await asyncio.start_server(Server(OK), "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", {}, 20.0)

        def take(status: int, piece: bytes) -> None:
            raise LookupError(piece)

        try:
            await client.request("GET", "/", b"", take)
        finally:
            client.close()
            listening.close()

    with pytest.raises(LookupError):
        asyncio.run(refused())


def test_a_server_that_is_not_there_and_a_header_that_cannot_be_sent() -> None:
    with pytest.raises(NotConnected):
        asyncio.run(HttpClient("http://127.0.0.1:1", {}, 5.0).request("GET", "/", b"", lambda status, piece: None))
    with pytest.raises(ValueError, match="Authorization"):
        HttpClient("http://127.0.0.1", {"Authorization": "Bearer a\r\nX: y"}, None)
