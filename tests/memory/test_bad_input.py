"""Sizes, addresses and moments that make no sense: a typed error each, and nothing changed."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from hardpoint.interfaces import Policy, SleepPlan, SleepTier
from hardpoint.interfaces.errors import (
    DeviceOutOfMemory,
    DriverError,
    ForeignMemory,
    InvalidAllocation,
    InvalidTransaction,
    MemoryBusy,
    MemoryFault,
)
from hardpoint_conformance.fault_matrix import FaultTarget
from hardpoint_conformance.memory import content, differences
from hardpoint_conformance.memory_model import TrackedPool
from tests.fault_matrix.targets import CAPACITY, SimulatedTarget

from .conftest import on_drivers_with_elastic_memory, on_simulated_drivers


@pytest.mark.parametrize("size", [0, -1])
def test_no_bytes_are_refused(pool: TrackedPool, size: int) -> None:
    with pytest.raises(InvalidAllocation):
        pool.allocate(size)
    with pytest.raises(InvalidAllocation):
        pool.allocate(size, shared=True)


@pytest.mark.parametrize("size", [CAPACITY + 1, 1 << 47, (1 << 63) - 1, (1 << 64) - 1, 1 << 64, 1 << 80])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_huge_sizes_are_out_of_memory(pool: TrackedPool, target: FaultTarget, size: int, shared: bool) -> None:
    held = dict(target.held())
    with pytest.raises(DeviceOutOfMemory):
        pool.allocate(size, shared=shared)
    assert dict(target.held()) == held
    assert pool.stats().allocated == 0


@on_drivers_with_elastic_memory
@pytest.mark.parametrize("size", [(1 << 63) - 1, (1 << 64) - 1, 1 << 64, 1 << 80])
def test_huge_capacities_are_out_of_memory(pool: TrackedPool, target: FaultTarget, size: int) -> None:
    """Smaller ones take nothing but addresses, of which a driver may have enough."""
    held = dict(target.held())
    with pytest.raises(DeviceOutOfMemory):
        pool.allocate(pool.unit, "weights", Policy.PRESERVE, size)
    assert dict(target.held()) == held
    assert pool.stats().allocated == 0


def test_a_capacity_below_the_size_is_refused(pool: TrackedPool) -> None:
    with pytest.raises(InvalidAllocation, match="capacity"):
        pool.allocate(2 * pool.unit, capacity=pool.unit)


def test_the_last_bytes_of_a_device_serve_small_blocks(pool: TrackedPool, target: FaultTarget) -> None:
    """Where there is no room for a shared allocation, a block gets one of its own."""
    unit = pool.unit
    for size in (CAPACITY - (4 << 20), (4 << 20) - unit):  # chunks of one size waste nothing of the first
        pool.allocate(size, policy=Policy.RESIDENT)
    block = pool.filled(content(unit // 2), shared=True)
    assert pool.read(block, unit // 2) == content(unit // 2)
    with pytest.raises(DeviceOutOfMemory):
        pool.allocate(100)


def test_addresses_are_aligned(pool: TrackedPool) -> None:
    """Fact 30."""
    for size in (1, 700, pool.unit + 1):
        assert pool.allocate(size) % pool.unit == 0
        assert pool.allocate(size, shared=True) % 512 == 0


def test_memory_is_freed_once_and_by_its_first_byte(pool: TrackedPool) -> None:
    own, block = pool.filled(content(3 * pool.unit)), pool.filled(content(5000), shared=True)
    for foreign in (0, 4096, own + 1, own + pool.unit, own + 3 * pool.unit, block + 512):
        with pytest.raises(ForeignMemory):
            pool.free(foreign)
    assert pool.read(own, 3 * pool.unit) == content(3 * pool.unit)
    for address in (own, block):
        pool.free(address)
        with pytest.raises(ForeignMemory):
            pool.free(address)
        for call in (pool.is_asleep, lambda freed: pool.read(freed, 1), lambda freed: pool.write(freed, b"x")):
            with pytest.raises(ForeignMemory):
                call(address)


def test_transfers_end_where_their_memory_ends(pool: TrackedPool) -> None:
    block, neighbour = (pool.filled(content(5000, seed), shared=True) for seed in (1, 2))
    own = pool.filled(content(pool.unit))
    for address, size in (
        (block, 5001),
        (block + 4999, 2),
        (block + 5000, 1),
        (own, pool.unit + 1),
        (own + 1, pool.unit),
    ):
        with pytest.raises((InvalidAllocation, ForeignMemory)):
            pool.read(address, size)
        with pytest.raises((InvalidAllocation, ForeignMemory)):
            pool.write(address, bytes(size))
    assert pool.read(neighbour, 5000) == content(5000, 2)


def test_memory_is_freed_while_asleep_without_touching_it(pool: TrackedPool, target: FaultTarget) -> None:
    """Fact 14: the backup and the addresses go, and no dead handle is touched."""
    data = content(3 * pool.unit)
    address, block = pool.filled(data), pool.filled(content(5000), shared=True)
    pool.sleep(SleepPlan())
    before = target.calls()
    pool.free(address)
    pool.free(block)
    called = differences(
        before, target.calls(), {"cuCtxGetCurrent", "cuCtxSetCurrent", "hipGetDevice", "aclrtGetCurrentContext"}
    )
    assert sum(called.values()) == 2, called  # addresses
    assert pool.books().host_used == 0
    assert pool.books().reserved == 0
    assert pool.wake().unmapped == 0


def test_memory_allocated_while_its_tag_sleeps_is_awake_and_joins_the_next_sleep(pool: TrackedPool) -> None:
    """Fact 13."""
    first, second = content(pool.unit, 1), content(pool.unit, 2)
    sleeping = pool.filled(first)
    pool.sleep(SleepPlan())
    awake, block = pool.filled(second), pool.filled(content(5000), shared=True)
    assert pool.read(awake, pool.unit) == second
    report = pool.sleep(SleepPlan())
    assert report.preserved == pool.unit + 5000
    pool.wake()
    assert pool.read(sleeping, pool.unit) == first
    assert pool.read(awake, pool.unit) == second
    assert pool.read(block, 5000) == content(5000)


def test_an_operation_within_an_operation_is_busy(pool: TrackedPool, target: FaultTarget) -> None:
    data = content(4 * pool.unit)
    address = pool.filled(data)
    met: list[type] = []

    def nested(done: int, in_all: int) -> None:
        for call in (lambda: pool.sleep(SleepPlan()), pool.wake):
            with pytest.raises(MemoryBusy):
                call()
            met.append(MemoryBusy)

    pool.sleep(SleepPlan(progress=nested))
    pool.wake(progress=nested)
    assert len(met) >= 4
    assert pool.read(address, len(data)) == data


def test_everything_but_an_operation_may_be_called_within_one(pool: TrackedPool) -> None:
    blocks = [pool.filled(content(5000, seed), shared=True) for seed in range(4)]
    own = pool.filled(content(pool.unit))

    def other_calls(done: int, in_all: int) -> None:
        gc.collect()
        while len(blocks) > 2:
            pool.free(blocks.pop())
        if own in pool.living:
            pool.free(own)
        pool.free(pool.filled(content(100), "kv_cache"))
        assert pool.stats().tags["weights"].allocations == 2
        pool.memory_info()
        pool.mark_written(["kv_cache"])

    pool.sleep(SleepPlan(progress=other_calls))
    pool.wake(progress=other_calls)
    for seed, address in enumerate(blocks):
        assert pool.read(address, 5000) == content(5000, seed)


def test_a_closed_pool_keeps_what_lives_and_hands_out_nothing(pool: TrackedPool) -> None:
    address = pool.filled(content(pool.unit))
    pool.sleep(SleepPlan())
    pool.close()
    pool.close()
    for call in (lambda: pool.allocate(1), lambda: pool.sleep(SleepPlan()), pool.wake, pool.memory_info):
        with pytest.raises(MemoryFault, match="closed"):
            call()
    assert pool.stats().allocated == pool.unit
    pool.free(address)
    assert pool.stats().allocated == 0


def test_an_operation_ends_once(pool: TrackedPool) -> None:
    address = pool.filled(content(pool.unit))
    prepared = pool.begin_sleep(SleepPlan())
    prepared.rollback()
    assert not pool.is_asleep(address)
    for call in (prepared.commit, prepared.rollback):
        with pytest.raises(InvalidTransaction, match="ended"):
            call()
    kept = pool.begin_sleep(SleepPlan())
    kept.commit()
    with pytest.raises(InvalidTransaction, match="ended"):
        kept.rollback()
    pool.wake()
    assert pool.read(address, pool.unit) == content(pool.unit)


def test_an_operation_dropped_before_its_end_is_undone(pool: TrackedPool, target: FaultTarget) -> None:
    address = pool.filled(content(pool.unit))
    held = dict(target.held())
    prepared = pool.begin_sleep(SleepPlan())
    del prepared
    gc.collect()
    assert pool.read(address, pool.unit) == content(pool.unit)
    assert differences(held, target.held(), {"streams"}) == {}
    assert pool.books().host_used == 0


FAILURES_OF_COPIES = {"cuda": "cuMemcpyDtoHAsync_v2", "rocm": "hipMemcpyAsync", "ascend": "aclrtMemcpyAsync"}


@on_simulated_drivers
def test_copies_under_way_are_waited_for_when_one_fails(pool: TrackedPool, target: SimulatedTarget) -> None:
    """Host memory of copies that were begun goes back to the arena, where the next backup takes it.

    Not on the CPU, whose copies are complete when they return.
    """
    simulator = target.simulator
    simulator.set("deferred", 1)
    try:
        blocks = {pool.filled(content(pool.unit, seed), tag): seed for seed, tag in enumerate(("a", "b", "c"))}
        name = FAILURES_OF_COPIES[target.name.split()[0]]
        target.fail(name if name in target.calls() else name.removesuffix("_v2"), 3)
        with pytest.raises(DriverError):
            pool.sleep(SleepPlan())
        assert target.disarm()
        assert simulator.stats().pending == 0
        pool.sleep(SleepPlan(tags=frozenset({"c"})))
        pool.sleep(SleepPlan())
        pool.wake()
        for address, seed in blocks.items():
            assert pool.read(address, pool.unit) == content(pool.unit, seed)
    finally:
        simulator.set("deferred", 0)


@on_simulated_drivers
def test_memory_of_copies_that_nobody_could_wait_for_stays_pinned_until_the_device_was(
    pool: TrackedPool, target: SimulatedTarget, tmp_path: Path
) -> None:
    """The driver says neither to the sleep nor to what undoes it that a copy has ended.

    Not on the CPU, whose copies are complete when they return.
    """
    simulator = target.simulator
    wait = {"cuda": "cuStreamSynchronize", "rocm": "hipStreamSynchronize", "ascend": "aclrtSynchronizeStream"}
    data = content(pool.unit)
    address = pool.filled(data)
    plan = SleepPlan(tier=SleepTier.DISK, disk_directory=str(tmp_path))
    simulator.set("deferred", 1)
    try:
        simulator.fail(wait[target.name.split()[0]], 1, 1, 2)
        with pytest.raises(DriverError):
            pool.sleep(plan)
        assert target.violations() == []
        pool.sleep(plan)
        pool.wake()
    finally:
        simulator.set("deferred", 0)
    assert pool.read(address, len(data)) == data


@on_simulated_drivers
def test_a_second_failure_while_undoing_loses_nothing(pool: TrackedPool, target: SimulatedTarget) -> None:
    """The sleep fails as it unmaps, mapping back fails too, and so does the first wake: the bytes are there at the next.

    Not on the CPU's driver, of whose calls only one entry's can be made to fail at a time.
    """
    simulator = target.simulator
    vendor = target.name.split()[0]
    unmap, map_call = {
        "cuda": ("cuMemUnmap", "cuMemMap"),
        "rocm": ("hipMemUnmap", "hipMemMap"),
        "ascend": ("aclrtUnmapMem", "aclrtMapMem"),
    }[vendor]
    data = {tag: content(pool.unit + 3, seed) for seed, tag in enumerate(("a", "b"))}
    blocks = {pool.filled(bytes_, tag): bytes_ for tag, bytes_ in data.items()}
    scratch = pool.filled(content(pool.unit, 7), "scratch", Policy.ZERO)
    simulator.fail(unmap, 3, 1)
    simulator.fail(map_call, 1, 1, -1)
    with pytest.raises(DriverError, match="second failure"):
        pool.sleep(SleepPlan())
    with pytest.raises(DriverError):
        pool.wake()
    simulator.clear_faults()
    assert all(pool.is_asleep(address) for address in blocks)
    pool.wake()
    for address, bytes_ in blocks.items():
        assert pool.read(address, len(bytes_)) == bytes_
    assert pool.read(scratch, pool.unit) in (content(pool.unit, 7), bytes(pool.unit))
