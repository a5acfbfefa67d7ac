"""Level 1: what the backend's memory does with bytes, addresses, tags and policies, and what its books say."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hardpoint.interfaces import (
    Capabilities,
    DType,
    FileExtent,
    MemoryReport,
    Policy,
    SleepPlan,
    SleepTier,
)
from hardpoint.interfaces.errors import (
    BackupCorrupt,
    BackupStale,
    CapabilityRefused,
    DeviceOutOfMemory,
    ForeignMemory,
    HostBudgetExceeded,
    InvalidAllocation,
    MemoryAsleep,
    MemoryBusy,
    MemoryFault,
    UnknownTag,
)
from hardpoint_conformance.clauses import clause, proves
from hardpoint_conformance.levels import Level
from hardpoint_conformance.memory import (
    Block,
    Memory,
    PoolMemory,
    TensorMemory,
    content,
    differences,
    files_below,
    open_memory,
    process_counts,
    wait_until,
)
from hardpoint_conformance.target import Target

HOST = pytest.param(SleepTier.HOST, id="host", marks=proves("memory.tier.host"))
DISK = pytest.param(SleepTier.DISK, id="disk", marks=proves("memory.tier.disk"))
SOURCE = pytest.param(SleepTier.SOURCE, id="source", marks=proves("memory.tier.source"))
HEADER = b"header of an odd length, as checkpoints have" * 3


def plan_for(tier: SleepTier, directory: Path, **settings: Any) -> SleepPlan:
    return SleepPlan(tier=tier, disk_directory=str(directory), **settings)


def filled_for(memory: Memory, tier: SleepTier, data: bytes, directory: Path, tag: str = "weights") -> Block:
    """Return memory with bytes, which have a file as their source where the tier asks for one."""
    block = memory.filled(data, tag)
    if tier is SleepTier.SOURCE:
        declare_file(memory, block, data, directory / f"checkpoint{block.address}")
    return block


def declare_file(memory: Memory, block: Block, data: bytes, file: Path) -> None:
    file.write_bytes(HEADER + data)
    memory.declare_source(block, [FileExtent(0, len(data), str(file), len(HEADER))])


def edges(memory: Memory) -> list[int]:
    """Return sizes around those at which memory is cut."""
    unit = memory.unit
    return [1, 511, 513, unit - 1, unit, unit + 1, 2 * unit + 7]


# Identity and content


@clause("alloc.address.stable@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 1")
@pytest.mark.parametrize("tier", [HOST, DISK, SOURCE])
def test_addresses_stay(memory: Memory, tier: SleepTier, tmp_path: Path) -> None:
    """Memory is at the same address before sleep, after each partial wake, and after any number of cycles."""
    tags = ("weights", "kv_cache")
    blocks = {tag: filled_for(memory, tier, content(memory.unit + 5), tmp_path, tag) for tag in tags}
    addresses = {tag: block.address for tag, block in blocks.items()}
    for cycle in range(3):
        memory.sleep(plan_for(tier, tmp_path))
        for tag in tags if cycle % 2 else reversed(tags):
            memory.wake([tag])
            assert memory.read(blocks[tag]) == content(memory.unit + 5)
            if blocks[tag].tensor is not None:
                assert blocks[tag].tensor.data_ptr() == addresses[tag]


@clause(
    "alloc.bytes.preserved@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 2, allocator fact 29"
)
@pytest.mark.parametrize("tier", [HOST, DISK, SOURCE])
def test_preserved_bytes_are_the_same(memory: Memory, tier: SleepTier, tmp_path: Path) -> None:
    """Every preserved byte is the same after wake, whatever the size: first and last, tails, and borders of chunks."""
    data = {size: content(size, size) for size in edges(memory)}
    blocks = {size: filled_for(memory, tier, data[size], tmp_path) for size in data}
    for _ in range(2):
        report = memory.sleep(plan_for(tier, tmp_path))
        assert report.preserved + report.skipped == sum(data)
        assert memory.wake().preserved == sum(data)
        for size, block in blocks.items():
            assert memory.read(block) == data[size], size


@clause("alloc.bytes.chunks@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 2, allocator fact 29")
def test_bytes_survive_across_chunks(pool_memory: PoolMemory) -> None:
    """Bytes on both sides of the border between two of the driver's largest chunks survive, and so does the tail after it."""
    chunk = min(pool_memory.driver.geometry().max_chunk or 4 * pool_memory.unit, 64 << 20)
    block = pool_memory.allocate(chunk + 100)
    data = content(200, 3)
    for at in (0, chunk - 100, chunk):
        pool_memory.write(block, data[:100], at)
    pool_memory.sleep()
    pool_memory.wake()
    for at in (0, chunk - 100, chunk):
        assert pool_memory.read(block, 100, at) == data[:100]


@clause("alloc.tensor.views@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 3")
def test_views_see_the_same_bytes(tensor_memory: TensorMemory) -> None:
    """Views, slices, aliases and strided views of a tensor see its content after wake, and what is written through any of them."""
    import torch

    tensor = tensor_memory.allocator.empty((64, 48), DType.FLOAT32)
    tensor.copy_(torch.arange(64 * 48.0).view(64, 48))
    views = [tensor.t(), tensor[3:9, ::2], tensor.view(-1)[5:], torch.as_strided(tensor, (4, 4), (1, 7), 3)]
    before = [view.clone() for view in views]
    tensor_memory.sleep()
    tensor_memory.wake()
    changed = [n for n, (view, early) in enumerate(zip(views, before, strict=True)) if not torch.equal(view, early)]
    assert changed == [], "these views have other values after the wake"
    tensor.fill_(1.0)
    assert [set(view.flatten().tolist()) for view in views] == [{1.0}] * len(views), (
        "views do not see what is written to the tensor"
    )


