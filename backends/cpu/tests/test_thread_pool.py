"""The work-sharing pool: every item exactly once, whoever calls, and at little cost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from hardpoint_cpu import _native


@pytest.fixture(autouse=True)
def _restore_threads():
    threads = _native.num_threads()
    yield
    _native.set_num_threads(threads)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("threads", [1, 2, 4, 9])
@pytest.mark.parametrize(("items", "grain"), [(0, 1), (1, 1), (7, 3), (1000, 1), (1000, 7), (1000, 5000), (5, 0)])
def test_every_item_runs_once(threads, items, grain):
    _native.set_num_threads(threads)
    for _ in range(20):
        assert _native.count_items(items, grain) == [1] * items


@pytest.mark.parametrize("threads", [1, 3])
def test_nested_jobs_run_inline(threads):
    _native.set_num_threads(threads)
    assert _native.count_items(50, 1, inner=20) == [20] * 50


def test_several_callers_share_the_pool():
    _native.set_num_threads(3)
    wrong: list[int] = []

    def call() -> None:
        wrong.extend(sum(count != 1 for count in _native.count_items(300, 2)) for _ in range(200))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(wrong) == 800
    assert sum(wrong) == 0


def test_number_of_threads_can_change_between_jobs_of_other_callers():
    stop = threading.Event()
    results: list[bool] = []

    def call() -> None:
        while not stop.is_set():
            results.append(_native.count_items(100, 1) == [1] * 100)

    caller = threading.Thread(target=call)
    caller.start()
    for n in (1, 4, 2, 8, 3) * 4:
        _native.set_num_threads(n)
    stop.set()
    caller.join()
    assert results
    assert all(results)


@pytest.mark.parametrize("n", [0, -1, 5000])
def test_impossible_number_of_threads_is_refused(n):
    with pytest.raises(ValueError, match="from 1 to 4096"):
        _native.set_num_threads(n)


def test_forked_child_has_a_working_pool():
    code = """
import os, signal
from hardpoint_cpu import _native
_native.set_num_threads(3)
for _ in range(5):
    assert _native.count_items(100, 1) == [1] * 100
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        ok = _native.num_threads() == 3 and all(_native.count_items(500, 1) == [1] * 500 for _ in range(20))
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _native.count_items(100, 1) == [1] * 100
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_fork_while_another_thread_runs_jobs():
    code = """
import os, signal, threading
from hardpoint_cpu import _native
_native.set_num_threads(3)
stop = threading.Event()
def busy():
    while not stop.is_set(): _native.count_items(200, 1)
thread = threading.Thread(target=busy); thread.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if _native.count_items(500, 1) == [1] * 500 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stop.set(); thread.join()
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("seconds", [0, 0.05], ids=["spinning", "sleeping"])
def test_process_ends_cleanly_with_idle_helpers(seconds):
    code = f"""
import time
from hardpoint_cpu import _native
_native.set_num_threads(4)
_native.count_items(1000, 1)
time.sleep({seconds})
"""
    result = run_python(code)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("call", ["count_items(50, 1)", "job_seconds(50, 2)"])
def test_process_ends_cleanly_while_a_daemon_thread_computes(call):
    code = f"""
import threading, time
from hardpoint_cpu import _native
begun = threading.Event()
def busy():
    while True:
        _native.{call}
        begun.set()
threading.Thread(target=busy, daemon=True).start()
begun.wait()
"""
    result = run_python(code)
    assert (result.returncode, result.stderr) == (0, "")


def test_number_of_threads_comes_from_the_environment():
    code = "from hardpoint_cpu import _native; print(_native.num_threads())"
    assert run_python(code, HARDPOINT_CPU_THREADS="5").stdout.strip() == "5"
    usable = str(len(os.sched_getaffinity(0)))
    assert run_python(code, HARDPOINT_CPU_THREADS="").stdout.strip() == usable
    refused = run_python(code, HARDPOINT_CPU_THREADS="many")
    assert refused.returncode != 0
    assert "HARDPOINT_CPU_THREADS must be an integer from 1 to 4096, not 'many'" in refused.stderr


@pytest.mark.parametrize("value", ["abc", "0", "-1", "1.5", "9" * 30, "3 \udcff"])
def test_an_impossible_number_in_the_environment_is_one_typed_error(value):
    code = """
from hardpoint.interfaces.errors import ConfigError
from hardpoint_cpu.platform import CpuPlatform
for threads in (None, 3):
    try:
        CpuPlatform(None).start(threads)
    except ConfigError as error:
        print(ascii(str(error)))
"""
    result = run_python(code, HARDPOINT_CPU_THREADS=value)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first == second
    assert "HARDPOINT_CPU_THREADS must be an integer from 1 to 4096: '" in first
    assert value.rstrip("\udcff") in first


def test_a_job_costs_microseconds():
    """The aim is 2 microseconds; the bound leaves room for a machine that others use too."""
    _native.set_num_threads(2)
    assert min(_native.job_seconds(2000, 2) for _ in range(5)) < 50e-6
