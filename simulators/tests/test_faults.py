"""Calls that are made to fail, or to take time, and the counts of calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hardpoint_simulators import SimulatorError
from hardpoint_simulators.control import ANY_CALL

from .drivers import DRIVERS, Driver, G

CODE = 999


def test_nth_call_fails_once_with_the_code_asked_for(driver: Driver) -> None:
    create = call_names(driver)["create"]
    driver.simulator.fail(create, nth=3, code=CODE)
    assert [driver.create(G)[0] for _ in range(5)] == [0, 0, CODE, 0, 0]
    assert driver.simulator.used() == 4 * G
    assert driver.simulator.violations() == []


def test_fault_counts_from_the_moment_it_is_asked_for(driver: Driver) -> None:
    create = call_names(driver)["create"]
    driver.create(G)
    driver.simulator.fail(create, nth=1, code=CODE)
    assert [driver.create(G)[0] for _ in range(2)] == [CODE, 0]


@pytest.mark.parametrize(("times", "codes"), [(2, [0, CODE, CODE, 0]), (-1, [0, CODE, CODE, CODE])])
def test_fault_lasts_as_long_as_asked(driver: Driver, times: int, codes: list[int]) -> None:
    driver.simulator.fail(call_names(driver)["create"], nth=2, code=CODE, times=times)
    assert [driver.create(G)[0] for _ in range(4)] == codes


def test_any_call_counts_the_calls_of_all_functions(driver: Driver) -> None:
    driver.simulator.fail(ANY_CALL, nth=2, code=CODE)
    assert driver.reserve(G)[0] == 0
    assert driver.create(G)[0] == CODE
    assert driver.create(G)[0] == 0


def test_cleared_faults_do_not_fire(driver: Driver) -> None:
    driver.simulator.fail(ANY_CALL, code=CODE, times=-1)
    driver.simulator.clear_faults()
    assert driver.create(G)[0] == 0


def test_version_suffix_of_a_function_is_optional(cuda: Driver) -> None:
    for name in ("cuMemGetInfo", "cuMemGetInfo_v2", "cuMemcpyHtoD", "cuMemCreate"):
        cuda.simulator.fail(name, code=CODE)
    assert cuda.memory_info()[0] == CODE
    assert cuda.memory_info()[0] == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda d: d.simulator.fail("noSuchCall"),
        lambda d: d.simulator.fail("*", nth=0),
        lambda d: d.simulator.fail("*", times=0),
    ],
)
def test_fault_that_could_never_fire_is_refused(driver: Driver, call: Callable[[Driver], None]) -> None:
    with pytest.raises(SimulatorError, match="was refused"):
        call(driver)


def test_delay_changes_no_result_and_unknown_functions_are_refused(driver: Driver) -> None:
    driver.simulator.delay(call_names(driver)["create"], 0.001)
    assert driver.create(G)[0] == 0
    with pytest.raises(SimulatorError):
        driver.simulator.delay("noSuchCall", 0.001)


def test_calls_are_counted_by_function_and_failed_ones_too(driver: Driver) -> None:
    create = call_names(driver)["create"]
    driver.simulator.fail(create, code=CODE)
    for _ in range(3):
        driver.create(G)
    assert driver.simulator.calls() == {create: 3}
    assert driver.simulator.call_count(create) == driver.simulator.stats().calls == 3
    with pytest.raises(SimulatorError):
        driver.simulator.call_count("noSuchCall")


def call_names(driver: Driver) -> dict[str, str]:
    """Return the vendor's name of each step."""
    return {
        "cuda": {
            "reserve": "cuMemAddressReserve",
            "create": "cuMemCreate",
            "map": "cuMemMap",
            "access": "cuMemSetAccess",
            "unmap": "cuMemUnmap",
            "release": "cuMemRelease",
            "free": "cuMemAddressFree",
        },
        "rocm": {
            "reserve": "hipMemAddressReserve",
            "create": "hipMemCreate",
            "map": "hipMemMap",
            "access": "hipMemSetAccess",
            "unmap": "hipMemUnmap",
            "release": "hipMemRelease",
            "free": "hipMemAddressFree",
        },
        "ascend": {
            "reserve": "aclrtReserveMemAddress",
            "create": "aclrtMallocPhysical",
            "map": "aclrtMapMem",
            "access": "aclrtMemSetAccess",
            "unmap": "aclrtUnmapMem",
            "release": "aclrtFreePhysical",
            "free": "aclrtReleaseMemAddress",
        },
    }[driver.vendor]


def run_all_steps(driver: Driver) -> list[tuple[str, int]]:
    """Make and unmake a block, repeating each call that is made to fail; return (step, code) of every call."""
    codes: list[tuple[str, int]] = []

    def step(name: str, call: Callable[[], tuple[int, int]]) -> int:
        while True:
            code, made = call()
            codes.append((name, code))
            if code != CODE:
                return made

    address = step("reserve", lambda: driver.reserve(G))
    handle = step("create", lambda: driver.create(G))
    step("map", lambda: (driver.map(address, G, handle), 0))
    step("access", lambda: (driver.access(address, G), 0))
    step("unmap", lambda: (driver.unmap(address, G), 0))
    step("release", lambda: (driver.release(handle), 0))
    step("free", lambda: (driver.free(address, G), 0))
    return codes


@pytest.mark.parametrize("vendor", sorted(DRIVERS))
@pytest.mark.parametrize("failing", ["reserve", "create", "map", "access", "unmap", "release", "free"])
def test_failed_call_has_no_effect_and_its_repetition_works(
    vendor: str, failing: str, request: pytest.FixtureRequest
) -> None:
    driver: Driver = request.getfixturevalue(vendor)
    driver.simulator.fail(call_names(driver)[failing], code=CODE)
    codes = run_all_steps(driver)
    assert [name for name, code in codes if code == CODE] == [failing]
    assert [name for name, code in codes if code == 0] == list(call_names(driver))
    assert driver.simulator.stats().used == 0
    assert not [line for line in driver.simulator.leaks() if "context" not in line]
    assert driver.simulator.violations() == []
