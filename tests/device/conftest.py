"""The driver under test. Does not import torch: the tests run where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hardpoint.memory import VirtualPool
from hardpoint_conformance.fault_matrix import World

from .targets import DEVICE, SIMULATION_EXPECTED, DeviceTarget, asked_for, without_hardware


def pytest_report_header() -> str:
    """Say what the tests run on."""
    if not DEVICE:
        return "device tests: no device was asked for (HARDPOINT_DEVICE); on the CPU and on simulated drivers"
    return f"device tests: {DEVICE}{' (simulated)' if SIMULATION_EXPECTED else ''}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test on the device asked for, or on all drivers that need none."""
    if "target" not in metafunc.fixturenames:
        return
    names = [DEVICE] if DEVICE else ["cuda:0", "rocm:0", "ascend:0"]
    if not DEVICE and "vendors_target" not in metafunc.fixturenames:
        names.insert(0, "cpu:0")
    simulated = SIMULATION_EXPECTED if DEVICE else None
    ids = [name + ("-simulated" if simulated or (simulated is None and name != "cpu:0") else "") for name in names]
    metafunc.parametrize("target", names, ids=ids, indirect=True)


@pytest.fixture
def target(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[DeviceTarget]:
    """The driver, held open; at the end it has as much free memory as before."""
    made = asked_for() if DEVICE else without_hardware(request.param.partition(":")[0])
    record_property("simulated", made.table.simulated)
    made.table.open()
    before = made.free()
    yield made
    returned = made.has_free(before)
    made.table.close()
    assert returned, "device memory is missing"


@pytest.fixture
def vendors_target(target: DeviceTarget) -> DeviceTarget:
    """The driver, where it is over a vendor's library: not on the host."""
    return target


@pytest.fixture
def new_world(target: DeviceTarget, tmp_path: Path) -> Iterator[Callable[[], World]]:
    """Make pools on the device; at the end they are woken and freed."""
    worlds: list[World] = []

    def make() -> World:
        worlds.append(World(VirtualPool(target.table), str(tmp_path)))
        return worlds[-1]

    yield make
    for world in worlds:
        world.pool.wake()
        world.close()


@pytest.fixture
def world(new_world: Callable[[], World]) -> World:
    """A pool on the device."""
    return new_world()
