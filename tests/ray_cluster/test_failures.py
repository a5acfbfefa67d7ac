"""What only actors do, and what happens when a machine goes; what holds for every transport is in core/tests/executor/test_remote.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest
from ray.util import placement_group_table

from core.tests.executor.conftest import OBJECT_STORE, Make
from core.tests.executor.helpers import REPORTED_WITHIN, is_gone, order, run_step, wait_until
from hardpoint.executor import RemoteExecutor
from hardpoint.executor.ray_transport import RayTransport
from hardpoint.interfaces.errors import ClusterError, ConfigError, RankFailed


def nodes_of(executor: RemoteExecutor) -> list[str]:
    """Return the machines of the ranks."""
    transport = executor._transport
    assert isinstance(transport, RayTransport)
    return transport.nodes


def placed() -> int:
    """Return how many placement groups the cluster keeps room for."""
    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


def test_ranks_are_processes_on_the_nodes_with_a_device_of_the_node_and_a_share_of_the_threads(make: Make) -> None:
    pair = make(ranks=2, threads=6, ray={"amount": 4})
    first, second = pair.pids
    paths = [model.path for model in pair.call("load")]
    assert paths == [f"pid {first} rank 0 device 0 3", f"pid {second} rank 1 device 0 3"]
    assert len(set(nodes_of(pair))) == 2


def test_a_rank_that_is_stopped_is_ended_by_the_limit_of_its_call(make: Make, step: Any) -> None:
    executor = make(ranks=2, limits={"step": 2.0})
    os.kill(executor.pids[1], signal.SIGSTOP)
    assert wait_until(lambda: "State:\tT" in Path(f"/proc/{executor.pids[1]}/status").read_text())
    with pytest.raises(RankFailed, match="rank 1 failed: it has not answered"):
        run_step(executor, step([1], 16))
    # Ray asks its process to end before it ends it.
    assert wait_until(lambda: all(map(is_gone, executor.pids)))


def test_a_machine_that_is_gone_is_reported_in_time(make: Make, cluster: Any, step: Any) -> None:
    """Its processes end, so that their connections do; see docs/ranks.md for a machine that falls silent."""
    node = cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE, resources={"lone": 1})
    executor = make(order("collect", "hang"), ranks=2, ray={"resource": "lone"})
    assert len(set(nodes_of(executor))) == 2
    lost = nodes_of(executor).index(node.node_id)
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        cluster.remove_node(node, allow_graceful=False)

    timer = threading.Timer(0.3, kill)
    timer.start()
    with pytest.raises(RankFailed) as raised:
        run_step(executor, step([1], 16))
    assert time.monotonic() - killed[0] < REPORTED_WITHIN
    assert raised.value.rank == lost
    timer.join()
    executor.shutdown()
    assert wait_until(lambda: all(map(is_gone, executor.pids)))


def test_what_the_cluster_has_no_room_for_is_refused_with_what_it_has(make: Make) -> None:
    groups = placed()
    with pytest.raises(ClusterError) as raised:
        make(ranks=2, stages=4, ray={"amount": 3, "placement_seconds": 1.0})
    assert "8 ranks in 4 stages of 2 with 3 fakes each within 1 s" in str(raised.value)
    assert str(raised.value).count("6 on ") == 2
    assert "add machines" in str(raised.value)
    assert wait_until(lambda: placed() == groups)


def test_ranks_with_another_version_are_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from hardpoint.executor import ray_actor

    ours = ray_actor.versions_of("fakeranks") | {"hardpoint": "9.9"}
    monkeypatch.setattr(ray_actor, "versions_of", lambda backend: ours)
    with pytest.raises(ClusterError, match=r"rank 0 on .* different versions of hardpoint: 0\.\S+ there, 9\.9 here"):
        make()


def test_another_cluster_than_the_one_that_was_joined_is_refused(make: Make) -> None:
    with pytest.raises(ClusterError, match=r"192\.0\.2\.1:1' was asked for, and this process has joined another one"):
        make(ray={"address": "192.0.2.1:1"})


def test_a_device_cannot_be_chosen(make: Make) -> None:
    with pytest.raises(ConfigError, match="cannot begin at a device"):
        make(device=1)


# A cluster that the engine starts

PROGRAM = """
    import json, os, sys, time
    sys.path.insert(0, {site!r})
    import hardpoint_fake_ranks as fake
    import ray
    from hardpoint.executor import RemoteExecutor
    from hardpoint.executor.ray_transport import RayTransport
    from hardpoint.interfaces import WorkerConfig
    from hardpoint.plugins import Resolved
    descriptor = fake.hardpoint_backend()
    resolved = Resolved(descriptor, descriptor.probe().devices[0])
    *others, last = (
        RemoteExecutor(RayTransport(resolved, WorkerConfig(model=""), None, {{"resource": "CPU"}}))
        for _ in range(1 if {waits} else 2)
    )
    for one in others:
        one.shutdown()
    assert ray.is_initialized()
    print(*last.pids, flush=True)
    if {waits}:
        time.sleep(60)
    last.shutdown()
    assert not ray.is_initialized()
    print("ended", flush=True)
"""


def having(variable: str, values: Collection[str]) -> list[int]:
    """Return the living processes that have an environment variable with one of these values."""
    wanted, found = {f"{variable}={value}".encode() for value in values}, []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted & set(path.read_bytes().split(b"\0")) and not is_gone(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("killed", [False, True], ids=["ends", "killed"])
def test_a_cluster_that_was_started_ends_with_the_last_engine_and_ranks_with_any_end_of_it(
    killed: bool, fake: ModuleType
) -> None:
    site = str(Path(fake.__file__ or "").parent)
    session = f"{os.getpid()}-{killed}"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": site, "HARDPOINT_TEST": session}
    program = dedent(PROGRAM).format(site=site, waits=killed)
    engine = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    started: list[str] = []

    def left() -> list[int]:
        # Ray's agents rename themselves over their environment, of which the raylet's process id is what remains.
        return having("HARDPOINT_TEST", [session]) + having("RAY_RAYLET_PID", started)

    try:
        assert engine.stdout is not None
        line = engine.stdout.readline()
        while line and not line.strip().isdigit():
            line = engine.stdout.readline()
        assert line, engine.communicate()[1]
        rank = int(line)
        started += map(str, left())
        if killed:
            engine.kill()
        output, errors = engine.communicate(timeout=240)
        assert killed or "ended" in output, errors
        # Of a killed engine, Ray's own agents can outlive the cluster; no rank does.
        assert wait_until(lambda: is_gone(rank) if killed else not left())
    finally:
        for pid in left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
