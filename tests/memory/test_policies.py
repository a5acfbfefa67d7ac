"""What becomes of bytes: addresses stay, and each policy holds what it says, alone and mixed, by tag and by tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint.interfaces import FileExtent, LiveRanges, Policy, SleepPlan, SleepTier
from hardpoint.interfaces.errors import (
    CapabilityRefused,
    DriverError,
    ForeignMemory,
    InvalidAllocation,
    MemoryAsleep,
    MemoryFault,
    UnknownTag,
)
from hardpoint_conformance.fault_matrix import FaultTarget
from hardpoint_conformance.memory import content, differences
from hardpoint_conformance.memory_model import TrackedPool

from .conftest import on_drivers_with_elastic_memory


def sizes_at_the_edges(pool: TrackedPool) -> list[int]:
    """Return sizes around the granularity and the chunk (fact 29)."""
    unit = pool.unit
    chunk = pool.driver.geometry().max_chunk
    chunk = chunk if 0 < chunk <= 16 * unit else 4 * unit  # larger ones would not fit side by side
    return [1, 511, unit - 1, unit, unit + 1, chunk - 1, chunk, chunk + 1]


@pytest.mark.parametrize("tier", [SleepTier.HOST, SleepTier.DISK], ids=str)
def test_addresses_and_bytes_survive_cycles_of_every_size(pool: TrackedPool, tier: SleepTier, tmp_path: Path) -> None:
    """Facts 1, 2 and 29: first and last bytes, chunk borders, sizes that are no multiple of anything."""
    blocks = {pool.filled(data := content(size, size)): data for size in sizes_at_the_edges(pool)}
    plan = SleepPlan(tier=tier, disk_directory=str(tmp_path))
    for _ in range(2):
        report = pool.sleep(plan)
        assert report.preserved == sum(map(len, blocks.values()))
        assert report.tiers == {tier: report.preserved}
        assert all(pool.is_asleep(address) for address in blocks)
        assert pool.stats().tags["weights"].mapped == 0
        assert pool.wake().preserved == report.preserved
        assert all(pool.read(address, len(data)) == data for address, data in blocks.items())


def test_sleep_gives_the_drivers_memory_back(pool: TrackedPool, target: FaultTarget) -> None:
    """Fact 23: the driver's own counter falls by what the report says."""
    used = target.held()["used"]
    for tag in ("weights", "kv_cache"):
        pool.filled(content(3 * pool.unit), tag)
    taken = target.held()["used"] - used
    report = pool.sleep(SleepPlan())
    assert target.held()["used"] == used
    assert report.unmapped == taken == 6 * pool.unit
    assert report.free_after - report.free_before == taken
    assert pool.wake().unmapped == taken
    assert target.held()["used"] - used == taken


def test_policies_are_mixed_in_one_pool(pool: TrackedPool) -> None:
    """Facts 4 and 5."""
    data = content(pool.unit + 17)
    blocks = {policy: pool.filled(data, "kv_cache", policy) for policy in Policy}
    written: list[int] = []

    def rebuild() -> None:
        pool.write(blocks[Policy.REBUILD], data)
        written.append(1)

    pool.declare_source(blocks[Policy.REBUILD], len(data), rebuild)
    report = pool.sleep(SleepPlan())
    assert report.preserved == len(data)
    assert report.discarded == 3 * len(data)
    assert not pool.is_asleep(blocks[Policy.RESIDENT])
    pool.write(blocks[Policy.RESIDENT], data)
    for cycle in range(2):
        report = pool.wake()
        assert report.still_asleep == frozenset()
        assert len(written) == cycle + 1
        for policy in (Policy.PRESERVE, Policy.RESIDENT, Policy.REBUILD):
            assert pool.read(blocks[policy], len(data)) == data, policy
        assert pool.read(blocks[Policy.ZERO], len(data)) == bytes(len(data))
        pool.read(blocks[Policy.DISCARD], len(data))
        pool.sleep(SleepPlan())