@clause("alloc.tensor.dtypes@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 2, allocator fact 6")
@pytest.mark.parametrize("dtype", [pytest.param(dtype, id=dtype.value) for dtype in DType])
def test_every_dtype_survives(tensor_memory: TensorMemory, dtype: DType) -> None:
    """A tensor has the shape and dtype asked for, is aligned to 512 bytes, keeps its bytes, and its backup has shape and dtype too."""
    import torch

    tensor = tensor_memory.allocator.empty((7, 33), dtype)
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == ((7, 33), dtype.to_torch(), True)
    assert tensor.data_ptr() % 512 == 0
    raw = tensor.view(-1).view(torch.uint8)
    raw.copy_(torch.arange(raw.numel()) % 251)
    before = raw.clone()
    tensor_memory.sleep()
    backup = tensor_memory.allocator.read_backup(tensor)
    tensor_memory.wake()
    assert (backup.shape, backup.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(backup.view(-1).view(torch.uint8), before.cpu()), (
        "the backup has other bytes than the tensor had"
    )
    assert torch.equal(raw, before), "the tensor has other bytes than before"


@clause("alloc.policy.discard@1", Level.MEMORY, capability="memory.sleep.2", facts="allocator fact 4")
def test_discarded_memory_goes_without_a_backup(memory: Memory) -> None:
    """Discarded memory is given back and not copied anywhere: it has no backup, the report counts it, and it is usable after wake."""
    size = 2 * memory.unit + 3
    block = memory.filled(content(size), "kv_cache", Policy.DISCARD)
    taken = memory.mapped()
    report = memory.sleep()
    assert (report.preserved, report.skipped, report.discarded) == (0, 0, size)
    assert report.unmapped == taken > 0
    assert memory.mapped() == 0
    assert memory.stats().tags["kv_cache"].backed_up == 0
    with pytest.raises(MemoryFault):
        memory.read_backup(block)
    assert memory.wake().discarded == size
    memory.write(block, content(size, 1))
    assert memory.read(block) == content(size, 1)


@clause("alloc.policy.zero@1", Level.MEMORY, capability="memory.sleep.2", facts="allocator fact 4")
def test_zeroed_memory_is_zero(memory: Memory) -> None:
    """Memory with the policy zero is all zeros after every wake, also where others used the device meanwhile."""
    size = 2 * memory.unit + 5
    block = memory.allocate(size, "scratch", Policy.ZERO)
    for seed in range(3):
        memory.write(block, content(size, seed))
        memory.sleep()
        memory.free(memory.filled(content(size, 9), "other", Policy.RESIDENT))
        memory.wake()
        assert memory.read(block) == bytes(size)


@clause("alloc.policy.mixed@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 4, allocator fact 5")
def test_policies_are_mixed(memory: Memory) -> None:
    """All policies may be mixed under one tag, and each allocation does what its own says."""
    data = content(memory.unit + 17)
    blocks = {policy: memory.filled(data, "kv_cache", policy) for policy in Policy}
    rebuilt: list[int] = []

    def rebuild() -> None:
        memory.write(blocks[Policy.REBUILD], data)
        rebuilt.append(1)

    memory.declare_source(blocks[Policy.REBUILD], rebuild)
    for cycle in range(1, 3):
        report = memory.sleep()
        assert (report.preserved, report.discarded) == (len(data), 3 * len(data))
        assert memory.read(blocks[Policy.RESIDENT]) == data
        memory.wake()
        assert len(rebuilt) == cycle
        for policy in (Policy.PRESERVE, Policy.RESIDENT, Policy.REBUILD):
            assert memory.read(blocks[policy]) == data, policy
        assert memory.read(blocks[Policy.ZERO]) == bytes(len(data))


@proves("memory.sleep.1")
@clause("alloc.policy.plan@1", Level.MEMORY, capability="memory.sleep.2", facts="allocator fact 5")
def test_a_plans_policy_goes_first(memory: Memory) -> None:
    """A plan's policy for a tag goes before that of its allocations, for this sleep only."""
    data = content(memory.unit)
    weights, cache = memory.filled(data), memory.filled(data, "kv_cache", Policy.DISCARD)
    for _ in range(2):
        memory.sleep(SleepPlan(policies={"weights": Policy.RESIDENT, "kv_cache": Policy.PRESERVE}))
        assert memory.read(weights) == data
        memory.wake()
        assert memory.read(cache) == data
    memory.sleep(SleepPlan(policies={"weights": Policy.ZERO}))
    memory.wake()
    assert memory.read(weights) == bytes(len(data))
    memory.write(weights, data)
    memory.sleep()
    memory.wake()
    assert memory.read(weights) == data


@clause("alloc.rebuild.once@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 5")
def test_a_callback_runs_once_per_wake(memory: Memory) -> None:
    """One callback declared for several allocations runs once per wake."""
    calls: list[int] = []
    blocks = [memory.allocate(memory.unit, "buffers", Policy.REBUILD) for _ in range(3)]

    def rebuild() -> None:
        calls.append(1)

    for block in blocks:
        memory.declare_source(block, rebuild)
    for cycle in (1, 2):
        memory.sleep()
        memory.wake()
        assert len(calls) == cycle


@clause(
    "alloc.rebuild.failed@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 5, allocator fact 18"
)
def test_a_failed_callback_leaves_everything_asleep(memory: Memory) -> None:
    """A callback that raises undoes the wake: its error is raised, everything is asleep with its backups, and a later wake succeeds."""
    data = content(memory.unit)
    kept, table = memory.filled(data), memory.allocate(memory.unit, "buffers", Policy.REBUILD)
    broken = [True]

    def rebuild() -> None:
        if broken:
            raise OSError("no table")
        memory.write(table, data)

    memory.declare_source(table, rebuild)
    memory.sleep()
    with pytest.raises(OSError, match="no table"):
        memory.wake()
    assert memory.stats().asleep == {"weights", "buffers"}
    assert memory.mapped() == 0
    assert memory.read_backup(kept) == data
    broken.clear()
    memory.wake()
    assert memory.read(table) == memory.read(kept) == data


@clause(
    "alloc.rebuild.missing@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 5, allocator fact 12"
)
def test_rebuild_needs_a_callback(memory: Memory) -> None:
    """A sleep with memory that is to be rebuilt and has no callback is refused with InvalidAllocation, and nothing is done."""
    other = memory.filled(content(memory.unit), "other")
    memory.allocate(memory.unit, "buffers", Policy.REBUILD)
    with pytest.raises(InvalidAllocation):
        memory.sleep()
    assert memory.stats().asleep == frozenset()
    assert memory.read(other) == content(memory.unit)


# Backups


@clause("alloc.backup.read@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 6")
@pytest.mark.parametrize("tier", [HOST, DISK, SOURCE])
def test_a_backup_is_read_while_asleep(memory: Memory, tier: SleepTier, tmp_path: Path) -> None:
    """The bytes of sleeping memory can be read without waking it and without a call of the driver."""
    data = content(2 * memory.unit + 100)
    block = filled_for(memory, tier, data, tmp_path)
    memory.sleep(plan_for(tier, tmp_path))
    calls = memory.driver.calls() if isinstance(memory, PoolMemory) else {}
    assert memory.read_backup(block) == data
    assert calls == (memory.driver.calls() if isinstance(memory, PoolMemory) else {})
    assert memory.stats().asleep == {"weights"}
    memory.wake()
    with pytest.raises(MemoryFault):
        memory.read_backup(block)


@clause("alloc.backup.fresh@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 8")
@pytest.mark.parametrize("tier", [HOST, DISK, SOURCE])
@pytest.mark.parametrize("keep", [False, True], ids=["copied", "kept"])
def test_a_write_between_sleeps_is_not_lost(memory: Memory, tier: SleepTier, keep: bool, tmp_path: Path) -> None:
    """Memory written in place between two sleeps, and marked as written, has its new bytes after the second wake."""
    block = filled_for(memory, tier, content(2 * memory.unit), tmp_path)
    plan = plan_for(tier, tmp_path, keep=frozenset({"weights"}) if keep else frozenset())
    for seed in range(1, 4):
        memory.sleep(plan)
        memory.wake()
        memory.write(block, content(100, seed), memory.unit)
        memory.mark_written("weights")
        report = memory.sleep(plan)
        assert (report.preserved, report.skipped) == (block.size, 0)
        memory.wake()
        assert memory.read(block, 100, memory.unit) == content(100, seed)


@clause("alloc.backup.unannounced@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 8")
def test_without_a_promise_no_backup_is_trusted(memory: Memory) -> None:
    """Memory of a tag that the plan does not keep is copied anew: a write that nobody announced is not lost."""
    block = memory.filled(content(memory.unit))
    memory.sleep(SleepPlan(keep=frozenset({"weights"})))
    memory.wake()
    memory.write(block, content(memory.unit, 2))
    assert memory.sleep().skipped == 0
    memory.wake()
    assert memory.read(block) == content(memory.unit, 2)
    assert memory.stats().tags["weights"].backed_up == 0


@clause("alloc.backup.kept@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 8, allocator fact 24")
@pytest.mark.parametrize("tier", [HOST, DISK])
def test_a_kept_backup_is_not_copied_again(memory: Memory, tier: SleepTier, tmp_path: Path) -> None:
    """A clean backup of a kept tag stays over wake, is counted in the books, and saves the next sleep its copy."""
    size = 2 * memory.unit + 11
    block = memory.filled(content(size))
    plan = plan_for(tier, tmp_path, keep=frozenset({"weights"}))
    assert memory.sleep(plan).preserved == size
    for _ in range(2):
        memory.wake()
        assert memory.stats().tags["weights"].backed_up == size
        report = memory.sleep(plan)
        assert (report.preserved, report.skipped) == (0, size)
    memory.wake()
    assert memory.read(block) == content(size)


@clause("alloc.backup.stale@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 8")
@pytest.mark.parametrize("tier", [HOST, DISK, SOURCE])
def test_verification_finds_an_unannounced_write(memory: Memory, tier: SleepTier, tmp_path: Path) -> None:
    """With `verify`, a write to kept or sourced memory that nobody announced is BackupStale, and the memory stays awake as it is."""
    data = content(2 * memory.unit)
    block = filled_for(memory, tier, data, tmp_path)
    plan = plan_for(tier, tmp_path, keep=frozenset({"weights"}), verify=True)
    for _ in range(2):
        memory.sleep(plan)
        memory.wake()
    memory.write(block, bytes([data[-1] ^ 1]), len(data) - 1)
    with pytest.raises(BackupStale):
        memory.sleep(plan)
    changed = data[:-1] + bytes([data[-1] ^ 1])
    assert memory.read(block) == changed
    memory.mark_written("weights")
    memory.sleep(plan)
    memory.wake()
    assert memory.read(block) == changed


@clause("alloc.backup.discarded@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 24")
def test_backups_can_be_dropped(memory: Memory) -> None:
    """`discard_backup` drops the backups of the tags named, and no others; the memory then wakes with undefined bytes."""
    data = content(memory.unit)
    lost, kept = memory.filled(data), memory.filled(data, "buffers")
    memory.sleep()
    memory.discard_backup("weights")
    assert memory.stats().tags["weights"].backed_up == 0
    assert memory.stats().tags["buffers"].backed_up == len(data)
    with pytest.raises(MemoryFault):
        memory.read_backup(lost)
    assert memory.wake().discarded == len(data)
    memory.read(lost)
    assert memory.read(kept) == data


@clause("alloc.live.ranges@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 2")
def test_live_ranges_alone_are_preserved(memory: Memory) -> None:
    """Where a plan names live ranges of an allocation these bytes are preserved and no more of it; its neighbours are whole."""
    unit = memory.unit
    data = content(3 * unit)
    block, neighbour = memory.filled(data, "kv_cache"), memory.filled(content(5000, 1), "kv_cache")
    ranges = [(0, 10), (unit - 5, 10), (2 * unit, 100), (3 * unit - 1, 1)]
    report = memory.sleep(live={block: ranges})
    assert report.preserved == 121 + 5000
    memory.wake()
    for start, size in ranges:
        assert memory.read(block, size, start) == data[start : start + size]
    assert memory.read(neighbour) == content(5000, 1)


@clause("alloc.live.bounds@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 29")
@pytest.mark.parametrize("beyond", [(0, 1), (1, 0), (2**62, 1)], ids=["size", "start", "huge"])
def test_live_ranges_beyond_their_memory_are_refused(memory: Memory, beyond: tuple[int, int]) -> None:
    """Live ranges beyond the end of their allocation are refused with InvalidAllocation, and nothing sleeps."""
    size = memory.unit - 5
    block, _ = memory.filled(content(size)), memory.filled(content(size))
    start, more = beyond
    with pytest.raises(InvalidAllocation):
        memory.sleep(live={block: [(start, size + more)]})
    assert memory.stats().asleep == frozenset()
    assert memory.read(block) == content(size)


# Tags and states


@clause(
    "alloc.tags.apart@1",
    Level.MEMORY,
    capability="memory.sleep.1",
    facts="allocator fact 10, allocator fact 11, allocator fact 16",
)
def test_tags_sleep_and_wake_apart(memory: Memory) -> None:
    """A sleep or wake of some tags touches these and no others: their bytes, mappings and names in the reports."""
    size = memory.unit
    blocks = {
        tag: memory.filled(content(size, seed), tag) for seed, tag in enumerate(("weights", "kv_cache", "buffers"))
    }
    report = memory.sleep(SleepPlan(tags=frozenset({"weights", "buffers"})))
    assert report.still_asleep == memory.stats().asleep == {"weights", "buffers"}
    assert report.preserved == 2 * size
    assert memory.read(blocks["kv_cache"]) == content(size, 1)
    tags = memory.stats().tags
    assert (tags["weights"].mapped, tags["buffers"].mapped) == (0, 0)
    assert tags["kv_cache"].mapped > 0
    report = memory.wake(["weights"])
    assert report.still_asleep == memory.stats().asleep == {"buffers"}
    assert report.preserved == size
    assert memory.stats().tags["buffers"].mapped == 0
    assert memory.read(blocks["weights"]) == content(size, 0)
    assert memory.read_backup(blocks["buffers"]) == content(size, 2)
    memory.wake(["buffers"])
    assert memory.read(blocks["buffers"]) == content(size, 2)


@clause("alloc.state.repeated@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 9")
def test_a_second_sleep_or_wake_does_nothing(memory: Memory) -> None:
    """A second sleep or wake does nothing and says so, also when the second sleep's plan would discard."""
    data = content(memory.unit)
    block = memory.filled(data, "kv_cache")
    memory.sleep()
    again = memory.sleep(SleepPlan(policies={"kv_cache": Policy.DISCARD}))
    assert (again.preserved, again.discarded, again.skipped, again.unmapped) == (0, 0, 0, 0)
    assert again.still_asleep == {"kv_cache"}
    assert memory.read_backup(block) == data
    assert memory.wake().preserved == len(data)
    memory.write(block, content(memory.unit, 1))
    awake = memory.wake()
    assert (awake.preserved, awake.discarded, awake.unmapped, awake.still_asleep) == (0, 0, 0, frozenset())
    assert memory.read(block) == content(memory.unit, 1)


_KNOWN_AND_UNKNOWN = ("weights", "wieghts")
_UNKNOWN_TAG: dict[str, Callable[[Memory], object]] = {
    "sleep": lambda memory: memory.sleep(SleepPlan(tags=frozenset(_KNOWN_AND_UNKNOWN))),
    "policies": lambda memory: memory.sleep(SleepPlan(policies={"wieghts": Policy.DISCARD})),
    "keep": lambda memory: memory.sleep(SleepPlan(keep=frozenset({"wieghts"}))),
    "prepare_sleep": lambda memory: memory.prepare_sleep(SleepPlan(tags=frozenset(_KNOWN_AND_UNKNOWN))),
    "wake": lambda memory: memory.wake(["kv_cache", "wieghts"]),
    "mark_written": lambda memory: memory.mark_written("wieghts"),
    "discard_backup": lambda memory: memory.discard_backup("kv_cache", "wieghts"),
}


@clause("alloc.tags.unknown@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 12")
@pytest.mark.parametrize("operation", _UNKNOWN_TAG)
def test_an_unknown_tag_is_an_error(memory: Memory, operation: str) -> None:
    """An operation that names a tag which no memory has, alone or beside others, raises UnknownTag and does nothing."""
    data = content(memory.unit)
    awake, sleeping = memory.filled(data), memory.filled(data, "kv_cache")
    memory.sleep(SleepPlan(tags=frozenset({"kv_cache"})))
    with pytest.raises(UnknownTag, match="wieghts"):
        _UNKNOWN_TAG[operation](memory)
    assert memory.stats().asleep == {"kv_cache"}
    assert memory.read(awake) == memory.read_backup(sleeping) == data
    memory.wake()
    assert memory.read(sleeping) == data


@clause("alloc.state.allocate-asleep@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 13")
def test_memory_is_allocated_while_others_sleep(memory: Memory) -> None:
    """New memory is awake and usable while its tag or another sleeps, and joins the next sleep; what slept is untouched."""
    size = memory.unit
    sleeping = memory.filled(content(size))
    memory.sleep()
    joined, other = memory.filled(content(size, 1)), memory.filled(content(size, 2), "kv_cache")
    assert (memory.read(joined), memory.read(other)) == (content(size, 1), content(size, 2))
    assert memory.read_backup(sleeping) == content(size)
    assert memory.sleep().preserved == 2 * size
    memory.wake()
    assert [memory.read(block) for block in (sleeping, joined, other)] == [content(size, seed) for seed in range(3)]


@clause("alloc.state.free-asleep@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 14")
@pytest.mark.parametrize("tier", [HOST, DISK])
def test_memory_is_freed_while_asleep(memory: Memory, tier: SleepTier, tmp_path: Path) -> None:
    """Memory freed while asleep takes its backup with it, is not there on wake, and leaves the books and its neighbours right."""
    size = 9 << 20
    first, second = memory.filled(content(size)), memory.filled(content(size, 1))
    memory.sleep(plan_for(tier, tmp_path))
    calls = memory.driver.calls() if isinstance(memory, PoolMemory) else {}
    memory.free(first)
    stats = memory.stats()
    assert (stats.allocated, stats.tags["weights"].allocations) == (size, 1)
    assert stats.tags["weights"].backed_up == size
    if isinstance(memory, PoolMemory):
        touched = {name for name, count in memory.driver.calls().items() if count != calls.get(name, 0)}
        assert touched <= {"release_address", "device_synchronize"}
    assert memory.wake().preserved == size
    assert memory.read(second) == content(size, 1)


@clause("alloc.state.asleep-is-guarded@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 47")
def test_sleeping_memory_is_not_read(pool_memory: PoolMemory) -> None:
    """Bytes of sleeping memory can neither be read nor written through the allocator: MemoryAsleep."""
    block = pool_memory.filled(content(1000))
    pool_memory.sleep()
    for call in (
        lambda: pool_memory.pool.read(block.address, 1),
        lambda: pool_memory.pool.write(block.address, b"x"),
    ):
        with pytest.raises(MemoryAsleep):
            call()
    pool_memory.wake()
    assert pool_memory.read(block) == content(1000)


@clause("alloc.state.busy@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 15")
def test_an_operation_within_an_operation_is_busy(memory: Memory) -> None:
    """A sleep or wake started from within another, by its progress callback, raises MemoryBusy, and the outer one goes on."""
    data = content(2 * memory.unit)
    block = memory.filled(data)
    met: list[str] = []

    def nested(done: int, in_all: int) -> None:
        for name, call in (("sleep", memory.sleep), ("wake", memory.wake)):
            with pytest.raises(MemoryBusy):
                call()
            met.append(name)

    memory.sleep(SleepPlan(progress=nested))
    assert {"sleep", "wake"} <= set(met)
    memory.wake()
    assert memory.read(block) == data


@clause("alloc.progress.monotonic@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 46")
def test_progress_grows_to_all(memory: Memory) -> None:
    """Progress is told as (bytes done, bytes in all): it never falls, the total stays, and it ends at the total."""
    told: list[tuple[int, int]] = []
    memory.filled(content(3 * memory.unit))
    memory.sleep(SleepPlan(progress=lambda done, in_all: told.append((done, in_all))))
    assert told, "progress was never called"
    done = [one for one, _ in told]
    assert done == sorted(done)
    assert {in_all for _, in_all in told} == {told[-1][1]}
    assert told[-1][0] == told[-1][1] >= 3 * memory.unit


@clause("alloc.progress.cancels@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 18")
def test_an_error_of_progress_cancels(memory: Memory) -> None:
    """An error of the progress callback ends the sleep with this error, and everything is awake with its bytes."""

    class CancelledError(Exception):
        pass

    def cancel(done: int, in_all: int) -> None:
        raise CancelledError

    blocks = [memory.filled(content(memory.unit, seed), tag) for seed, tag in enumerate(("weights", "kv_cache"))]
    with pytest.raises(CancelledError):
        memory.sleep(SleepPlan(progress=cancel))
    assert memory.stats().asleep == frozenset()
    assert [memory.read(block) for block in blocks] == [content(memory.unit, seed) for seed in range(2)]
    memory.sleep()
    memory.wake()
    assert memory.read(blocks[0]) == content(memory.unit)


@clause("alloc.gc.within@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 36")
def test_tensors_die_within_a_sleep(tensor_memory: TensorMemory) -> None:
    """The garbage collector may run in the middle of a sleep and find cycles that own tensors: their memory is freed."""
    size = 1 << 20

    class Node:
        def __init__(self, tensor: object) -> None:
            self.tensor, self.me = tensor, self

    def collect(done: int, in_all: int) -> None:
        gc.collect()

    kept = tensor_memory.filled(content(size))
    gc.disable()
    try:
        gone = [weakref.ref(Node(tensor_memory.allocator.empty((size,), DType.UINT8))) for _ in range(4)]
        tensor_memory.sleep(SleepPlan(progress=collect))
    finally:
        gc.enable()
    assert sum(node() is not None for node in gone) == 0, "objects that were garbage are still there"
    assert tensor_memory.stats().allocated == size
    tensor_memory.wake()
    assert tensor_memory.read(kept) == content(size)


# Budgets and tiers


@clause("alloc.budget.refused@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 20")
@pytest.mark.parametrize("tier", [HOST, DISK])
@pytest.mark.parametrize("operation", ["sleep", "prepare_sleep"])
def test_a_budget_is_kept(memory: Memory, tier: SleepTier, operation: str, tmp_path: Path) -> None:
    """A backup beyond its budget is refused with HostBudgetExceeded before any call of the driver; within it the sleep succeeds."""
    if operation == "prepare_sleep" and tier is SleepTier.DISK:
        operation = "sleep"  # nothing of a disk is taken ahead
    data = content(2 * memory.unit + 9)
    block = memory.filled(data)
    budget = "host_budget" if tier is SleepTier.HOST else "disk_budget"
    calls = memory.driver.calls() if isinstance(memory, PoolMemory) else {}
    with pytest.raises(HostBudgetExceeded):
        getattr(memory, operation)(plan_for(tier, tmp_path, **{budget: len(data) - 1}))
    assert calls == (memory.driver.calls() if isinstance(memory, PoolMemory) else {})
    assert memory.stats().asleep == frozenset()
    assert memory.read(block) == data
    plan = plan_for(tier, tmp_path, **{budget: len(data) + (64 << 10)})
    memory.prepare_sleep(plan)
    assert memory.sleep(plan).preserved == len(data)
    memory.wake()
    assert memory.read(block) == data


@clause("alloc.disk.no-host@1", Level.MEMORY, capability="memory.tier.disk", facts="allocator fact 24")
def test_a_disk_backup_is_a_file_and_is_removed(memory: Memory, tmp_path: Path) -> None:
    """A backup on disk is in the directory asked for, about as large as what it preserves, and is removed after wake."""
    data = content(2 * memory.unit + 5)
    block = memory.filled(data)
    report = memory.sleep(plan_for(SleepTier.DISK, tmp_path))
    assert report.tiers == {SleepTier.DISK: len(data)}
    assert len(data) <= sum(files_below(tmp_path).values()) < len(data) + (64 << 10)
    memory.wake()
    assert memory.read(block) == data
    is_gone = wait_until(lambda: max(files_below(tmp_path).values(), default=0) < len(data))
    assert is_gone, f"the backup is still on disk: {files_below(tmp_path)}"


def _flip(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 1]))


