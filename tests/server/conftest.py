"""A server of the demo model on free ports, and clients of it."""

from __future__ import annotations

import asyncio
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hardpoint.models import open_model
from hardpoint.plugins import installed
from hardpoint.server.budget import DeviceBudget
from hardpoint.server.metrics import Metrics
from hardpoint.server.run import HardpointServer, ServerSettings
from hardpoint.server.served_model import ServedModel, ServingOptions
from hardpoint.server.tracing import Tracing
from tests.leaks import Belongings
from tests.shallow_demo import write_shallow_demo

TOKEN, KEY = "operators' token", "a user's key"
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""What clients of plain HTTP have in the place of one with all the world's authorities, which takes long to read."""
ENGINE = {
    "backend": "cpu",
    "dtype": "float32",
    "max_model_len": 1024,
    "num_device_blocks": 256,
    "enable_prompt_embeds": True,
}


class Running:
    """A server in a thread of its own."""

    def __init__(self, server: HardpointServer, loop: asyncio.AbstractEventLoop) -> None:
        self.server, self._loop = server, loop
        self.users = httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=240, verify=NO_TLS
        )
        self.operators = httpx.Client(
            base_url=server.control_url or "",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=240,
            verify=NO_TLS,
        )
        plain = openai.DefaultHttpxClient(timeout=240, verify=NO_TLS)
        self.openai = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=240, http_client=plain
        )

    def call(self, work: Any) -> Any:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(240)

    def model(self, name: str = "demo") -> ServedModel:
        """Return a served model."""
        return self.server.fleet.get(name)


@contextmanager
def serving(
    models: dict[str, str] | None = None,
    settings: dict[str, Any] | None = None,
    budget: Callable[[], DeviceBudget] | None = None,
    tracing: Tracing | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Serve models, the demo model by default, until the end of the context."""
    started: Future[tuple[HardpointServer, asyncio.AbstractEventLoop]] = Future()

    async def run() -> None:
        metrics = Metrics(tracing)
        served = [
            ServedModel(name, model, ENGINE | (settings or {}), ServingOptions(**options), metrics.of(name))
            for name, model in (models or {"demo": "demo"}).items()
        ]
        where = ServerSettings(port=0, control_port=0, control_token=TOKEN, api_keys=[KEY])
        server = HardpointServer(where, served, metrics, None if budget is None else budget())
        ready = asyncio.Event()
        serving = asyncio.create_task(server.run(ready))
        await asyncio.wait([serving, asyncio.create_task(ready.wait())], return_when=asyncio.FIRST_COMPLETED)
        if ready.is_set():
            started.set_result((server, asyncio.get_running_loop()))
        await serving

    def whole() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    # A server that does not start in time fails its tests, and not the end of the process.
    thread = threading.Thread(target=whole, daemon=True)
    thread.start()
    server, loop = started.result(240)
    try:
        yield Running(server, loop)
    finally:
        loop.call_soon_threadsafe(server.end)
        thread.join(240)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model's first layers and tokens: a server's work is not the model's, which takes long with all of them.

    Of the tokens there are enough for </think> to be three.
    """
    return write_shallow_demo(tmp_path_factory.mktemp("shallow") / "shallow.gguf", tokens=17408)


@pytest.fixture(scope="session")
def server(shallow: str) -> Iterator[Running]:
    """A server that every test leaves awake; its model is called demo."""
    with serving({"demo": shallow}) as running:
        yield running


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of a backend whose device computes nothing, in steps of 10 ms: requests last, and cost little."""
    beside = str(Path(__file__).parents[2] / "core" / "tests" / "engine")
    site = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(beside)
        import simulated_device

        simulated_device.install(site)
        patch.setenv("HARDPOINT_SIMULATED_STEP", "0.01")
        known = open_model("demo")  # whose header, while it is open, is not read again for each server
        yield simulated_device.NAME
        del known
        sys.path.remove(str(site))
    installed(refresh=True)


@pytest.fixture(scope="session")
def slow_server(device: str) -> Iterator[Running]:
    """A server of the simulated device, which every test leaves awake."""
    with serving(settings={"backend": device}) as running:
        yield running


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.openai


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Return what starts a server of one's own; at the end nothing of it is left."""
    before = Belongings.now()
    yield serving
    assert Belongings.now().new_since(before) == []


@pytest.fixture
def start_slow(device: str) -> Iterator[Callable[..., Any]]:
    """The same over the simulated device."""
    before = Belongings.now()
    yield partial(serving, settings={"backend": device})
    assert Belongings.now().new_since(before) == []
