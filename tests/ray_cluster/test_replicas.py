"""Replicas as an application of Ray Serve on two machines of a cluster, beside its head."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from core.tests.executor.conftest import OBJECT_STORE
from hardpoint.interfaces.errors import ClusterError
from hardpoint.plugins import installed
from tests.ray_cluster.warm_workers import STARTS_ENGINES
from tests.warm_processes import WarmPopen

MACHINE = "machine_of_replicas"
ROOM = 2
"""Replicas for which each machine has room."""


def wait_until(condition: Callable[[], Any], seconds: float = 240.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not become so in time"
        time.sleep(0.2)


def replica_states() -> dict[str, int]:
    """Return how many replicas there are in each of Ray Serve's states."""
    from ray import serve

    from hardpoint.server.ray_app import APPLICATION, REPLICAS

    return {
        state: count
        for state, count in serve.status().applications[APPLICATION].deployments[REPLICAS].replica_states.items()
        if count
    }


class Served:
    """An application that runs, how to ask it, and how to end it before its context does."""

    def __init__(self, url: str, end: Callable[[], None]) -> None:
        self.url, self.end = url, end
        self.client = httpx.Client(base_url=url, timeout=600, headers={"Authorization": "Bearer a key"})

    def complete(self, prompt: str, max_tokens: int = 2) -> httpx.Response:
        """Return a whole answer."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        return self.client.post("/v1/completions", json=body)


def held_port() -> tuple[socket.socket, int]:
    """Return a port for Ray Serve's proxy, which shares ports, and what keeps all others from taking it until it is closed."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held, held.getsockname()[1]


@contextmanager
def serving(engine: dict[str, Any], serving: dict[str, Any], model: str = "demo", **options: Any) -> Iterator[Served]:
    """Serve a model, under the name demo, until the end of the context."""
    from hardpoint.server.ray_app import ReplicaOptions, Replicas
    from hardpoint.server.run import ServerSettings
    from hardpoint.server.served_model import ServingOptions

    held, port = held_port()
    with ExitStack() as ending:
        ending.enter_context(held)
        made = Replicas(
            "demo",
            model,
            {"max_model_len": 1024, "num_device_blocks": 128} | engine,
            ServingOptions(drain_seconds=5.0, **serving),
            ServerSettings(port=port, api_keys=["a key"]),
            ReplicaOptions(resource=MACHINE, **options),
        )
        ending.callback(made.end)
        yield Served(f"http://127.0.0.1:{port}", ending.close)


@pytest.fixture(scope="module")
def add_machine(
    cluster: Any, fake: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Any]]:
    """Return what adds a machine with room for replicas, which knows the backend whose device computes nothing."""
    site = tmp_path_factory.mktemp("simulated")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "core" / "tests" / "engine"))
        import simulated_device

        simulated_device.install(site)
        beside = [str(site), str(Path(simulated_device.__file__).parent), str(Path(fake.__file__ or "").parent)]
        patch.setenv("PYTHONPATH", os.pathsep.join(beside))
        patch.setenv("HARDPOINT_SIMULATED_STEP", "0.06")
        patch.setenv(STARTS_ENGINES, "1")

        def add() -> Any:
            return cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE, resources={MACHINE: ROOM})

        yield add
        sys.path.remove(str(site))
    installed(refresh=True)


@pytest.fixture(scope="module")
def machines(add_machine: Callable[[], Any]) -> list[Any]:
    return [add_machine(), add_machine()]


