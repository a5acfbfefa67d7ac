"""What needs a process of its own: faults on access, settings of the environment, fork, and the report at exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .drivers import DRIVERS

PRELUDE = """
import ctypes, os, sys
sys.path.insert(0, os.environ["TESTS"])
from drivers import *
driver = DRIVERS[sys.argv[1]](Simulator(sys.argv[1]))
"""
START = "driver.start()\naddress, handle = driver.block()\n"
STARTED = PRELUDE + START

VENDORS = sorted(DRIVERS)


def run(script: str, vendor: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {f"HARDPOINT_SIM_{name.upper()}": value for name, value in environment.items()}
    return subprocess.run(
        [sys.executable, "-c", script, vendor],
        env=os.environ | settings | {"TESTS": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )


def passes(script: str, vendor: str, **environment: str) -> None:
    done = run(script, vendor, **environment)
    assert done.returncode == 0, done.stderr


def crashes(script: str, vendor: str, **environment: str) -> None:
    done = run(script + "\nprint('still alive')", vendor, **environment)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, ""), (done.returncode, done.stdout, done.stderr)


READ_BY_HOST = "ctypes.string_at(address, 1)"


@pytest.mark.parametrize("vendor", VENDORS)
def test_host_code_sees_mapped_memory(vendor: str) -> None:
    passes(STARTED + "driver.write(address, b'seen')\nassert ctypes.string_at(address, 4) == b'seen'", vendor)


@pytest.mark.parametrize("vendor", VENDORS)
def test_host_access_after_unmap_faults(vendor: str) -> None:
    crashes(STARTED + f"driver.unmap(address, G)\n{READ_BY_HOST}", vendor)


@pytest.mark.parametrize("vendor", VENDORS)
def test_host_access_to_a_freed_range_faults(vendor: str) -> None:
    crashes(STARTED + f"driver.unmap(address, G)\ndriver.free(address, G)\n{READ_BY_HOST}", vendor)


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_host_access_before_access_is_granted_faults(vendor: str) -> None:
    crashes(
        PRELUDE + f"driver.start()\n_, address = driver.reserve(G)\n_, handle = driver.create(G)\n"
        f"assert driver.map(address, G, handle) == 0\n{READ_BY_HOST}",
        vendor,
    )


@pytest.mark.parametrize("vendor", VENDORS)
def test_strict_host_faults_on_any_access_while_copies_work(vendor: str) -> None:
    copies = STARTED + "assert driver.write(address, b'ok') == 0 and driver.read(address, 2) == (0, b'ok')\n"
    passes(copies, vendor, strict_host="1")
    crashes(copies + READ_BY_HOST, vendor, strict_host="1")
    crashes(copies + f"driver.simulator.set('strict_host', 1)\n{READ_BY_HOST}", vendor)


@pytest.mark.parametrize("vendor", VENDORS)
def test_forked_child_gets_an_error_from_every_call_and_no_memory(vendor: str) -> None:
    script = (
        STARTED
        + """
driver.write(address, b"parent")
child = os.fork()
if child == 0:
    codes = {driver.create(G)[0], driver.reserve(G)[0], driver.unmap(address, G), driver.memory_info()[0]}
    try:
        driver.simulator.stats()
    except Exception as error:
        codes.add(type(error).__name__)
    os._exit(0 if codes == {driver.codes.not_initialized, "SimulatorError"} else 1)
assert os.waitpid(child, 0)[1] == 0
child = os.fork()
if child == 0:
    ctypes.memset(address, 0, 1)
    os._exit(0)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 11
assert driver.read(address, 6) == (0, b"parent")
assert driver.create(G)[0] == 0
"""
    )
    passes(script, vendor)


@pytest.mark.parametrize("vendor", VENDORS)
def test_child_forked_before_initialisation_begins_afresh(vendor: str) -> None:
    script = (
        PRELUDE
        + """
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
        + START
        + """
assert driver.write(address, b"own") == 0 and driver.read(address, 3) == (0, b"own")
if child == 0:
    os._exit(0)
"""
    )
    passes(script, vendor)


@pytest.mark.parametrize("vendor", ["ascend", "cuda"])
def test_calls_before_initialisation_are_refused(vendor: str) -> None:
    passes(PRELUDE + "assert driver.reserve(G)[0] == driver.codes.not_initialized", vendor)


@pytest.mark.parametrize(
    ("vendor", "check"),
    [
        ("cuda", "assert driver.call('cuInit', 0) == 100 and driver.reserve(G)[0] == 3"),
        ("rocm", "assert driver.make('hipGetDeviceCount') == (100, 0)"),
        ("ascend", "assert driver.call('aclInit', None) == 207004"),
    ],
)
def test_no_device_is_told_by_initialisation(vendor: str, check: str) -> None:
    passes(PRELUDE + check, vendor, devices="0")


