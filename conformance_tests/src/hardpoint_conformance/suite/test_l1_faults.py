"""Level 1: any call of the driver may fail at any time, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint.interfaces import Policy, SleepPlan
from hardpoint.interfaces.errors import DeviceOutOfMemory, DriverError, ForeignMemory, HostBudgetExceeded, MemoryFault
from hardpoint.memory import DriverQuirks, DriverStatus, VirtualPool
from hardpoint_conformance.clauses import clause, proves
from hardpoint_conformance.fault_matrix import OPERATIONS, InterposedTarget, Operation, run_operation
from hardpoint_conformance.interposed import InterposedDriver
from hardpoint_conformance.levels import Level
from hardpoint_conformance.memory import Block, PoolMemory, assert_holds_nothing, content, differences, driver_of
from hardpoint_conformance.target import Target


def _cases() -> Iterator[object]:
    for operation in OPERATIONS:
        marks = [proves("memory.elastic")] if operation.elastic else []
        if "disk" in operation.name:
            marks.append(proves("memory.tier.disk"))
        yield pytest.param(operation, id=operation.name.replace(",", "").replace(" ", "-"), marks=marks)


def filled(memory: PoolMemory) -> dict[Block, bytes]:
    """Return allocations of two tags with their bytes, some of several chunks, small ones too."""
    unit = memory.unit
    sizes = {"weights": (2 * unit + 1, unit), "kv_cache": (unit, 700)}
    data = {
        memory.filled(content(size, seed), tag): content(size, seed)
        for seed, (tag, own) in enumerate(sizes.items())
        for size in own
    }
    memory.filled(content(unit, 9), "scratch", Policy.DISCARD)
    return data


def assert_bytes(memory: PoolMemory, data: dict[Block, bytes]) -> None:
    """Assert that everything is awake with its bytes, or asleep with its backup, one way or the other by allocation."""
    for block, expected in data.items():
        asleep = memory.pool.is_asleep(block.address)
        assert (memory.read_backup(block) if asleep else memory.read(block)) == expected, block


@clause("alloc.fault.wake-oom@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 17")
def test_out_of_memory_on_wake_undoes_it(pool_memory: PoolMemory) -> None:
    """Out of memory at any allocation of a wake, whichever it is, undoes the wake: everything is asleep, the backups are there, the
    driver holds what it held, and a later wake restores every byte."""
    data = filled(pool_memory)
    driver = pool_memory.driver
    before = driver.calls()["create"]
    pool_memory.sleep()
    pool_memory.wake()
    creates = driver.calls()["create"] - before
    assert creates >= len(data)
    for nth in range(1, creates + 1):
        pool_memory.sleep()
        held = driver.held()
        driver.fail("create", nth)
        with pytest.raises(DeviceOutOfMemory):
            pool_memory.wake()
        assert driver.disarm(), "the call that was to fail was never made"
        assert differences(held, driver.held(), ["streams"]) == {}
        assert pool_memory.stats().asleep == {"weights", "kv_cache", "scratch"}
        assert_bytes(pool_memory, data)
        pool_memory.wake()
        assert_bytes(pool_memory, data)


@clause("alloc.fault.any-call@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 18")
@pytest.mark.parametrize("operation", list(_cases()))
def test_any_failing_call_leaves_the_state_before(target: Target, operation: Operation, tmp_path: Path) -> None:
    """Whichever call of the driver fails within an operation: a typed error with the state before, all bytes and nothing leaked, after
    which the operation succeeds; or no error, where the failure costs nothing, and all of the work done. A commit raises nothing."""
    interposed = InterposedTarget(target.name, driver_of(target))
    if operation.elastic and not interposed.elastic:
        interposed.finish()
        pytest.skip("not testable here: the driver's quirks leave no elastic memory")
    rows = list(run_operation(interposed, operation, str(tmp_path)))
    interposed.finish()
    assert [f"{row.call} {text}" for row in rows for text in row.failures] == []
    if operation.ending is None:
        assert sum(row.undone for row in rows) >= 3
    else:
        assert sum(row.undone + row.tolerated for row in rows) > 0


@clause("alloc.fault.dead-driver@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 18")
@pytest.mark.parametrize("operation", ["sleep", "wake"])
def test_a_driver_that_fails_on_and_on_loses_nothing(pool_memory: PoolMemory, operation: str) -> None:
    """Where every call fails from some point on, those that undo included, the error is typed and no preserved byte is lost: once the
    driver works again, a wake brings everything back."""
    data = filled(pool_memory)
    driver = pool_memory.driver
    for nth in (1, 2, 3, 5, 8, 13, 21):
        pool_memory.wake()
        if operation == "wake":
            pool_memory.sleep()
        driver.fail(None, nth, times=-1)
        try:
            getattr(pool_memory, operation)()
        except (DriverError, DeviceOutOfMemory, HostBudgetExceeded):
            pass
        else:
            assert nth > 3, "no call failed"
        driver.disarm()
        try:
            pool_memory.wake()
        except ForeignMemory:
            # Given up for its memory, an address can be lost to others; the bytes are not.
            assert DriverQuirks.ADDRESS_HOLDS_MEMORY in driver.quirks()
            assert_bytes(pool_memory, data)
            return
        assert pool_memory.stats().asleep == frozenset()
        assert_bytes(pool_memory, data)


@clause("alloc.fault.allocate@1", Level.MEMORY, facts="allocator fact 18, allocator fact 22")
@pytest.mark.parametrize("entry", ["reserve", "create", "map"])
def test_a_failed_allocation_keeps_nothing(pool_memory: PoolMemory, entry: str) -> None:
    """An allocation that fails at any of its calls keeps no handle, mapping, address or line in the books, and the next succeeds."""
    driver = pool_memory.driver
    size = 2 * pool_memory.unit
    chunks = 3 if (driver.geometry().max_chunk or 1 << 62) < 1 << 30 else 1
    if chunks > 1:
        size = 2 * driver.geometry().max_chunk + pool_memory.unit
    for nth in range(1, (1 if entry == "reserve" else chunks) + 1):
        held = driver.held()
        driver.fail(entry, nth)
        with pytest.raises(DeviceOutOfMemory if entry == "create" else DriverError):
            pool_memory.allocate(size)
        assert driver.disarm(), "the call that was to fail was never made"
        assert driver.held() == held
        assert (pool_memory.stats().allocated, pool_memory.mapped()) == (0, 0)
        pool_memory.free(pool_memory.allocate(size))


@clause("alloc.fault.free@1", Level.MEMORY, facts="allocator fact 18, allocator fact 25")
@pytest.mark.parametrize("entry", ["unmap", "release", "release_address"])
def test_memory_that_is_not_taken_back_is_tried_again(pool_memory: PoolMemory, entry: str) -> None:
    """Freed memory that the driver does not take back leaves the tag's books, is counted as unreturned, and is offered again."""
    block = pool_memory.filled(content(2 * pool_memory.unit))
    other = pool_memory.filled(content(1000), "kv_cache")
    pool_memory.driver.fail(entry)
    pool_memory.free(block)
    assert pool_memory.driver.disarm(), "the call that was to fail was never made"
    assert pool_memory.stats().tags["weights"].allocated == 0
    if 1 in pool_memory.claims.sleep_levels:
        pool_memory.sleep()
    pool_memory.wake()
    assert pool_memory.pool.books().unreturned == 0
    assert pool_memory.driver.held()["bytes"] == pool_memory.mapped()
    assert pool_memory.read(other) == content(1000)


