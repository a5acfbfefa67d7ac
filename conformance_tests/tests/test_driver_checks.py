"""The clauses about drivers accuse no driver that is right, and unlike those in this tree."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hardpoint.interfaces.errors import DriverError
from hardpoint.memory import DriverStatus
from hardpoint_conformance.device_memory import PREREQUISITES, DeviceMemory
from hardpoint_conformance.interposed import Call, InterposedDriver
from hardpoint_conformance.memory import assert_holds_nothing, driver_of
from hardpoint_conformance.suite import test_l1_driver as suite
from hardpoint_conformance.target import Target

POLLS = 3 * suite.MOST_CALLS


@pytest.fixture
def driver() -> Iterator[InterposedDriver]:
    """The CPU's driver, whose handles are of one unit each, and which asks its library over and over whether a stream is done."""
    below = driver_of(Target.find("cpu"))
    to_failure = 0

    def geometry(call: Call, found: Any) -> int:
        status = call(found)
        found[0].max_chunk = found[0].granularity
        return status

    def create(call: Call, size: int, handle: Any) -> int:
        return call(size, handle) if size == unit else DriverStatus.INVALID

    def poll(call: Call, *stream: int) -> int:
        nonlocal to_failure
        for _ in range(POLLS):
            to_failure -= 1
            if to_failure == 0:
                return DriverStatus.FAILED
        return call(*stream)

    def fail_call(nth: int) -> bool:
        nonlocal to_failure
        to_failure = nth
        return InterposedDriver.fail_call(made, nth)

    made = InterposedDriver(
        below, {"geometry": geometry, "create": create, "stream_synchronize": poll, "device_synchronize": poll}
    )
    made.fail_call = fail_call  # type: ignore[method-assign]
    made.open()
    unit = made.geometry().granularity
    yield made
    made.close()
    assert_holds_nothing(made)


@pytest.mark.parametrize("entry", PREREQUISITES)
def test_each_entry_may_fail_at_any_of_its_calls(driver: InterposedDriver, entry: str) -> None:
    suite.test_a_failure_within_the_driver_changes_nothing(driver, entry)


@pytest.mark.parametrize("entry", ["reserve", "create"])
def test_a_driver_that_fails_whichever_call_it_is_asked_to_is_found(driver: InterposedDriver, entry: str) -> None:
    fail_call = driver.fail_call
    driver.fail_call = lambda nth: fail_call(min(nth, 1))  # type: ignore[method-assign]
    with pytest.raises(DriverError):
        suite.test_a_failure_within_the_driver_changes_nothing(driver, entry)
    fail_call(0)


@pytest.mark.parametrize(
    "check",
    [suite.test_a_handle_of_several_units_is_mapped_whole, suite.test_new_memory_is_what_the_flags_say],
)
def test_a_handle_may_be_of_one_unit_alone(driver: InterposedDriver, check: Callable[[InterposedDriver], None]) -> None:
    check(driver)


def test_memory_is_made_of_as_many_handles_as_it_takes(driver: InterposedDriver) -> None:
    unit = driver.geometry().granularity
    for units in (1, 2, 3):
        device = DeviceMemory(driver, units * unit).do(
            "reserve", "create", "map", "stream_create", "fill", "copy_to_host"
        )
        device.do("stream_synchronize")
        assert (len(device.handles), driver.held()["mappings"]) == (units, units)
        assert device.read() == ctypes.string_at(device.address, units * unit) == b"\x5a" * (units * unit)
        device.close()
