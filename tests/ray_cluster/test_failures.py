"""What happens when an actor, its process or its machine goes: one typed error, and nothing left."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest
from ray.util import placement_group_table

from core.tests.executor.test_multi_process import is_gone, order, run_step, wait_until
from hardpoint.executor import RankLimits
from hardpoint.executor.ray import RayExecutor
from hardpoint.interfaces import SleepPlan, WorkerConfig
from hardpoint.interfaces.errors import ClusterError, ConfigError, DriverError, EngineDead, RankFailed
from hardpoint.plugins import Resolved
from tests.ray_cluster.conftest import OBJECT_STORE

Make = Callable[..., RayExecutor]
REPORTED_WITHIN = 5.0


def placed() -> int:
    """Return how many placement groups the cluster keeps room for."""
    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


def nothing_is_left(executor: RayExecutor, groups: int) -> bool:
    return all(map(is_gone, executor.pids)) and placed() == groups


@pytest.mark.parametrize("call", ["collect", "begin"])
def test_a_rank_whose_process_is_killed_is_reported_in_time_and_ends_all(call: str, make: Make, step: Any) -> None:
    groups = placed()
    executor = make(order(call, "kill", 1), order("collect", "hang", 0), ranks=2)
    run = (lambda: run_step(executor, step([1], 16))) if call == "collect" else (lambda: executor.change(SleepPlan()))
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 failed: its process has ended, or its machine \(on ") as raised:
        run()
    assert time.monotonic() - start < REPORTED_WITHIN
    assert raised.value.rank == 1
    assert "worker process has died" in raised.value.output
    executor.shutdown()
    assert wait_until(lambda: nothing_is_left(executor, groups))
    # In the same process, an engine can be made again.
    assert [status.missing_weights for status in make(ranks=2).call("status")] == [{"of rank 0"}, {"of rank 1"}]


def test_a_rank_that_ends_itself_or_raises_past_every_error_is_reported(make: Make, step: Any) -> None:
    executor = make(order("collect", "sys_exit"))
    with pytest.raises(RankFailed, match="rank 0 failed"):
        run_step(executor, step([1], 16))


def test_a_rank_that_dies_between_calls_ends_all_without_a_call(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    executor = make(ranks=2)
    os.kill(executor.pids[0], signal.SIGKILL)
    assert wait_until(lambda: all(map(is_gone, executor.pids)))
    assert wait_until(lambda: any("rank 0 failed" in message for message in caplog.messages))
    for _ in range(2):
        with pytest.raises(RankFailed, match="rank 0"):
            executor.call("status")


@pytest.mark.parametrize("waits", [False, True], ids=["well", "waits"])
def test_ranks_that_do_not_fail_alike_are_ended(waits: bool, make: Make, step: Any) -> None:
    others = (order("collect", "hang", 0),) if waits else ()
    executor = make(order("collect", "fail", 1), *others, ranks=2, limits={"behind": 0.5})
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 failed: it raised DriverError") as raised:
        run_step(executor, step([1], 16))
    assert time.monotonic() - start < REPORTED_WITHIN
    assert "Traceback" in raised.value.output
    assert isinstance(raised.value.__cause__, DriverError)
    assert wait_until(lambda: all(map(is_gone, executor.pids)))


def test_a_rank_that_hangs_is_ended_and_says_where_it_stood(make: Make, step: Any) -> None:
    groups = placed()
    executor = make(order("collect", "hang", 1), ranks=2, limits={"step": 0.5})
    with pytest.raises(RankFailed, match=r"rank 1 failed: it has not answered 'execute' within 0\.5 s") as raised:
        run_step(executor, step([1], 16))
    assert "in collect" in raised.value.output
    assert wait_until(lambda: nothing_is_left(executor, groups))


def test_a_rank_that_is_stopped_is_ended_by_the_limit_of_its_call(make: Make, step: Any) -> None:
    executor = make(ranks=2, limits={"step": 0.5})
    os.kill(executor.pids[1], signal.SIGSTOP)
    assert wait_until(lambda: "State:\tT" in Path(f"/proc/{executor.pids[1]}/status").read_text())
    with pytest.raises(RankFailed, match="rank 1 failed: it has not answered"):
        run_step(executor, step([1], 16))
    # Ray asks its process to end before it ends it.
    assert wait_until(lambda: all(map(is_gone, executor.pids)), 20.0)


def test_a_machine_that_is_gone_is_reported_in_time(make: Make, cluster: Any, step: Any) -> None:
    """Its processes end, so that their connections do; see docs/architecture.md for a machine that falls silent."""
    node = cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE, resources={"lone": 1})
    executor = make(order("collect", "hang"), ranks=2, ray={"resource": "lone"})
    assert len(set(executor.nodes)) == 2
    lost = executor.nodes.index(node.node_id)
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


# Start and end


@pytest.mark.parametrize(
    ("orders", "error", "text"),
    [
        ([order("made", "fail", 1)], DriverError, "rank 1: driver call fakeMalloc failed"),
        ([order("made", "exit", 1)], RankFailed, "rank 1 failed: its process has ended"),
        ([order("made", "hang", 0)], RankFailed, r"rank 0 failed: it has not answered 'start' within"),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_a_start_that_fails_leaves_nothing(orders: list[Any], error: type[Exception], text: str, make: Make) -> None:
    groups = placed()
    with pytest.raises(error, match=text):
        make(*orders, ranks=2, limits={"start": 6.0} if orders[0]["does"] == "hang" else None)
    assert wait_until(lambda: placed() == groups)


@pytest.mark.parametrize("end", ["shutdown", "forgotten", "hang"])
def test_nothing_is_left_however_it_ends(
    end: str, cluster: Any, step: Any, fake: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    groups, threads = placed(), threading.active_count()
    descriptor = fake.hardpoint_backend()
    resolved = Resolved(descriptor, descriptor.probe().devices[0])
    orders = json.dumps([order("shutdown", "hang")] if end == "hang" else [])
    executor = RayExecutor(resolved, WorkerConfig(model=orders, tensor_parallel_size=2), RankLimits(shutdown=0.3))
    pids = executor.pids
    run_step(executor, step([1], 16))
    assert placed() == groups + 1
    if end != "forgotten":
        executor.shutdown()
        executor.shutdown()
        with pytest.raises(EngineDead):
            run_step(executor, step([1], 16))
    del executor
    gc.collect()
    assert wait_until(lambda: all(map(is_gone, pids)) and placed() == groups)
    assert threading.active_count() <= threads
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


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
    from hardpoint.executor.ray import RayExecutor
    from hardpoint.interfaces import WorkerConfig
    from hardpoint.plugins import Resolved
    descriptor = fake.hardpoint_backend()
    resolved = Resolved(descriptor, descriptor.probe().devices[0])
    first, second = (RayExecutor(resolved, WorkerConfig(model=""), None, {{"resource": "CPU"}}) for _ in range(2))
    first.shutdown()
    assert ray.is_initialized()
    print(*second.pids, flush=True)
    if {waits}:
        time.sleep(60)
    second.shutdown()
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
        output, errors = engine.communicate(timeout=60)
        assert killed or "ended" in output, errors
        # Of a killed engine, Ray's own agents can outlive the cluster; no rank does.
        assert wait_until(lambda: is_gone(rank) if killed else not left(), 30.0)
    finally:
        for pid in left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