def test_a_plans_policy_goes_before_the_allocations(pool: TrackedPool) -> None:
    data = content(pool.unit)
    weights, cache = pool.filled(data), pool.filled(data, "kv_cache", Policy.DISCARD)
    pool.sleep(SleepPlan(policies={"weights": Policy.ZERO, "kv_cache": Policy.PRESERVE}))
    pool.wake()
    assert pool.read(weights, len(data)) == bytes(len(data))
    assert pool.read(cache, len(data)) == data
    pool.sleep(SleepPlan(policies={"weights": Policy.RESIDENT}))
    assert not pool.is_asleep(weights)
    assert pool.is_asleep(cache)


def test_zero_means_zero_where_pages_come_back_stale(pool: TrackedPool) -> None:
    scratch = pool.allocate(2 * pool.unit + 5, "scratch", Policy.ZERO)
    for seed in range(3):
        pool.write(scratch, content(2 * pool.unit + 5, seed))
        pool.sleep(SleepPlan())
        other = pool.filled(content(2 * pool.unit, 9), "other", Policy.RESIDENT)
        pool.free(other)
        pool.wake()
        assert pool.read(scratch, 2 * pool.unit + 5) == bytes(2 * pool.unit + 5)


def test_small_blocks_of_odd_sizes_are_rebuilt_and_nothing_between_them_is_kept(pool: TrackedPool) -> None:
    sizes = (100, 513, 700, 1)
    tables = {pool.allocate(size, "buffers", Policy.REBUILD, shared=True): content(size, size) for size in sizes}

    def rebuild() -> None:
        for address, data in tables.items():
            pool.write(address, data)

    for address, data in tables.items():
        pool.declare_source(address, len(data), rebuild)
    pool.sleep(SleepPlan())
    assert pool.books().host_used == 0
    pool.wake()
    assert all(pool.read(address, len(data)) == data for address, data in tables.items())


def test_a_rebuild_that_fails_leaves_everything_asleep_and_is_tried_again(pool: TrackedPool) -> None:
    data = content(pool.unit)
    kept, table = pool.filled(data), pool.allocate(pool.unit, "buffers", Policy.REBUILD)
    broken = True

    def rebuild() -> None:
        if broken:
            raise OSError("no table")
        pool.write(table, data)

    pool.declare_source(table, pool.unit, rebuild)
    pool.sleep(SleepPlan())
    with pytest.raises(OSError, match="no table"):
        pool.wake()
    assert pool.is_asleep(kept)
    assert pool.is_asleep(table)
    assert pool.read_backup(kept, len(data)) == data
    broken = False
    pool.wake()
    assert pool.read(table, len(data)) == data
    assert pool.read(kept, len(data)) == data


def test_a_failed_wake_can_be_tried_again_while_its_error_is_handled(pool: TrackedPool) -> None:
    """The error's traceback keeps the frames of the failed operation alive; the operation is over all the same."""
    table = pool.allocate(pool.unit, "buffers", Policy.REBUILD)
    answers = iter([ValueError("first"), None])

    def rebuild() -> None:
        answer = next(answers)
        if answer:
            raise answer

    pool.declare_source(table, pool.unit, rebuild)
    pool.sleep(SleepPlan())
    try:
        pool.wake()
    except ValueError:
        pool.wake()
    assert not pool.is_asleep(table)


def test_one_callback_for_several_tensors_runs_once_per_wake(pool: TrackedPool) -> None:
    calls: list[int] = []

    def rebuild() -> None:
        calls.append(1)

    for _ in range(3):
        pool.declare_source(pool.allocate(pool.unit, "buffers", Policy.REBUILD), pool.unit, rebuild)
    for cycle in (1, 2):
        pool.sleep(SleepPlan())
        pool.wake()
        assert len(calls) == cycle


def test_rebuild_without_a_callback_is_refused_with_nothing_done(pool: TrackedPool, target: FaultTarget) -> None:
    other = pool.filled(content(pool.unit), "other")
    pool.allocate(pool.unit, "buffers", Policy.REBUILD)
    before = target.calls()
    with pytest.raises(InvalidAllocation, match="callback"):
        pool.sleep(SleepPlan())
    assert differences(before, target.calls()) == {}
    assert not pool.is_asleep(other)


