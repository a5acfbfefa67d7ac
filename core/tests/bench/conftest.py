"""One server for all tests of this folder."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent))
from timed_endpoint import Endpoint


@pytest.fixture(scope="session")
def _endpoint() -> Iterator[Endpoint]:
    endpoint, loop, ready = Endpoint(), asyncio.new_event_loop(), threading.Event()
    app = web.Application()
    app.router.add_post("/v1/completions", endpoint.answer)
    app.router.add_post("/v1/chat/completions", endpoint.answer)
    app.router.add_get("/v1/models", endpoint.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        endpoint.url = "http://{}:{}".format(*runner.addresses[0])
        ready.set()

    def run() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(240)
    yield endpoint
    loop.call_soon_threadsafe(loop.stop)
    thread.join(240)


@pytest.fixture
def endpoint(_endpoint: Endpoint) -> Endpoint:
    """The server, which has had no requests."""
    _endpoint.bodies.clear()
    _endpoint.keys.clear()
    _endpoint.has_request.clear()
    return _endpoint