@contextmanager
def command(address: str, model: str, *options: str) -> Iterator[Served]:
    """Run `hardpoint serve` of a model, under the name demo, with replicas until the end of the context, which ends it with SIGTERM."""
    from ray import serve

    held, port = held_port()
    where = ["--executor", "ray", "--ray-address", address, "--ray-resource", MACHINE, "--port", str(port)]
    served = ["-m", "hardpoint.cli", "serve", f"demo={model}", "--api-key", "a key"]
    running = WarmPopen([sys.executable, "-P", *served, *where, *options], stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    said: list[str] = []
    try:
        for line in running.stderr:
            said.append(line)
            if line.startswith("Serving demo"):
                break
        else:
            pytest.fail("".join(said))
        # What it says further is read, so that it does not wait for that.
        threading.Thread(target=said.extend, args=(running.stderr,), daemon=True).start()
        yield Served(f"http://127.0.0.1:{port}", running.terminate)
        running.terminate()
        assert running.wait(240) == 0, "".join(said)
    finally:
        running.kill()
        running.wait()
        held.close()
        # This process has asked the controller of Ray Serve, which ended with the command, and would ask it again.
        serve.shutdown()


@pytest.mark.timeout(900)
def test_replicas_sleep_when_idle_then_end_and_a_request_starts_one_again(
    cluster: Any, machines: list[Any], shallow_demo: str
) -> None:
    small = ["--backend", "cpu", "--dtype", "float32", "--max-model-len", "256", "--num-blocks", "32"]
    idle = ["--replicas", "2", "--min-replicas", "0", "--idle-sleep", "0.5", "--end-after", "4"]
    with command(cluster.address, shallow_demo, *small, *idle) as served:
        before = served.complete("The capital of France is", 8).json()["choices"][0]["text"]
        # It gives its memory back at once, and wakes for a request.
        wait_until(lambda: served.client.get("/v1/models/demo").json()["state"] == "sleeping")
        woken = served.complete("The capital of France is", 8)
        assert woken.json()["choices"][0]["text"] == before
        # What load balancers ask keeps none.
        wait_until(lambda: served.client.get("/ready").is_success and not replica_states())
        started = served.complete("The capital of France is", 8)
        assert started.json()["choices"][0]["text"] == before
        assert started.headers["x-replica"] != woken.headers["x-replica"]


def test_a_model_that_does_not_load_is_told_and_nothing_stays(
    machines: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    from ray import serve

    refused = pytest.raises(ClusterError, match=r"the replicas of 'demo' do not start.*there is no model '/no/model'")
    with refused, serving({"backend": "cpu"}, {}, model="/no/model", replicas=2 * ROOM + 1):
        pass
    assert not serve.status().applications
    # One replica more than the cluster has room for would have waited.
    assert "5 replicas with 1 machine_of_replicas each wait for machines: the cluster has 2 on" in caplog.text


@pytest.fixture(scope="module")
def four(machines: list[Any]) -> Iterator[Served]:
    with serving({"backend": "simulated_device"}, {}, replicas=2 * ROOM) as served:
        yield served


def text(number: int) -> str:
    """Return a text of several KV blocks, of which no two numbers share one."""
    return f"{number} bottles of beer on wall number {number}. " * 12


@pytest.mark.timeout(900)
def test_requests_go_to_the_replica_that_has_the_beginning_of_their_prompt(four: Served) -> None:
    replicas = []
    for number in range(1, 9):
        first = four.complete(text(number))
        assert first.status_code == 200, first.text
        assert first.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for tail in ("One falls.", "Two fall."):
            later = four.complete(text(number) + tail)
            assert later.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
            assert later.headers["x-replica"] == first.headers["x-replica"]
        replicas.append(first.headers["x-replica"])
    assert len(set(replicas)) > 1


def test_keys_are_asked_for_and_load_balancers_answered_by_the_front(four: Served) -> None:
    assert httpx.get(f"{four.url}/v1/models").status_code == 401
    for path in ("/health", "/ready", "/version"):
        answer = httpx.get(four.url + path)
        assert answer.status_code == 200
        assert "x-replica" not in answer.headers
    unknown = four.client.post("/v1/completions", json={"model": "demo", "prompt": "a", "no_such_field": 1})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "unknown_field")


def running_on(replica: str) -> float | None:
    """Return how many requests a replica computes; None where another one answered."""
    from ray import serve

    from hardpoint.server.ray_app import APPLICATION, REPLICAS

    handle = serve.get_deployment_handle(REPLICAS, app_name=APPLICATION).options(stream=True)
    scope = {"type": "http", "method": "GET", "path": "/metrics", "query_string": b"", "headers": []}
    messages = [message for batch in handle.answer.remote((), scope, b"") for message in batch]
    if (b"x-replica", replica.encode()) not in messages[0]["headers"]:
        return None
    page = b"".join(message.get("body", b"") for message in messages[1:]).decode()
    (line,) = (line for line in page.splitlines() if line.startswith("hardpoint:num_requests_running{"))
    return float(line.split()[-1])


def test_a_request_ends_with_its_client(four: Served) -> None:
    body = {"model": "demo", "prompt": text(50), "max_tokens": 900, "ignore_eos": True, "stream": True}
    with four.client.stream("POST", "/v1/completions", json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
        replica = answer.headers["x-replica"]
    # Its tokens would take 54 seconds, in which the router would prefer the other replicas.
    wait_until(lambda: running_on(replica) == 0, 45.0)


def test_a_cluster_that_serves_already_is_refused(four: Served) -> None:
    with pytest.raises(ClusterError, match="Ray Serve runs on this cluster already"), serving({}, {}, replicas=1):
        pass


async def _ask(client: httpx.AsyncClient, number: int) -> tuple[bool, int, str]:
    """Return of a request whether it was streamed, its status, and its text up to where it ended."""
    is_streamed = number % 2 == 1
    body = {"model": "demo", "prompt": text(number), "max_tokens": 33, "ignore_eos": True, "stream": is_streamed}
    answer = await client.post("/v1/completions", json=body)
    return is_streamed, answer.status_code, answer.text


@pytest.mark.timeout(900)
def test_a_machine_that_is_gone_takes_no_request_that_had_not_begun_to_stream_and_is_replaced(
    four: Served, cluster: Any, machines: list[Any], add_machine: Callable[[], Any]
) -> None:
    async def load() -> list[tuple[bool, int, str]]:
        headers = {"Authorization": "Bearer a key"}
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=four.url, timeout=240, headers=headers, limits=limits) as client:
            asking = [asyncio.create_task(_ask(client, number)) for number in range(100, 132)]
            await asyncio.sleep(0.8)  # they are in progress: each takes two seconds
            await asyncio.to_thread(cluster.remove_node, machines.pop(), allow_graceful=False)
            asking += [asyncio.create_task(_ask(client, number)) for number in range(132, 148)]
            return await asyncio.gather(*asking)

    assert replica_states() == {"RUNNING": 2 * ROOM}
    answers = asyncio.run(load())
    whole = [answer for answer in answers if not answer[0]]
    assert [status for _, status, _ in whole] == [200] * len(whole)
    streams = [told for is_streamed, status, told in answers if is_streamed]
    cut = [told for told in streams if not told.endswith("data: [DONE]\n\n")]
    assert all('"code":"replica_lost"' in told.replace(" ", "") for told in cut)
    assert len(cut) < len(streams)

    machines.append(add_machine())
    wait_until(lambda: replica_states() == {"RUNNING": 2 * ROOM})
    answered = set()

    def reaches_all() -> bool:
        answered.add(four.complete(f"A text of its own, {time.monotonic()}").headers["x-replica"])
        return len(answered) >= 2 * ROOM

    wait_until(reaches_all)


def test_the_end_lets_requests_finish(four: Served) -> None:
    """The last of the tests of these replicas."""
    body = {"model": "demo", "prompt": "Hi", "max_tokens": 33, "ignore_eos": True}
    begun = threading.Event()

    def stream() -> str:
        text = ""
        with four.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            for part in answer.iter_text():
                text += part
                begun.set()
        return text

    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(four.client.post, "/v1/completions", json=body)
        time.sleep(0.1)  # so that it is in progress when the stream has begun
        streamed = pool.submit(stream)
        assert begun.wait(60)
        four.end()
    assert whole.result().json()["choices"][0]["finish_reason"] == "length"
    assert '"finish_reason":"length"' in streamed.result()
    assert streamed.result().endswith("data: [DONE]\n\n")