def test_writing_ends_a_declared_callback(pool: TrackedPool) -> None:
    table = pool.allocate(pool.unit, "buffers", Policy.REBUILD)
    pool.declare_source(table, pool.unit, lambda: None)
    pool.mark_written(["buffers"])
    with pytest.raises(InvalidAllocation, match="callback"):
        pool.sleep(SleepPlan())


def test_a_second_sleep_or_wake_does_nothing_and_says_so(pool: TrackedPool, target: FaultTarget) -> None:
    """Fact 9."""
    data = content(pool.unit)
    address = pool.filled(data)
    pool.sleep(SleepPlan())
    held = dict(target.held())
    again = pool.sleep(SleepPlan(policies={"weights": Policy.DISCARD}))
    assert (again.preserved, again.discarded, again.unmapped) == (0, 0, 0)
    assert again.still_asleep == {"weights"}
    assert dict(target.held()) == held
    assert pool.wake().preserved == len(data)
    awake = pool.wake()
    assert (awake.preserved, awake.unmapped, awake.still_asleep) == (0, 0, frozenset())
    assert pool.read(address, len(data)) == data


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.sleep(SleepPlan(tags=frozenset({"nothing"}))),
        lambda pool: pool.sleep(SleepPlan(policies={"nothing": Policy.DISCARD})),
        lambda pool: pool.sleep(SleepPlan(keep=frozenset({"nothing"}))),
        lambda pool: pool.prepare_sleep(SleepPlan(tags=frozenset({"nothing"}))),
        lambda pool: pool.wake(["weights", "nothing"]),
        lambda pool: pool.mark_written(["nothing"]),
        lambda pool: pool.discard_backup(["nothing"]),
    ],
    ids=["sleep", "policies", "keep", "prepare_sleep", "wake", "mark_written", "discard_backup"],
)
def test_an_unknown_tag_is_an_error_and_nothing_is_done(call, pool: TrackedPool, target: FaultTarget) -> None:  # type: ignore[no-untyped-def]
    """Fact 12."""
    data = content(pool.unit)
    address, sleeping = pool.filled(data), pool.filled(data, "kv_cache")
    pool.sleep(SleepPlan(tags=frozenset({"kv_cache"})))
    before = target.calls()
    with pytest.raises(UnknownTag, match="nothing"):
        call(pool)
    assert differences(before, target.calls()) == {}
    assert pool.read(address, len(data)) == data
    assert pool.read_backup(sleeping, len(data)) == data


def test_a_backup_is_read_without_the_device(pool: TrackedPool, target: FaultTarget, tmp_path: Path) -> None:
    """Fact 6: any part of it, from every tier."""
    data = content(3 * pool.unit + 100)
    for tier in (SleepTier.HOST, SleepTier.DISK):
        address = pool.filled(data)
        pool.sleep(SleepPlan(tier=tier, disk_directory=str(tmp_path)))
        before = target.calls()
        for start, size in ((0, len(data)), (5, 1), (pool.unit - 3, 4100), (len(data) - 1, 1)):
            assert pool.read_backup(address + start, size) == data[start : start + size]
        assert differences(before, target.calls()) == {}
        pool.free(address)


def test_what_was_not_preserved_cannot_be_read_as_a_backup(pool: TrackedPool) -> None:
    discarded = pool.filled(content(pool.unit), "kv_cache", Policy.DISCARD)
    rebuilt, kept = pool.allocate(pool.unit, "buffers", Policy.REBUILD), pool.filled(content(pool.unit))
    pool.declare_source(rebuilt, pool.unit, lambda: None)
    with pytest.raises(InvalidAllocation, match="awake"):
        pool.read_backup(kept, 1)
    pool.sleep(SleepPlan())
    for address in (discarded, rebuilt):
        with pytest.raises(MemoryFault, match="cannot be read"):
            pool.read_backup(address, 1)
    with pytest.raises(MemoryFault, match="cannot be read"):
        pool.read_backup(kept, pool.unit + 1)
    with pytest.raises(ForeignMemory):
        pool.read_backup(12345, 1)


