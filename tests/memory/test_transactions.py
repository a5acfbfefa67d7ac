"""Sleep and wake in two phases: what the clauses of the suite do not say of the core's own engine."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hardpoint.interfaces import FileExtent, Policy, SleepPlan, SleepTier
from hardpoint.interfaces.errors import DeviceOutOfMemory, DriverError, MemoryAsleep, MemoryBusy
from hardpoint_conformance.fault_matrix import FaultTarget
from hardpoint_conformance.interposed import InterposedDriver
from hardpoint_conformance.memory import content, files_below, wait_until
from hardpoint_conformance.memory_model import TrackedPool


def filled(pool: TrackedPool) -> dict[int, bytes]:
    sizes = {"weights": 2 * pool.unit + 5, "kv_cache": 900}
    return {
        pool.filled(content(size, seed), tag, shared=size < 1000): content(size, seed)
        for seed, (tag, size) in enumerate(sizes.items())
    }


def assert_awake(pool: TrackedPool, data: dict[int, bytes]) -> None:
    pool.wake()
    assert pool.stats().asleep == frozenset()
    for address, expected in data.items():
        assert pool.read(address, len(expected)) == expected


@pytest.mark.parametrize("tier", list(SleepTier), ids=lambda tier: tier.value)
def test_a_rollback_leaves_no_backup_at_any_tier(pool: TrackedPool, tier: SleepTier, tmp_path: Path) -> None:
    data = filled(pool)
    if tier is SleepTier.SOURCE:
        for address, expected in data.items():
            file = tmp_path / f"source{address}"
            file.write_bytes(expected)
            pool.declare_source(address, len(expected), [FileExtent(0, len(expected), str(file), 0)])
    backups = tmp_path / "backups"
    before = pool.stats()
    transaction = pool.begin_sleep(SleepPlan(tier=tier, disk_directory=str(backups)))
    transaction.rollback()
    assert pool.stats() == before
    assert pool.books().host_used == 0
    assert wait_until(lambda: pool.books().disk_used == 0)  # large files are removed in the background
    assert max(files_below(backups).values(), default=0) < pool.unit
    pool.begin_sleep(SleepPlan(tier=tier, disk_directory=str(backups))).commit()
    assert_awake(pool, data)


@pytest.mark.parametrize("kind", ["sleep", "wake"])
def test_no_ending_but_a_sleeps_rollback_needs_the_driver(target: FaultTarget, kind: str) -> None:
    """Every call of the driver fails from the preparation on: commits succeed, and so does the rollback of a wake."""
    driver = InterposedDriver(target.table())
    pool = TrackedPool(driver)
    data = filled(pool)
    endings = ["commit"] if kind == "sleep" else ["rollback", "commit"]
    for ending in endings:
        if kind == "wake":
            pool.sleep(SleepPlan())
        transaction = pool.begin_sleep(SleepPlan()) if kind == "sleep" else pool.begin_wake()
        driver.fail(None, times=-1)
        getattr(transaction, ending)()
        driver.disarm()
        assert bool(pool.stats().asleep) is ((kind == "sleep") is (ending == "commit"))
        if target.elastic:
            assert_awake(pool, data)
        else:  # an address that was given up may be lost, but no byte is
            for address, expected in data.items():
                read = pool.read_backup if pool.is_asleep(address) else pool.read
                assert read(address, len(expected)) == expected
    pool.free_all()


@pytest.mark.parametrize("length", [2, 4])
def test_no_run_of_failing_calls_loses_memory(target: FaultTarget, length: int) -> None:
    """The second failure is met where the first one is undone, by the core or within an entry of the driver."""
    for first in range(1, 24):
        pool = TrackedPool(target.table())
        data = content(3 * pool.unit)
        target.fail_calls(*range(first, first + length))
        with suppress(DriverError, DeviceOutOfMemory):
            address = pool.allocate(pool.unit, capacity=len(data) if target.elastic else 0)
            if target.elastic:
                pool.resize(address, len(data))
        target.disarm()
        for address in pool.living if target.elastic else ():
            pool.resize(address, len(data))
            pool.write(address, data)
            assert pool.read(address, len(data)) == data
        pool.free_all()
        assert pool.books().unreturned == 0
        del pool
        left = target.left()
        assert dict(left) == dict.fromkeys(left, 0), f"calls {first} to {first + length - 1}"


def test_a_sleep_that_cannot_be_rolled_back_is_asleep_with_its_bytes(target: FaultTarget) -> None:
    driver = InterposedDriver(target.table())
    pool = TrackedPool(driver)
    data = filled(pool)
    transaction = pool.begin_sleep(SleepPlan())
    driver.fail("map", times=-1)
    with pytest.raises(DriverError):
        transaction.rollback()
    driver.disarm()
    assert pool.stats().asleep == {"weights", "kv_cache"}
    for address, expected in data.items():
        assert pool.read_backup(address, len(expected)) == expected
    assert_awake(pool, data)
    pool.free_all()


def test_what_waits_for_an_operation_is_refused_once_that_is_held(cpu_pool: TrackedPool) -> None:
    data = filled(cpu_pool)
    refused: list[BaseException] = []

    def sleep() -> None:
        try:
            cpu_pool.sleep(SleepPlan())
        except MemoryBusy as error:
            refused.append(error)

    waiter = threading.Thread(target=sleep)

    def progress(done: int, in_all: int) -> None:
        if waiter.ident is None:
            waiter.start()
            time.sleep(0.05)
        assert not refused, "a sleep that is under way is waited for"

    transaction = cpu_pool.begin_sleep(SleepPlan(progress=progress))
    waiter.join(240)
    assert not waiter.is_alive()
    assert len(refused) == 1
    transaction.rollback()
    assert_awake(cpu_pool, data)


def test_the_time_between_the_phases_is_nobodys(cpu_pool: TrackedPool) -> None:
    filled(cpu_pool)
    for begin in (lambda: cpu_pool.begin_sleep(SleepPlan()), cpu_pool.begin_wake):
        start = time.perf_counter()
        transaction = begin()
        busy = time.perf_counter() - start
        time.sleep(0.05)
        start = time.perf_counter()
        seconds = transaction.commit().seconds
        busy += time.perf_counter() - start
        assert 0 < seconds["total"] <= busy
        assert sum(value for phase, value in seconds.items() if phase != "total") <= busy


def test_a_pool_that_is_closed_meanwhile_can_still_end_it(pool: TrackedPool) -> None:
    data = filled(pool)
    transaction = pool.begin_sleep(SleepPlan())
    pool.close()
    transaction.rollback()
    assert pool.stats().asleep == frozenset()
    assert pool.stats().allocated == sum(map(len, data.values()))


def test_callbacks_belong_to_the_preparation(pool: TrackedPool) -> None:
    data = content(pool.unit)
    address = pool.filled(data, policy=Policy.REBUILD)
    written: list[int] = []

    def rebuild() -> None:
        written.append(address)
        if len(written) == 1:
            raise LookupError("not yet")
        pool.write(address, data)

    pool.declare_source(address, pool.unit, rebuild)
    pool.sleep(SleepPlan())
    with pytest.raises(LookupError, match="not yet"):
        pool.begin_wake()
    assert pool.is_asleep(address)
    transaction = pool.begin_wake()
    with pytest.raises(MemoryAsleep):  # it has been written, and is not anybody's yet
        pool.write(address, data)
    transaction.rollback()
    assert pool.is_asleep(address)
    pool.begin_wake().commit()
    assert len(written) == 3
    assert pool.read(address, pool.unit) == data
