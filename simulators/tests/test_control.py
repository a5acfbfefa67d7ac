"""The control face: counts, texts, reset, and what the engine's own probes make of the libraries."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, get_args

import pytest

from hardpoint_simulators import Simulator, SimulatorError, library
from hardpoint_simulators.control import Setting

from .drivers import Driver, G


def test_statistics_follow_what_exists(driver: Driver) -> None:
    address, _ = driver.block(2, reserved=4)
    driver.pinned(4096)
    stream, _ = driver.stream(), driver.event()
    driver.fill(address, 1, 16, stream)
    stats = driver.simulator.stats()
    assert (stats.reservations, stats.address_space) == (1, 4 * G)
    assert (stats.handles, stats.mappings, stats.mapped_bytes, stats.used) == (1, 1, 2 * G, 2 * G)
    assert (stats.streams, stats.events, stats.pending) == (1, 1, 1)
    assert (stats.host_ranges, stats.host_bytes) == (1, 4096)
    assert (stats.violations, stats.allocations) == (0, 0)


def test_reset_frees_everything_and_forgets(driver: Driver) -> None:
    address, _ = driver.block()
    driver.fill(address, 1, 16, driver.stream())
    driver.pinned(4096)
    driver.simulator.capacity = 3 * G
    driver.simulator.fail("*", nth=100, code=7, times=-1)
    driver.release(12345)
    driver.simulator.reset()
    stats = driver.simulator.stats()
    assert (stats.reservations, stats.mappings, stats.handles, stats.used, stats.pending) == (0, 0, 0, 0, 0)
    assert (stats.streams, stats.host_ranges, stats.calls, stats.violations) == (0, 0, 0, 0)
    assert driver.simulator.capacity == 4 << 30
    assert [driver.create(G)[0] for _ in range(150)] == [0] * 150


def test_every_setting_can_be_read_and_written(driver: Driver) -> None:
    for name in get_args(Setting):
        value = driver.simulator.get(name)
        driver.simulator.set(name, value)
        assert driver.simulator.get(name) == value


@pytest.mark.parametrize(
    ("name", "value"), [("unheard_of", 1), ("granularity", 3), ("devices", 65), ("granularity", 0)]
)
def test_unknown_settings_and_senseless_values_are_refused(driver: Driver, name: Any, value: int) -> None:
    with pytest.raises(SimulatorError):
        driver.simulator.set(name, value)


def test_log_of_broken_rules_is_bounded_and_the_count_is_not(driver: Driver) -> None:
    for _ in range(1500):
        driver.release(12345)
    assert driver.simulator.stats().violations == 1500
    assert len(driver.simulator.violations()) == 1000


def test_two_simulators_of_a_vendor_are_one_machine(driver: Driver) -> None:
    driver.create(G)
    assert Simulator(driver.vendor).used() == G  # type: ignore[arg-type]


def test_vendors_do_not_share_a_machine(cuda: Driver, rocm: Driver, ascend: Driver) -> None:
    cuda.create(G)
    rocm.create(2 * G)
    assert [driver.simulator.used() for driver in (cuda, rocm, ascend)] == [G, 2 * G, 0]


@pytest.mark.parametrize("vendor", ["cuda", "rocm", "ascend"])
def test_library_says_that_it_is_simulated(vendor: Any) -> None:
    function = ctypes.CDLL(str(library(vendor))).hardpoint_simulated_driver
    function.restype = ctypes.c_char_p
    assert function() == vendor.encode()


def test_unknown_libraries_are_refused() -> None:
    with pytest.raises(ValueError, match="no simulated library for 'tpu'"):
        library("tpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'cuda' \(minimal\)"):
        library("cuda", minimal=True)


@pytest.mark.parametrize(
    ("vendor", "name", "version"),
    [
        ("cuda", "Simulated CUDA device", "13.0"),
        ("rocm", "Simulated ROCm device", "7.2"),
        ("ascend", "Ascend910B2", "1.17.0"),
    ],
)
def test_backends_probe_finds_the_simulated_device(
    vendor: Any, name: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(f"hardpoint_{vendor}") is None:
        pytest.skip(f"hardpoint-{vendor} is not installed here")
    descriptor = __import__(f"hardpoint_{vendor}.descriptor", fromlist=["descriptor"])
    monkeypatch.setenv(descriptor.DRIVER_VARIABLE, str(library(vendor)))
    monkeypatch.setenv("HARDPOINT_SIM_DEVICES", "2")
    devices = descriptor.probe().devices
    assert [(device.name, device.driver_version, device.simulated) for device in devices] == [(name, version, True)] * 2


def test_threads_work_side_by_side(driver: Driver) -> None:
    def cycles() -> None:
        driver.start()
        for value in range(20):
            address, handle = driver.block()
            stream = driver.stream()
            codes = [
                driver.fill(address, value, 4096, stream),
                driver.synchronize(stream),
                driver.read(address, 4096) != (0, bytes([value]) * 4096),
                driver.call(driver.stream_destroy, stream),
                driver.unmap(address, G),
                driver.release(handle),
                driver.free(address, G),
            ]
            assert not any(codes), codes

    with ThreadPoolExecutor(4) as pool:
        for finished in [pool.submit(cycles) for _ in range(4)]:
            finished.result()
    stats = driver.simulator.stats()
    assert (stats.used, stats.reservations, stats.streams, stats.violations) == (0, 0, 0, 0)