def test_a_discarded_backup_leaves_memory_that_wakes_with_anything(pool: TrackedPool) -> None:
    data = content(2 * pool.unit)
    lost, kept = pool.filled(data), pool.filled(data, "buffers")
    pool.sleep(SleepPlan())
    pool.discard_backup(["weights"])
    assert pool.books().host_used == len(data)
    with pytest.raises(MemoryFault, match="not preserved"):
        pool.read_backup(lost, 1)
    report = pool.wake()
    assert report.discarded == len(data)
    pool.read(lost, len(data))
    assert pool.read(kept, len(data)) == data


def test_live_ranges_alone_are_copied(pool: TrackedPool) -> None:
    unit = pool.unit
    data = content(4 * unit)
    address, other = pool.filled(data), pool.filled(data, "buffers")
    ranges = [(0, 10), (unit - 5, 10), (2 * unit, unit), (4 * unit - 1, 1)]
    report = pool.sleep(SleepPlan(live=(LiveRanges(address, ranges),)))
    assert report.preserved == sum(size for _, size in ranges) + len(data)
    with pytest.raises(MemoryFault, match="not preserved"):
        pool.read_backup(address + 20, 1)
    pool.wake()
    for start, size in ranges:
        assert pool.read(address + start, size) == data[start : start + size]
    assert pool.read(other, len(data)) == data


def test_no_live_range_at_all_is_a_discard(pool: TrackedPool) -> None:
    address = pool.filled(content(pool.unit), "kv_cache")
    assert pool.sleep(SleepPlan(live=(LiveRanges(address, []),))).preserved == 0
    assert pool.books().host_used == 0
    pool.wake()
    pool.read(address, pool.unit)


def test_live_ranges_of_a_block_leave_its_neighbours_whole(pool: TrackedPool) -> None:
    data = [content(5000, seed) for seed in range(3)]
    blocks = [pool.filled(part, "kv_cache", shared=True) for part in data]
    pool.sleep(SleepPlan(live=(LiveRanges(blocks[1], [(100, 50)]),)))
    pool.wake()
    assert pool.read(blocks[0], 5000) == data[0]
    assert pool.read(blocks[2], 5000) == data[2]
    assert pool.read(blocks[1] + 100, 50) == data[1][100:150]


@pytest.mark.parametrize("ranges", [[(0, 5001)], [(5000, 1)], [(2**64 - 1, 2)], [(1, 2**64 - 1)]], ids=str)
def test_live_ranges_beyond_their_tensor_are_refused(pool: TrackedPool, ranges: list[tuple[int, int]]) -> None:
    first = pool.filled(content(5000), shared=True)
    pool.filled(content(5000), shared=True)
    with pytest.raises(InvalidAllocation, match="live ranges"):
        pool.sleep(SleepPlan(live=(LiveRanges(first, ranges),)))
    assert pool.read(first, 5000) == content(5000)


def test_live_ranges_of_foreign_memory_are_refused(pool: TrackedPool) -> None:
    block = pool.filled(content(5000), shared=True)
    for foreign in (4096, block + 6000):
        with pytest.raises(ForeignMemory):
            pool.sleep(SleepPlan(live=(LiveRanges(foreign, [(0, 1)]),)))
    assert not pool.is_asleep(block)


def test_elastic_memory_keeps_its_bytes_through_growth_and_sleep(pool: TrackedPool, target: FaultTarget) -> None:
    if not target.elastic:
        with pytest.raises(CapabilityRefused, match="elastic"):
            pool.allocate(pool.unit, capacity=pool.unit)
        return
    unit = pool.unit
    data = content(3 * unit)
    address = pool.allocate(2 * unit, "kv_cache", capacity=8 * unit)
    pool.write(address, data[: 2 * unit])
    used = target.held()["used"]
    pool.resize(address, 3 * unit)
    assert target.held()["used"] == used + unit
    pool.write(address + 2 * unit, data[2 * unit :])
    pool.sleep(SleepPlan())
    with pytest.raises(MemoryAsleep):
        pool.resize(address, unit)
    pool.wake()
    assert pool.read(address, 3 * unit) == data
    pool.resize(address, unit)
    assert target.held()["used"] == used - unit
    assert pool.read(address, unit) == data[:unit]
    pool.resize(address, 8 * unit)
    assert pool.read(address, unit) == data[:unit]
    assert pool.stats().tags["kv_cache"].allocated == 8 * unit
    for size in (0, 8 * unit + 1):
        with pytest.raises(InvalidAllocation):
            pool.resize(address, size)


