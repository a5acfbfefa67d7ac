"""What only ranks in processes of this machine do; what holds for every transport is in `test_remote.py`."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from core.tests.executor.conftest import Make
from core.tests.executor.helpers import REPORTED_WITHIN, is_gone, order, run_step, wait_until
from hardpoint.executor import RemoteExecutor
from hardpoint.executor.transport import Deadline, Kind
from hardpoint.interfaces.errors import ConfigError, RankFailed
from tests.leaks import Belongings


@pytest.fixture
def make(make_over: Make, cold_processes: None) -> Make:
    return partial(make_over, "processes")


def test_ranks_are_processes_with_a_device_and_a_share_of_the_threads_each(make: Make) -> None:
    pair = make(ranks=2, device=1, threads=6)
    first, second = pair.pids
    paths = [model.path for model in pair.call("load")]
    assert paths == [f"pid {first} rank 0 device 1 3", f"pid {second} rank 1 device 2 3"]
    assert os.getpid() not in pair.pids


def test_a_frame_that_no_rank_understands_is_a_typed_end(make: Make) -> None:
    executor = make()
    executor._transport.send([0], Kind.RESULT, 1, [b"?"], Deadline("test", 60.0))
    with pytest.raises(RankFailed, match="exit code 1") as raised:
        executor.call("status")
    assert "MalformedMessage" in raised.value.output


@pytest.mark.parametrize(
    ("deed", "text", "output"),
    [
        ("exit", "its process ended with exit code 3", "the last words of this rank"),
        ("sys_exit", "its process ended with exit code 1", "sys.exit was called"),
        ("abort", "its process was ended by SIGABRT", "in collect"),
        ("stop", "its process has been stopped", ""),
        ("kill", "its process was ended by SIGKILL.*out of memory", ""),
    ],
)
def test_how_a_process_ended_and_its_last_words_are_said_when_all_are_gone(
    deed: str, text: str, output: str, make: Make, step: Any
) -> None:
    executor = make(order("collect", deed, 1), order("collect", "hang", 0), ranks=2)
    start = time.monotonic()
    with pytest.raises(RankFailed, match=text) as raised:
        run_step(executor, step([1], 16))
    assert time.monotonic() - start < REPORTED_WITHIN
    assert all(map(is_gone, executor.pids))
    assert raised.value.rank == 1
    assert output in raised.value.output


@pytest.mark.parametrize("free", [3, 7, 10])
def test_a_start_without_enough_files_leaves_nothing(free: int, make: Make) -> None:
    before = Belongings.now()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    try:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        for _ in range(free):
            os.close(fillers.pop())
        with pytest.raises((OSError, RuntimeError)):
            make()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
    assert Belongings.now().new_since(before) == []


def test_too_few_devices_are_refused_before_anything_is_started(make: Make) -> None:
    before = Belongings.now()
    with pytest.raises(ConfigError, match="4 ranks need 4 devices"):
        make(ranks=2, stages=2)
    assert Belongings.now().new_since(before) == []


PROGRAM = """
    import json, os, sys, time
    sys.path.insert(0, {site!r})
    import hardpoint_fake_ranks as fake
    from hardpoint.executor import ProcessTransport, RemoteExecutor
    from hardpoint.interfaces import WorkerConfig
    from hardpoint.plugins import Resolved
    descriptor = fake.hardpoint_backend()
    orders = json.dumps([{{"call": "start", "does": "hang"}}])
    resolved = Resolved(descriptor, descriptor.probe().devices[0])
    executor = RemoteExecutor(ProcessTransport(resolved, WorkerConfig(model=orders)))
    print(*executor.pids, flush=True)
    executor.call("start")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ranks_end_with_their_engine_whatever_ends_it(number: signal.Signals, fake: ModuleType) -> None:
    """Without a word of theirs, and in a script without a guard for its main module."""
    program = dedent(PROGRAM).format(site=str(Path(fake.__file__ or "").parent))
    engine = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert engine.stdout is not None
    (pid,) = map(int, engine.stdout.readline().split())
    assert not is_gone(pid)
    os.killpg(engine.pid, number)
    _, errors = engine.communicate(timeout=240)
    assert wait_until(lambda: is_gone(pid))
    assert "rank_main" not in errors
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)


def test_ranks_outlive_the_thread_that_made_them(make: Make) -> None:
    made: list[RemoteExecutor] = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert [status.missing_weights for status in made[0].call("status")] == [{"of rank 0"}]


def test_what_ranks_write_is_logged_with_their_number(make: Make, step: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hardpoint")
    executor = make(order("collect", "exit"))
    with pytest.raises(RankFailed):
        run_step(executor, step([1], 16))
    assert "rank 0: the last words of this rank" in caplog.messages
    assert any(record.levelname == "ERROR" and "rank 0 failed" in record.getMessage() for record in caplog.records)
