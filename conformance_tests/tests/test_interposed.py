"""The driver that the suite puts between the core and another one."""

from __future__ import annotations

import pytest

from hardpoint.interfaces.errors import DeviceOutOfMemory, DriverError
from hardpoint.memory import DriverStatus
from hardpoint_conformance.interposed import InterposedDriver
from hardpoint_conformance.memory import PoolMemory, content, driver_of
from hardpoint_conformance.target import Target


@pytest.fixture
def cpu() -> Target:
    return Target.find("cpu")


def test_calls_are_counted_and_what_is_held_is_known(cpu: Target) -> None:
    memory = PoolMemory(InterposedDriver(driver_of(cpu)))
    unit = memory.unit
    memory.filled(content(2 * unit))
    held = memory.driver.held()
    assert (held["handles"], held["bytes"], held["mappings"], held["reservations"]) == (1, 2 * unit, 1, 1)
    assert memory.driver.calls()["create"] == 1
    memory.end()
    assert set(memory.driver.held().values()) == {0}


def test_the_nth_call_fails_as_often_as_asked(cpu: Target) -> None:
    driver = InterposedDriver(driver_of(cpu))
    driver.fail("device_count", 2, times=2)
    answers = []
    for _ in range(4):
        try:
            answers.append(driver.device_count())
        except DriverError as error:
            answers.append(error.call)
    assert answers == [1, "device_count", "device_count", 1]
    assert driver.disarm()
    assert not driver.disarm()
    driver.open()
    driver.fail(None, status=DriverStatus.OUT_OF_MEMORY)
    with pytest.raises(DeviceOutOfMemory):
        driver.geometry()
    driver.disarm()
    driver.close()


def test_a_replacement_may_change_what_the_entry_below_is_asked_and_says(cpu: Target) -> None:
    def device_count(call, count):  # type: ignore[no-untyped-def]
        status = call(count)
        count[0] += 6
        return status

    driver = InterposedDriver(driver_of(cpu), {"device_count": device_count})
    assert driver.device_count() == driver.base.device_count() + 6
    assert driver.device_name() == driver.base.device_name()
    with pytest.raises(KeyError, match="nothing"):
        InterposedDriver(driver_of(cpu), {"nothing": device_count})


def test_no_exception_leaves_an_entry(cpu: Target) -> None:
    def broken(call, *arguments):  # type: ignore[no-untyped-def]
        raise ValueError("no")

    driver = InterposedDriver(driver_of(cpu), {"device_count": broken})
    with pytest.raises(DriverError, match="no"):
        driver.device_count()
    assert [str(error) for error in driver.errors] == ["no"]


def test_broken_rules_are_noted(cpu: Target) -> None:
    driver = InterposedDriver(driver_of(cpu), {"release": lambda call, handle, size: DriverStatus.OK})
    driver.open()
    size = driver.geometry().granularity
    handle = driver.create(size)
    driver.release(handle, size)
    driver.release(handle, size)
    assert driver.broken_rules() == [f"release of {size} bytes where there are None"]
    driver.base.release(handle, size)
    driver.close()
