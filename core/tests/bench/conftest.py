"""One server for all tests of this folder."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from timed_endpoint import Endpoint


@pytest.fixture(scope="session")
def _endpoint() -> Iterator[Endpoint]:
    endpoint, loop, ready, stop = Endpoint(), asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        server = await asyncio.start_server(endpoint.connected, "127.0.0.1", 0)
        endpoint.url = "http://{}:{}".format(*server.sockets[0].getsockname())
        ready.set()
        await stop.wait()
        server.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:  # its end cancels what still answers
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(240)
    yield endpoint
    loop.call_soon_threadsafe(stop.set)
    thread.join(240)


@pytest.fixture
def endpoint(_endpoint: Endpoint) -> Endpoint:
    """The server, which has had no requests."""
    _endpoint.bodies.clear()
    _endpoint.keys.clear()
    _endpoint.has_request.clear()
    return _endpoint