@clause("alloc.fault.open@1", Level.MEMORY, facts="allocator fact 18")
@pytest.mark.parametrize("entry", ["open", "geometry", "quirks"])
def test_a_device_that_cannot_be_opened_is_not_kept_open(target: Target, entry: str) -> None:
    """Where opening a device fails at any of its calls the error is typed and the device is closed again; the next attempt works."""
    driver = InterposedDriver(driver_of(target))
    if entry not in driver.entries:
        return  # nothing to fail
    driver.fail(entry)
    with pytest.raises(DriverError):
        VirtualPool(driver)
    assert driver.disarm(), "the call that was to fail was never made"
    calls = driver.calls()
    assert calls.get("close", 0) == calls["open"] - (entry == "open")
    memory = PoolMemory(driver)
    block = memory.filled(content(1000))
    assert memory.read(block) == content(1000)
    memory.end()
    calls = driver.calls()
    assert calls["close"] == calls["open"] - (entry == "open")
    assert_holds_nothing(driver)


@clause("alloc.fault.typed@1", Level.MEMORY, facts="allocator fact 21, allocator fact 22")
@pytest.mark.parametrize(
    "status",
    [DriverStatus.OUT_OF_MEMORY, DriverStatus.INVALID, DriverStatus.UNSUPPORTED, DriverStatus.FAILED],
    ids=lambda status: status.name.lower().replace("_", "-"),
)
def test_a_failure_is_a_typed_error(
    pool_memory: PoolMemory, status: DriverStatus, capfd: pytest.CaptureFixture[str]
) -> None:
    """A failing call is a typed error with the driver's words in it: DeviceOutOfMemory, a MemoryError, where memory is missing, else
    DriverError with call and code. It is raised once, nothing is printed, and no later call meets it again."""
    pool_memory.driver.fail("create", status=status)
    with pytest.raises(MemoryFault, match="injected") as caught:
        pool_memory.allocate(1000)
    if status is DriverStatus.OUT_OF_MEMORY:
        assert isinstance(caught.value, DeviceOutOfMemory)
        assert isinstance(caught.value, MemoryError)
    else:
        assert isinstance(caught.value, DriverError)
        assert (caught.value.call, caught.value.code) == ("create", -1)
    assert pool_memory.driver.disarm(), "the call that was to fail was never made"
    block = pool_memory.filled(content(1000))
    if 1 in pool_memory.claims.sleep_levels:
        pool_memory.sleep()
        pool_memory.wake()
    assert pool_memory.read(block) == content(1000)
    assert capfd.readouterr() == ("", "")


@clause(
    "alloc.fault.pinning@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 18, allocator fact 20"
)
@pytest.mark.parametrize(
    "status", [DriverStatus.UNSUPPORTED, DriverStatus.OUT_OF_MEMORY], ids=["unsupported", "out-of-memory"]
)
def test_host_memory_that_cannot_be_pinned(target: Target, status: DriverStatus) -> None:
    """Where pinning is unsupported, backups go to ordinary host memory; where the host has no memory to pin, the sleep is refused with
    HostBudgetExceeded and everything stays awake."""
    memory = PoolMemory(InterposedDriver(driver_of(target)))
    block = memory.filled(content(2 * memory.unit))
    memory.driver.fail("host_register", times=-1, status=status)
    if status is DriverStatus.OUT_OF_MEMORY and "host_register" in memory.driver.entries:
        with pytest.raises(HostBudgetExceeded):
            memory.sleep(SleepPlan())
        assert memory.stats().asleep == frozenset()
        memory.driver.disarm()
    memory.sleep()
    memory.wake()
    assert memory.read(block) == content(2 * memory.unit)
    memory.end()