def _truncate(file: Path) -> None:
    import os

    os.truncate(file, file.stat().st_size // 2)


_DAMAGE: dict[str, Callable[[Path], None]] = {"flipped": _flip, "truncated": _truncate}


@clause(
    "alloc.disk.corrupt@1", Level.MEMORY, capability="memory.tier.disk", facts="allocator fact 2, allocator fact 18"
)
@pytest.mark.parametrize("damage", _DAMAGE)
def test_a_damaged_backup_is_not_served(memory: Memory, damage: str, tmp_path: Path) -> None:
    """A damaged backup is BackupCorrupt on wake and is never served: all stays asleep, others keep their backups, and
    `discard_backup` is the way out."""
    data, other = content(2 * memory.unit), content(memory.unit, 1)
    damaged, whole = memory.filled(data), memory.filled(other, "buffers")
    memory.sleep(plan_for(SleepTier.DISK, tmp_path, tags=frozenset({"weights"})))
    memory.sleep()
    _DAMAGE[damage](next(iter(files_below(tmp_path))))
    with pytest.raises(BackupCorrupt):
        memory.wake()
    assert memory.stats().asleep == {"weights", "buffers"}
    assert memory.mapped() == 0
    with pytest.raises(BackupCorrupt):
        memory.read_backup(damaged)
    assert memory.read_backup(whole) == other
    memory.discard_backup("weights")
    memory.wake()
    memory.write(damaged, data)
    assert (memory.read(damaged), memory.read(whole)) == (data, other)


@clause("alloc.source.read-again@1", Level.MEMORY, capability="memory.tier.source", facts="allocator fact 24")
def test_sources_are_read_again(memory: Memory, tmp_path: Path) -> None:
    """Declared bytes are not copied but read again from their files; what no file holds is preserved on the host."""
    unit = memory.unit
    data = content(3 * unit)
    file = tmp_path / "checkpoint"
    file.write_bytes(HEADER + data)
    block = memory.filled(data)
    at = len(HEADER)
    memory.declare_source(
        block, [FileExtent(0, unit, str(file), at), FileExtent(2 * unit, 100, str(file), at + 2 * unit)]
    )
    assert memory.stats().tags["weights"].sourced == unit + 100
    for _ in range(2):
        report = memory.sleep(SleepPlan(tier=SleepTier.SOURCE))
        assert report.skipped == unit + 100
        assert report.tiers == {SleepTier.SOURCE: unit + 100, SleepTier.HOST: 2 * unit - 100}
        assert memory.read_backup(block) == data
        memory.wake()
        assert memory.read(block) == data


@clause(
    "alloc.source.changed@1", Level.MEMORY, capability="memory.tier.source", facts="allocator fact 2, allocator fact 18"
)
@pytest.mark.parametrize("when", ["before", "asleep"])
@pytest.mark.parametrize("damage", _DAMAGE)
def test_a_changed_source_is_not_served(memory: Memory, when: str, damage: str, tmp_path: Path) -> None:
    """A source file that has changed is BackupCorrupt: before the sleep nothing is given up, asleep nothing wrong is served."""
    import os

    data = content(memory.unit)
    file = tmp_path / "checkpoint"
    file.write_bytes(HEADER + data)
    os.utime(file, ns=(0, 0))  # a change within the clock's resolution of the file system would not show
    block = memory.filled(data)
    memory.declare_source(block, [FileExtent(0, len(data), str(file), len(HEADER))])
    plan = SleepPlan(tier=SleepTier.SOURCE)
    if when == "before":
        _DAMAGE[damage](file)
        with pytest.raises(BackupCorrupt):
            memory.sleep(plan)
        assert memory.read(block) == data
        memory.mark_written("weights")
        memory.sleep(plan)
    else:
        memory.sleep(plan)
        _DAMAGE[damage](file)
        with pytest.raises(BackupCorrupt):
            memory.wake()
        assert memory.stats().asleep == {"weights"}
        memory.discard_backup("weights")
        memory.wake()
        memory.write(block, data)
    memory.wake()
    assert memory.read(block) == data


@clause(
    "alloc.source.callback@1", Level.MEMORY, capability="memory.tier.source", facts="allocator fact 5, allocator fact 8"
)
def test_a_written_callback_is_void(memory: Memory) -> None:
    """A callback restores what the source tier dropped; once the memory is marked as written it is void and the bytes are copied."""
    data, changed = content(memory.unit), content(memory.unit, 1)
    block = memory.filled(data)
    memory.declare_source(block, lambda: memory.write(block, data))
    report = memory.sleep(SleepPlan(tier=SleepTier.SOURCE))
    assert (report.preserved, report.skipped) == (0, len(data))
    memory.wake()
    assert memory.read(block) == data
    memory.write(block, changed)
    memory.mark_written("weights")
    assert memory.sleep(SleepPlan(tier=SleepTier.SOURCE)).preserved == len(data)
    memory.wake()
    assert memory.read(block) == changed


# Accounting


@clause("alloc.memory.returned@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 23")
def test_sleep_gives_device_memory_back(memory: Memory) -> None:
    """Sleep gives back what was mapped, and wake takes it again: the report, the books and the driver's handles say the same."""
    for tag in ("weights", "kv_cache"):
        memory.filled(content(2 * memory.unit + 1), tag)
    taken = memory.mapped()
    assert taken >= 4 * memory.unit + 2
    for _ in range(2):
        assert memory.sleep().unmapped == taken
        assert memory.mapped() == 0
        if isinstance(memory, PoolMemory):
            held = memory.driver.held()
            assert (held["handles"], held["bytes"], held["mappings"]) == (0, 0, 0)
        assert memory.wake().unmapped == taken
        assert memory.mapped() == taken
        if isinstance(memory, PoolMemory):
            assert memory.driver.held()["bytes"] == taken


@clause("alloc.memory.free@1", Level.MEMORY, capability="memory.sleep.2", facts="allocator fact 23")
def test_free_memory_rises_by_what_sleeps(memory: Memory) -> None:
    """The device's free memory, as its driver counts it, rises by what was discarded and falls again when that wakes."""
    size = max(256 << 20, 4 * memory.unit)  # a change that shows beside what others take and give
    block = memory.allocate(size, "kv_cache", Policy.DISCARD)
    data = content(1 << 20)

    def use() -> None:
        for at in range(0, size, 1 << 20):
            memory.write(block, data, at)

    def changes(sign: int, since: int) -> bool:
        return wait_until(lambda: sign * (memory.memory_info().free - since) >= size // 2, 1.0)

    risen = fallen = False
    # Others take and give memory of a device too: one clear observation of each is enough.
    for _ in range(10):
        use()
        awake = memory.memory_info().free
        assert memory.sleep().unmapped >= size
        risen = changes(1, awake) or risen
        asleep = memory.memory_info().free
        memory.wake()
        use()
        fallen = changes(-1, asleep) or fallen
        if risen and fallen:
            break
    assert risen, "free memory never rose by as much as a sleep gave back"
    assert fallen, "free memory never fell by as much as a wake took"
    info = memory.memory_info()
    assert 0 < info.free <= info.total


@clause("alloc.books.agree@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 24")
def test_the_books_agree(memory: Memory) -> None:
    """The books count bytes as they were asked for, by tag: allocations, backups as large as what they preserve, and the peak."""
    sizes = {"weights": [700, memory.unit + 1], "kv_cache": [3 * memory.unit]}
    blocks = {tag: [memory.filled(content(size), tag) for size in own] for tag, own in sizes.items()}
    in_all = sum(map(sum, sizes.values()))
    stats = memory.stats()
    for tag, own in sizes.items():
        assert (stats.tags[tag].allocated, stats.tags[tag].allocations) == (sum(own), len(own))
        assert stats.tags[tag].mapped >= sum(own)
        assert stats.tags[tag].backed_up == 0
    assert stats.allocated == stats.peak_allocated == in_all
    report = memory.sleep(SleepPlan(tags=frozenset({"weights"})))
    stats = memory.stats()
    assert stats.tags["weights"].backed_up == report.preserved == sum(sizes["weights"])
    assert stats.allocated == in_all
    memory.wake()
    memory.free(blocks["kv_cache"].pop())
    stats = memory.stats()
    assert (stats.allocated, stats.peak_allocated) == (sum(sizes["weights"]), in_all)
    assert (stats.tags["kv_cache"].allocated, stats.tags["kv_cache"].allocations) == (0, 0)
    assert stats.tags["weights"].backed_up == 0


@clause("alloc.report.truthful@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 46")
def test_reports_add_up(memory: Memory) -> None:
    """A report's bytes add up to what was asleep, its tiers to what was kept, and its phases take no more time than the total."""

    def check(report: MemoryReport, kept: int) -> None:
        assert sum(report.tiers.values()) == report.preserved + report.skipped == kept
        phases = {name: value for name, value in report.seconds.items() if name != "total"}
        assert min(phases.values(), default=0.0) >= 0
        assert max(phases.values(), default=0.0) <= report.seconds["total"] + 1e-3
        assert report.bytes_per_second > 0
        assert report.retained == 0

    memory.filled(content(2 * memory.unit))
    memory.filled(content(memory.unit), "kv_cache", Policy.DISCARD)
    report = memory.sleep()
    check(report, 2 * memory.unit)
    assert report.discarded == memory.unit
    check(memory.wake(), 2 * memory.unit)


@clause("alloc.memory.quirks@1", Level.MEMORY, facts="allocator fact 28")
def test_quirks_are_visible(memory: Memory, target: Target) -> None:
    """What the driver found by probing is in the memory information by name, and the device's free memory is within its total."""
    info = memory.memory_info()
    assert 0 <= info.free <= info.total
    driver = target.driver()
    if driver is not None:
        driver.open()
        found = driver.quirks()
        driver.close()
        assert set(info.quirks) == {quirk.name.lower() for quirk in found if quirk.name}


# Sizes


@clause("alloc.sizes.none@1", Level.MEMORY, facts="allocator fact 29")
@pytest.mark.parametrize("size", [0, -1, -(2**40)], ids=["zero", "negative", "very-negative"])
def test_no_bytes_are_refused(memory: Memory, size: int) -> None:
    """An allocation of a negative size is InvalidAllocation; one of no bytes takes no memory."""
    if size == 0 and isinstance(memory, TensorMemory):
        assert tuple(memory.allocator.empty((0, 3), DType.FLOAT32).shape) == (0, 3)
    else:
        with pytest.raises(InvalidAllocation):
            memory.allocate(size)
    assert memory.stats().allocated == memory.mapped() == 0


@clause("alloc.sizes.huge@1", Level.MEMORY, facts="allocator fact 22, allocator fact 29")
@pytest.mark.parametrize("size", ["total", "47-bits", "63-bits"])
def test_huge_sizes_are_out_of_memory(memory: Memory, size: str) -> None:
    """More memory than the device has is DeviceOutOfMemory, which is a MemoryError; nothing is kept of it, and the rest goes on."""
    total = memory.memory_info().total
    count = {"total": total + memory.unit, "47-bits": 1 << 47, "63-bits": (1 << 63) - 1}[size]
    block = memory.filled(content(1000))
    mapped = memory.mapped()
    with pytest.raises(DeviceOutOfMemory) as caught:
        memory.allocate(count)
    assert isinstance(caught.value, MemoryError)
    assert (memory.stats().allocated, memory.mapped()) == (1000, mapped)
    if isinstance(memory, PoolMemory):
        assert memory.driver.held()["bytes"] == mapped
    assert memory.read(block) == content(1000)
    assert memory.read(memory.filled(content(1000, 1))) == content(1000, 1)


@clause("alloc.sizes.aligned@1", Level.MEMORY, facts="allocator fact 30")
def test_addresses_are_aligned(memory: Memory) -> None:
    """Memory is aligned to 512 bytes whatever its size, allocations do not overlap, and the last byte of each is its own."""
    blocks = [memory.filled(content(size, size), tag) for size in edges(memory) for tag in ("weights", "kv_cache")]
    assert {block.address % 512 for block in blocks} == {0}
    spans = sorted((block.address, block.address + block.size) for block in blocks)
    assert [(one, next_) for one, next_ in pairwise(spans) if one[1] > next_[0]] == [], "allocations overlap"
    changed = [block.size for block in blocks if memory.read(block) != content(block.size, block.size)]
    assert changed == [], "allocations of these sizes lost bytes"


@clause("alloc.sizes.rounded@1", Level.MEMORY, facts="allocator fact 30")
def test_sizes_are_rounded_before_the_driver(pool_memory: PoolMemory) -> None:
    """The driver is asked for multiples of its granularity only, and memory is not rounded up by more than one unit."""
    for size in edges(pool_memory):
        before = pool_memory.driver.held()["bytes"]
        pool_memory.allocate(size)
        grown = pool_memory.driver.held()["bytes"] - before
        assert grown % pool_memory.unit == 0
        assert size <= grown < size + pool_memory.unit


# Freeing and the end


@clause("alloc.free.once@1", Level.MEMORY, facts="allocator fact 14")
def test_memory_is_freed_once_and_by_its_first_byte(pool_memory: PoolMemory) -> None:
    """Freeing what was never handed out, what is freed already, or an address within memory is ForeignMemory and frees nothing."""
    own = pool_memory.filled(content(2 * pool_memory.unit))
    small, neighbour = (pool_memory.allocate(5000, shared=True) for _ in range(2))
    pool_memory.write(neighbour, content(5000))
    free = pool_memory.pool.free
    for foreign in (0, 4096, own.address + 1, own.address + pool_memory.unit, small.address + 512):
        with pytest.raises(ForeignMemory):
            free(foreign)
    for block in (own, small):
        pool_memory.free(block)
        with pytest.raises(ForeignMemory):
            free(block.address)
    assert pool_memory.read(neighbour) == content(5000)
    assert pool_memory.stats().allocated == 5000


@clause("alloc.free.returns@1", Level.MEMORY, facts="allocator fact 24")
def test_freed_memory_returns_to_the_device(memory: Memory) -> None:
    """Freed memory leaves the books and goes back to the device at once."""
    memory.free(memory.filled(content(9 << 20)))
    assert memory.stats().allocated == memory.mapped() == 0
    if isinstance(memory, PoolMemory):
        held = memory.driver.held()
        assert (held["bytes"], held["address_bytes"]) == (0, 0)


@clause("alloc.free.descriptors@1", Level.MEMORY)
def test_freed_memory_leaves_no_file_open(memory: Memory) -> None:
    """Memory that is taken, written and freed over and over leaves no more files open in the process than before."""

    def cycles(count: int) -> None:
        for size in (700, memory.unit + 1) * (count // 2):
            memory.free(memory.filled(content(size)))

    cycles(4)  # what is kept from the first use on is not counted
    before = process_counts()
    cycles(20)
    grown = differences(before, process_counts()).get("files", 0)
    assert grown < 10, f"{grown} more open files after 20 allocations that were freed"


@clause("alloc.tensor.last-view@1", Level.MEMORY, facts="allocator fact 3, allocator fact 36")
@pytest.mark.parametrize("size", [400, 12 << 20], ids=["small", "large"])
def test_the_last_view_gives_the_memory_back(tensor_memory: TensorMemory, size: int) -> None:
    """A tensor's memory is held by every view and storage of it, and returns when the last one is gone."""
    tensor = tensor_memory.allocator.empty((size // 4,), DType.FLOAT32)
    view = tensor[1:5].unsqueeze(0)
    storage = tensor.untyped_storage()
    del tensor
    gc.collect()
    assert tensor_memory.stats().allocated == size
    del view
    assert tensor_memory.stats().allocated == size
    del storage
    assert tensor_memory.stats().allocated == 0


@clause("alloc.tensor.foreign@1", Level.MEMORY, capability="memory.tier.source")
def test_foreign_tensors_are_refused(target: Target, tensor_memory: TensorMemory) -> None:
    """A tensor that the allocator did not hand out is ForeignMemory where a source is declared for it, and its bytes stay."""
    import torch

    foreign = torch.full((1024,), 3.0, device=target.device.torch_device)
    with pytest.raises(ForeignMemory):
        tensor_memory.allocator.declare_source(foreign, lambda: None)
    assert set(foreign.flatten().tolist()) == {3.0}


@clause("alloc.tensor.outlives@1", Level.MEMORY, facts="allocator fact 38")
def test_tensors_outlive_their_allocator(target: Target, tensor_memory: TensorMemory) -> None:
    """Tensors keep their memory after their allocator was closed and dropped."""
    other = open_memory(target, "tensors")
    assert isinstance(other, TensorMemory)
    small, large = (other.allocator.empty((count,), DType.FLOAT32) for count in (1000, 3 << 20))
    other.close()
    del other
    gc.collect()
    for tensor in (small, large):
        tensor.fill_(2.0)
        assert float(tensor[-1]) == 2.0


@clause("alloc.close.refuses@1", Level.MEMORY, facts="allocator fact 38")
def test_a_closed_allocator_hands_out_nothing(memory: Memory) -> None:
    """A closed allocator refuses new memory and operations with MemoryFault; what lives stays in the books until it is freed."""
    block = memory.filled(content(1000))
    memory.close()
    memory.close()
    calls: list[Callable[[], object]] = [lambda: memory.allocate(1)]
    if 1 in memory.claims.sleep_levels:
        calls += [memory.sleep, memory.wake]
    for call in calls:
        with pytest.raises(MemoryFault):
            call()
    assert memory.stats().allocated == 1000
    memory.free(block)
    assert memory.stats().allocated == 0


@clause("alloc.engines.independent@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 40")
def test_two_engines_are_independent(target: Target, memory: Memory) -> None:
    """Two allocators of one process on one device do not see each other's memory, tags or sleep."""
    other = open_memory(target, memory.way)
    size = memory.unit
    mine, theirs = memory.filled(content(size)), other.filled(content(size, 1))
    memory.sleep()
    assert memory.stats().asleep == {"weights"}
    assert other.stats().asleep == frozenset()
    assert other.read(theirs) == content(size, 1)
    other.sleep()
    memory.wake()
    assert memory.read(mine) == content(size)
    assert other.read_backup(theirs) == content(size, 1)
    other.wake()
    other.free(theirs)
    assert (memory.stats().allocated, other.stats().allocated) == (size, 0)
    other.end()


@clause("alloc.streams.in-flight@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 34")
def test_work_in_flight_is_completed_before_sleep(pool_memory: PoolMemory) -> None:
    """Work that is in flight on any stream is completed before its memory is copied and given back, and before it is freed."""
    driver, size = pool_memory.driver, 2 * pool_memory.unit
    first, second = pool_memory.filled(content(size)), pool_memory.filled(content(size))
    streams = [driver.stream_create() for _ in range(2)]
    for stream, block in zip(streams, (first, second), strict=True):
        driver.fill(block.address, 0x5A, size, stream)
    before = driver.calls().get("device_synchronize", 0)
    pool_memory.sleep()
    assert driver.calls()["device_synchronize"] > before
    pool_memory.wake()
    assert pool_memory.read(first) == pool_memory.read(second) == b"\x5a" * size
    for stream in streams:
        driver.stream_destroy(stream)


# Elastic memory


@clause("alloc.elastic.keeps@1", Level.MEMORY, capability="memory.elastic", facts="allocator fact 2")
def test_elastic_memory_keeps_its_bytes(memory: Memory) -> None:
    """Elastic memory grows and shrinks at its address; bytes that stay keep their values, through sleep and wake too."""
    unit = memory.unit
    data = content(3 * unit)
    block = memory.allocate(2 * unit, "kv_cache", capacity=8 * unit)
    memory.write(block, data[: 2 * unit])
    address = block.address
    memory.resize(block, 3 * unit)
    assert memory.read(block, 2 * unit) == data[: 2 * unit]
    memory.write(block, data[2 * unit :], 2 * unit)
    memory.sleep()
    memory.wake()
    assert memory.read(block) == data
    memory.resize(block, unit + 1)
    assert memory.read(block) == data[: unit + 1]
    memory.resize(block, 8 * unit)
    assert memory.read(block, unit + 1) == data[: unit + 1]
    assert block.address == address
    if block.tensor is not None:
        assert block.tensor.data_ptr() == address


@clause("alloc.elastic.returns@1", Level.MEMORY, capability="memory.elastic", facts="allocator fact 24")
def test_elastic_memory_takes_and_returns_what_it_needs(memory: Memory) -> None:
    """Elastic memory holds device memory for its size and not for its capacity; shrinking gives memory back."""
    unit = memory.unit
    block = memory.allocate(2 * unit, "kv_cache", capacity=16 * unit)
    assert 2 * unit <= memory.mapped() < 4 * unit
    for units in (12, 3, 1):
        memory.resize(block, units * unit)
        assert units * unit <= memory.mapped() < (units + 2) * unit
        assert memory.stats().tags["kv_cache"].allocated == units * unit


@clause("alloc.elastic.bounds@1", Level.MEMORY, capability="memory.elastic", facts="allocator fact 29")
def test_elastic_memory_has_bounds(memory: Memory) -> None:
    """Growth beyond the capacity, a size of none, and resizing memory that is not elastic are InvalidAllocation; nothing changes."""
    unit = memory.unit
    data = content(2 * unit)
    elastic, fixed = memory.filled(data, "kv_cache", capacity=4 * unit), memory.filled(data)
    mapped = memory.mapped()
    for block, size in ((elastic, 1 << 40), (elastic, 0), (fixed, unit)):
        with pytest.raises(InvalidAllocation):
            memory.resize(block, size)
    with pytest.raises(InvalidAllocation):
        memory.allocate(2 * unit, capacity=unit)
    assert memory.mapped() == mapped
    assert memory.read(elastic) == memory.read(fixed) == data


@clause("alloc.elastic.asleep@1", Level.MEMORY, capability="memory.elastic", facts="allocator fact 9")
def test_sleeping_memory_is_not_resized(memory: Memory) -> None:
    """Resizing sleeping memory is MemoryAsleep, and its backup stays."""
    data = content(2 * memory.unit)
    block = memory.filled(data, "kv_cache", capacity=4 * memory.unit)
    memory.sleep()
    with pytest.raises(MemoryAsleep):
        memory.resize(block, memory.unit)
    block.size = len(data)
    memory.wake()
    assert memory.read(block) == data


@clause("alloc.elastic.refused@1", Level.MEMORY, capability="memory.elastic", refusal=True)
def test_elastic_memory_is_refused(memory: Memory) -> None:
    """Where elastic memory is not claimed it is refused with CapabilityRefused, and nothing is taken."""
    with pytest.raises(CapabilityRefused) as caught:
        memory.allocate(memory.unit, capacity=2 * memory.unit)
    assert caught.value.reasons, "refused without a reason"
    assert memory.stats().allocated == memory.mapped() == 0


# What is not claimed


def _refused_sleep(memory: TensorMemory, plan: SleepPlan) -> None:
    block = memory.filled(content(1000))
    with pytest.raises(CapabilityRefused) as caught:
        memory.allocator.sleep(plan)
    assert caught.value.reasons, "refused without a reason"
    assert memory.stats().asleep == frozenset()
    assert memory.read(block) == content(1000)


@clause("alloc.sleep.refused@1", Level.MEMORY, capability="memory.sleep.1", refusal=True)
def test_sleep_is_refused(tensor_memory: TensorMemory) -> None:
    """Where level 1 is not claimed a sleep that preserves is refused with CapabilityRefused, and everything stays awake."""
    _refused_sleep(tensor_memory, SleepPlan())


@clause("alloc.discard.refused@1", Level.MEMORY, capability="memory.sleep.2", refusal=True)
def test_discarding_is_refused(tensor_memory: TensorMemory) -> None:
    """Where level 2 is not claimed a sleep that discards is refused with CapabilityRefused, and everything stays awake."""
    _refused_sleep(tensor_memory, SleepPlan(policies={"weights": Policy.DISCARD}))


@clause("alloc.tier.host-refused@1", Level.MEMORY, capability="memory.tier.host", refusal=True)
def test_the_host_tier_is_refused(tensor_memory: TensorMemory) -> None:
    """Where the tier host is not claimed it is refused with CapabilityRefused, and everything stays awake."""
    _refused_sleep(tensor_memory, SleepPlan(tier=SleepTier.HOST))


@clause("alloc.tier.disk-refused@1", Level.MEMORY, capability="memory.tier.disk", refusal=True)
def test_the_disk_tier_is_refused(tensor_memory: TensorMemory, tmp_path: Path) -> None:
    """Where the tier disk is not claimed it is refused with CapabilityRefused, everything stays awake, and no file is left."""
    _refused_sleep(tensor_memory, plan_for(SleepTier.DISK, tmp_path))
    assert files_below(tmp_path) == {}


@clause("alloc.tier.source-refused@1", Level.MEMORY, capability="memory.tier.source", refusal=True)
def test_the_source_tier_is_refused(tensor_memory: TensorMemory) -> None:
    """Where the tier source is not claimed it is refused with CapabilityRefused, and everything stays awake."""
    _refused_sleep(tensor_memory, SleepPlan(tier=SleepTier.SOURCE))


# Torch


@clause("alloc.claims.same@1", Level.MEMORY)
def test_allocator_claims_what_the_descriptor_claims(target: Target, claims: Capabilities) -> None:
    """An allocator's capabilities are those that the descriptor claims for its device."""
    allocator = target.allocator()
    assert allocator.capabilities() == claims.memory
    allocator.close()


@clause("alloc.torch-pool.caught@1", Level.MEMORY, capability="memory.torch_pool", facts="allocator fact 15")
def test_torch_allocates_from_the_pool(tensor_memory: TensorMemory) -> None:
    """Within `pool` torch allocates from the allocator, under the innermost block's tag; outside of it, it does not."""
    import torch

    allocator, device = tensor_memory.allocator, tensor_memory.allocator.empty((1,), DType.UINT8).device
    with allocator.pool("weights"):
        outer = torch.zeros(3 << 20, device=device)
        with allocator.pool("kv_cache", Policy.DISCARD):
            inner = torch.zeros(3 << 20, device=device)
    outside = torch.zeros(3 << 20, device=device)
    tags = tensor_memory.stats().tags
    assert tags["weights"].allocated >= outer.nbytes
    assert tags["kv_cache"].allocated >= inner.nbytes
    assert tensor_memory.stats().allocated < outer.nbytes + inner.nbytes + outside.nbytes
    outer.fill_(3.0)
    if 1 in tensor_memory.claims.sleep_levels:
        assert tensor_memory.sleep().discarded >= inner.nbytes
        tensor_memory.wake()
    assert set(outer.flatten().tolist()) == {3.0}


@clause("alloc.torch-pool.threads@1", Level.MEMORY, capability="memory.torch_pool", facts="allocator fact 15")
def test_pools_of_two_threads_do_not_mix(tensor_memory: TensorMemory) -> None:
    """Pools open in two threads at a time do not exchange their tags."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    import torch

    allocator, device = tensor_memory.allocator, tensor_memory.allocator.empty((1,), DType.UINT8).device
    barrier = Barrier(2)
    sizes = {"weights": 1 << 20, "kv_cache": 5 << 20}

    def work(tag: str) -> object:
        with allocator.pool(tag):
            barrier.wait(10)
            made = torch.zeros(sizes[tag], device=device, dtype=torch.uint8)
            barrier.wait(10)
        return made

    with ThreadPoolExecutor(2) as executor:
        made = list(executor.map(work, sizes))
    tags = tensor_memory.stats().tags
    assert sizes["weights"] <= tags["weights"].allocated < sizes["kv_cache"] <= tags["kv_cache"].allocated
    del made


@clause("alloc.torch-pool.refused@1", Level.MEMORY, capability="memory.torch_pool", refusal=True)
def test_torch_pool_is_refused(target: Target) -> None:
    """Where no torch pool is claimed `pool` is refused with CapabilityRefused when it is entered or before, with a reason."""
    allocator = target.allocator()
    with pytest.raises(CapabilityRefused) as caught, allocator.pool("weights"):
        pass
    assert caught.value.reasons, "refused without a reason"
    allocator.close()


@clause("alloc.module.adopted@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 8b")
def test_modules_are_adopted_with_ties_and_buffers(tensor_memory: TensorMemory) -> None:
    """`adopt` moves a module's parameters and buffers with their values and ties; they survive level 1 in one piece."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("scale", torch.arange(8.0))
            self.register_buffer("table", torch.arange(5), persistent=False)

    model = Model()
    before = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    tensor_memory.allocator.adopt(model)
    assert model.head.weight is model.embedding.weight
    assert tensor_memory.stats().tags["weights"].allocated >= before["embedding.weight"].nbytes
    assert tensor_memory.stats().tags["buffers"].allocated >= before["table"].nbytes
    tensor_memory.sleep()
    tensor_memory.wake()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(value.cpu(), before[name].cpu()), name
    with torch.no_grad():
        model.head.weight.fill_(1.0)
    assert set(model.embedding.weight.flatten().tolist()) == {1.0}


@clause("alloc.module.materialised@1", Level.MEMORY, facts="allocator fact 8b")
def test_meta_modules_are_materialised(tensor_memory: TensorMemory) -> None:
    """`materialise` gives the meta tensors of a module memory of the tag, ties kept; what was not meta stays where it is."""
    import torch
    from torch import nn

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("real", torch.ones(3))
    tensor_memory.allocator.materialise(model, "weights")
    assert model[0].weight is model[1].weight
    assert model[0].weight.device.type != "meta"
    assert tensor_memory.stats().tags["weights"].allocated >= 8 * 8 * 4
    assert model.get_buffer("real").tolist() == [1.0] * 3