@pytest.mark.parametrize("vendor", VENDORS)
def test_settings_are_taken_from_the_environment(vendor: str) -> None:
    script = (
        PRELUDE
        + """
get = driver.simulator.get
assert (get("capacity"), get("devices"), get("granularity")) == (1 << 30, 3, 65536)
assert (get("max_chunk"), get("deferred"), get("stale_pages"), get("hold_until_address_free")) == (1 << 20, 1, 1, 1)
driver.simulator.set("capacity", 5)
driver.simulator.reset()
assert get("capacity") == 1 << 30
"""
    )
    passes(
        script,
        vendor,
        capacity="0x40000000",
        devices="3",
        granularity="65536",
        max_chunk=str(1 << 20),
        deferred="1",
        quirks="stale_pages,hold_until_address_free,unheard_of",
    )


@pytest.mark.parametrize(("name", "value"), [("granularity", "3000"), ("granularity", "16"), ("devices", "1000")])
def test_settings_that_make_no_sense_are_left_out(name: str, value: str) -> None:
    script = PRELUDE + f"assert driver.simulator.get({name!r}) == (G if {name!r} == 'granularity' else 1)"
    passes(script, "cuda", **{name: value})


def test_faults_are_taken_from_the_environment() -> None:
    script = PRELUDE + "driver.start()\nassert [driver.create(G)[0] for _ in range(4)] == [0, 2, 2, 0]"
    passes(script, "cuda", fail="cuMemCreate:2:2:2,unreadable,noSuchCall:1:1")


LEAKS = {
    "address, handle = driver.block()": {"reservations not freed", "mappings not unmapped", "handles not released"},
    "driver.stream()": {"streams not destroyed"},
    "driver.event()": {"events not destroyed"},
    "driver.pinned(4096)": {"pinned host ranges not freed"},
}


@pytest.mark.parametrize("leak", sorted(LEAKS))
@pytest.mark.parametrize("vendor", VENDORS)
def test_report_at_exit_names_each_kind_of_leak(vendor: str, leak: str, tmp_path: Path) -> None:
    report = tmp_path / "leaks"
    passes(PRELUDE + f"driver.start()\n{leak}", vendor, leak_report=str(report))
    lines = [line for line in report.read_text().splitlines() if "context" not in line]
    assert len(lines) == len(LEAKS[leak])
    assert all(any(kind in line for line in lines) for kind in LEAKS[leak])


@pytest.mark.parametrize(
    ("vendor", "end"),
    [
        ("cuda", "driver.use(None)\nwhile driver.call('cuDevicePrimaryCtxRelease_v2', 0) == 0: pass\n"),
        ("ascend", "driver.call('aclrtResetDevice', 0)"),
        ("rocm", ""),
    ],
)
def test_report_at_exit_is_empty_when_nothing_is_left_and_tells_broken_rules(
    vendor: str, end: str, tmp_path: Path
) -> None:
    report = tmp_path / "leaks"
    script = STARTED + f"driver.unmap(address, G), driver.release(handle), driver.free(address, G)\n{end}"
    passes(script, vendor, leak_report=str(report))
    lines = report.read_text().splitlines()
    assert lines == (
        ["violation: cuDevicePrimaryCtxRelease_v2: the primary context is not retained"] if vendor == "cuda" else []
    )


@pytest.mark.parametrize("vendor", VENDORS)
def test_memory_freed_by_exit_handlers_is_no_leak(vendor: str, tmp_path: Path) -> None:
    report = tmp_path / "leaks"
    script = (
        "import atexit\n"
        + STARTED
        + """
atexit.register(lambda: (driver.unmap(address, G), driver.release(handle), driver.free(address, G)))
"""
    )
    passes(script, vendor, leak_report=str(report))
    assert "not freed" not in report.read_text()


def test_a_thousand_cycles_cost_no_address_space_and_no_memory() -> None:
    script = (
        PRELUDE
        + """
driver.start()
def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
def cycle():
    address, handle = driver.block()
    driver.fill(address, 1, 65536)
    assert driver.unmap(address, G) == driver.release(handle) == driver.free(address, G) == 0
for _ in range(50): cycle()
size, descriptors = status("VmSize"), len(os.listdir("/proc/self/fd"))
for _ in range(1000): cycle()
assert status("VmSize") - size < 4096  # kB, of the 2 GiB that went through
assert len(os.listdir("/proc/self/fd")) == descriptors
assert status("RssShmem") < 1024
"""
    )
    passes(script, "cuda")


def test_fork_while_other_threads_make_calls_hangs_nobody() -> None:
    script = (
        STARTED
        + """
import threading
ended = threading.Event()
def busy():
    driver.start()
    while not ended.is_set():
        driver.fill(address, 1, 65536)
threads = [threading.Thread(target=busy) for _ in range(2)]
for thread in threads: thread.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        os._exit(driver.create(G)[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == driver.codes.not_initialized
ended.set()
for thread in threads: thread.join()
"""
    )
    passes(script, "cuda")