@on_drivers_with_elastic_memory
def test_memory_at_its_capacity_is_elastic(pool: TrackedPool) -> None:
    """A KV cache is made at its full size and shrunk later."""
    address = pool.allocate(4 * pool.unit, capacity=4 * pool.unit)
    pool.resize(address, pool.unit)
    assert pool.stats().tags["weights"].mapped == pool.unit


@on_drivers_with_elastic_memory
def test_elastic_memory_is_not_read_or_written_beyond_what_is_mapped(pool: TrackedPool) -> None:
    address = pool.allocate(pool.unit, capacity=8 * pool.unit)
    for call in (lambda: pool.read(address + 4 * pool.unit, 1), lambda: pool.write(address + 4 * pool.unit, b"x")):
        with pytest.raises(InvalidAllocation):
            call()


def test_progress_is_told_to_the_end_and_never_falls(pool: TrackedPool) -> None:
    told: list[tuple[int, int]] = []
    size = 8 * pool.unit + 3
    pool.filled(content(size))
    pool.sleep(SleepPlan(progress=lambda done, in_all: told.append((done, in_all))))
    assert told == sorted(told)
    assert told[-1] == (size, size)
    told.clear()
    pool.wake(progress=lambda done, in_all: told.append((done, in_all)))
    assert told == sorted(told)
    assert told[-1] == (size, size)


def test_a_progress_callback_that_raises_cancels_with_everything_undone(pool: TrackedPool, target: FaultTarget) -> None:
    data = content(4 * pool.unit)
    address = pool.filled(data)
    held = dict(target.held())

    def cancel(done: int, in_all: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.sleep(SleepPlan(progress=cancel))
    assert pool.read(address, len(data)) == data
    assert differences(held, target.held(), {"streams"}) == {}
    assert pool.books().host_used == 0
    pool.sleep(SleepPlan())
    held = dict(target.held())
    with pytest.raises(KeyboardInterrupt):
        pool.wake(progress=cancel)
    assert pool.is_asleep(address)
    assert differences(held, target.held(), {"streams"}) == {}
    pool.wake()
    assert pool.read(address, len(data)) == data


def test_zeros_do_not_come_back_as_what_a_source_held(pool: TrackedPool, tmp_path: Path) -> None:
    data = content(pool.unit)
    (tmp_path / "source").write_bytes(data)
    address = pool.filled(data)
    pool.declare_source(address, len(data), [FileExtent(0, len(data), str(tmp_path / "source"), 0)])
    pool.sleep(SleepPlan(policies={"weights": Policy.ZERO}))
    pool.wake()
    pool.sleep(SleepPlan(tier=SleepTier.SOURCE))
    pool.wake()
    assert pool.read(address, len(data)) == bytes(len(data))


def test_a_failed_sleep_of_some_bytes_leaves_all(pool: TrackedPool, target: FaultTarget) -> None:
    """The last release fails, when memory of which only live ranges have a backup is the driver's already, or not yet."""
    data = content(2 * pool.unit)
    address = pool.filled(data)
    scratch = pool.filled(data, "scratch", Policy.DISCARD)
    release = {"cpu": "release", "cuda": "cuMemRelease", "rocm": "hipMemRelease", "ascend": "aclrtFreePhysical"}
    for nth in (1, 2):
        target.fail(release[target.name.split()[0]], nth)
        try:
            pool.sleep(SleepPlan(live=(LiveRanges(address, [(5, 10)]),)))
        except DriverError:
            assert pool.read(address, len(data)) == data
            assert pool.read(scratch, len(data)) == data
        else:
            assert pool.books().unreturned > 0
            assert pool.read_backup(address + 5, 10) == data[5:15]
            pool.wake()
            assert pool.books().unreturned == 0
        assert target.disarm()
