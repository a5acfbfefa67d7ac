"""The source tier: bytes that are read again from the file that they came from, and nothing that is not in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hardpoint.interfaces import FileExtent, Policy, SleepPlan, SleepTier
from hardpoint.interfaces.errors import BackupCorrupt, BackupStale, ForeignMemory, InvalidAllocation
from hardpoint_conformance.fault_matrix import FaultTarget
from hardpoint_conformance.memory import content, differences
from hardpoint_conformance.memory_model import TrackedPool

from .test_host_tier import copies, write_unannounced

SOURCE = SleepPlan(tier=SleepTier.SOURCE)


@pytest.fixture
def checkpoint(pool: TrackedPool, tmp_path: Path) -> Path:
    """A file with a header of an odd length before its bytes, as safetensors have."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"h" * 1234 + content(4 * pool.unit))
    # A change within the clock's resolution of the file system would not show.
    os.utime(file, ns=(0, 0))
    return file


def loaded(pool: TrackedPool, file: Path, size: int, at: int = 1234, *, shared: bool = False) -> int:
    """Return an allocation filled from a file, which is its declared source."""
    data = file.read_bytes()[at : at + size]
    address = pool.filled(data, shared=shared)
    pool.declare_source(address, size, [FileExtent(0, size, str(file), at)])
    return address


def test_declared_bytes_are_read_again_and_nothing_is_copied(
    pool: TrackedPool, target: FaultTarget, checkpoint: Path
) -> None:
    size = 3 * pool.unit + 77
    address = loaded(pool, checkpoint, size)
    assert pool.stats().tags["weights"].sourced == size
    for _ in range(2):
        before = target.calls()
        report = pool.sleep(SOURCE)
        assert (report.skipped, report.preserved) == (size, 0)
        assert report.tiers == {SleepTier.SOURCE: size}
        assert copies(before, target.calls()) == 0
        assert pool.books().host_held == 0
        assert pool.read_backup(address + 5, 100) == content(105)[5:]
        assert pool.wake().tiers == {SleepTier.SOURCE: size}
        assert pool.read(address, size) == content(size)


def test_several_extents_of_several_files_and_the_rest_to_the_host(
    pool: TrackedPool, checkpoint: Path, tmp_path: Path
) -> None:
    unit = pool.unit
    second = tmp_path / "second.safetensors"
    second.write_bytes(content(2 * unit, 5))
    data = bytearray(content(4 * unit, 9))
    data[100 : 100 + unit] = content(unit)
    data[2 * unit : 3 * unit] = content(2 * unit, 5)[7 : 7 + unit]
    address = pool.filled(bytes(data))
    extents = [FileExtent(2 * unit, unit, str(second), 7), FileExtent(100, unit, str(checkpoint), 1234)]
    pool.declare_source(address, len(data), extents)
    report = pool.sleep(SOURCE)
    assert (report.skipped, report.preserved) == (2 * unit, 2 * unit)
    assert report.tiers == {SleepTier.SOURCE: 2 * unit, SleepTier.HOST: 2 * unit}
    assert pool.read_backup(address, len(data)) == bytes(data)
    pool.wake()
    assert pool.read(address, len(data)) == bytes(data)


def test_blocks_of_a_shared_allocation_have_sources_of_their_own(pool: TrackedPool, checkpoint: Path) -> None:
    first, second = (loaded(pool, checkpoint, 5000, at, shared=True) for at in (1234, 9000))
    third = pool.filled(content(5000, 3), shared=True)
    pool.declare_source(third, 5000, [])
    first = loaded(pool, checkpoint, 5000, shared=True)
    pool.sleep(SOURCE)
    pool.wake()
    assert pool.read(first, 5000) == content(5000)
    assert pool.read(second, 5000) == checkpoint.read_bytes()[9000:14000]
    assert pool.read(third, 5000) == content(5000, 3)


def change_in_place(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(2000)
        opened.write(b"changed")


def truncate(file: Path) -> None:
    os.truncate(file, 2000)


@pytest.mark.parametrize("damage", [change_in_place, truncate])
def test_a_changed_source_is_found_on_wake_and_not_served(
    damage: Callable[[Path], None], pool: TrackedPool, target: FaultTarget, checkpoint: Path
) -> None:
    size = 2 * pool.unit
    address, other = loaded(pool, checkpoint, size), pool.filled(content(pool.unit, 2), "buffers")
    pool.sleep(SOURCE)
    held = dict(target.held())
    damage(checkpoint)
    with pytest.raises(BackupCorrupt, match=r"model\.safetensors"):
        pool.wake()
    with pytest.raises(BackupCorrupt):
        pool.read_backup(address, size)
    assert differences(held, target.held(), {"streams"}) == {}
    pool.discard_backup(["weights"])
    pool.wake()
    pool.write(address, content(size))
    assert pool.read(other, pool.unit) == content(pool.unit, 2)
    pool.sleep(SOURCE)
    pool.wake()
    assert pool.read(address, size) == content(size)


@pytest.mark.parametrize("damage", [change_in_place, truncate])
def test_a_source_that_changed_before_the_sleep_loses_nothing(
    damage: Callable[[Path], None], pool: TrackedPool, target: FaultTarget, checkpoint: Path
) -> None:
    """The device still has the bytes: they are not given up for a file that has others."""
    size = 2 * pool.unit
    address = loaded(pool, checkpoint, size)
    damage(checkpoint)
    before = target.calls()
    with pytest.raises(BackupCorrupt, match=r"model\.safetensors"):
        pool.sleep(SOURCE)
    assert differences(before, target.calls()) == {}
    assert pool.read(address, size) == content(size)
    pool.mark_written(["weights"])
    pool.sleep(SOURCE)
    pool.wake()
    assert pool.read(address, size) == content(size)


def test_a_replaced_file_serves_what_was_loaded_from_each(pool: TrackedPool, checkpoint: Path) -> None:
    """Checkpoints are replaced by renaming: the old one is still open, and the new one is another file."""
    size = 2 * pool.unit
    old = loaded(pool, checkpoint, size)
    newer = checkpoint.with_suffix(".new")
    newer.write_bytes(b"h" * 1234 + content(size, 8))
    newer.replace(checkpoint)
    new = loaded(pool, checkpoint, size)
    pool.sleep(SOURCE)
    pool.wake()
    assert pool.read(old, size) == content(size)
    assert pool.read(new, size) == content(size, 8)


@pytest.mark.parametrize("by", ["mark_written", "write"])
def test_writing_ends_a_source(by: str, pool: TrackedPool, checkpoint: Path) -> None:
    size = 2 * pool.unit
    address = loaded(pool, checkpoint, size)
    if by == "write":
        pool.write(address + 5, b"new")
    else:
        write_unannounced(pool, address, content(size, 4))
        pool.mark_written(["weights"])
    before = pool.read(address, size)
    assert pool.stats().tags["weights"].sourced == 0
    assert pool.sleep(SOURCE).preserved == size
    pool.wake()
    assert pool.read(address, size) == before


def test_verification_compares_sources_too(pool: TrackedPool, checkpoint: Path) -> None:
    size = 2 * pool.unit
    address = loaded(pool, checkpoint, size)
    verified = SleepPlan(tier=SleepTier.SOURCE, verify=True)
    pool.sleep(verified)
    pool.wake()
    changed = content(size)[:-1] + b"!"
    write_unannounced(pool, address, changed)
    with pytest.raises(BackupStale, match="source"):
        pool.sleep(verified)
    assert pool.read(address, size) == changed


def test_a_callback_is_a_source_for_the_tier(pool: TrackedPool) -> None:
    data = content(pool.unit)
    address = pool.filled(data)
    pool.declare_source(address, len(data), lambda: pool.write(address, data))
    assert pool.sleep(SOURCE).skipped == len(data)
    pool.wake()
    assert pool.read(address, len(data)) == data
    assert pool.sleep(SleepPlan()).preserved == len(data)


def test_a_pipe_is_no_source_and_not_waited_for(pool: TrackedPool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    address = pool.allocate(pool.unit)
    with pytest.raises(InvalidAllocation, match="does not fit"):
        pool.declare_source(address, pool.unit, [FileExtent(0, pool.unit, str(tmp_path / "pipe"), 0)])


def test_other_tiers_do_not_need_the_source(pool: TrackedPool, checkpoint: Path, tmp_path: Path) -> None:
    size = 2 * pool.unit
    address = loaded(pool, checkpoint, size)
    truncate(checkpoint)
    for tier in (SleepTier.HOST, SleepTier.DISK):
        pool.sleep(SleepPlan(tier=tier, disk_directory=str(tmp_path)))
        pool.wake()
        assert pool.read(address, size) == content(size)


@pytest.mark.parametrize(
    "extents",
    [
        [(0, 5001, 0)],
        [(4999, 2, 0)],
        [(5000, 1, 0)],
        [(0, 0, 0)],
        [(0, 100, 0), (99, 100, 0)],
        [(0, 100, -99)],  # of the file's end
        [(0, 100, 2**64 - 50)],
        [(2**64 - 1, 2, 0)],
        [(1, 2**64 - 1, 0)],
    ],
    ids=str,
)
def test_an_extent_that_does_not_fit_is_refused(
    extents: list[tuple[int, int, int]], pool: TrackedPool, checkpoint: Path
) -> None:
    """Its tensor is a block with a neighbour, whose bytes a source must not reach."""
    address = pool.filled(content(5000, 1), shared=True)
    neighbour = pool.filled(content(5000, 2), shared=True)
    end = checkpoint.stat().st_size
    declared = [FileExtent(start, size, str(checkpoint), at if at >= 0 else end + at) for start, size, at in extents]
    with pytest.raises(InvalidAllocation, match="does not fit"):
        pool.declare_source(address, 5000, declared)
    pool.sleep(SOURCE)
    pool.wake()
    assert pool.read(address, 5000) == content(5000, 1)
    assert pool.read(neighbour, 5000) == content(5000, 2)


def test_a_file_that_is_not_there_and_memory_that_is_not_ours_are_named(pool: TrackedPool, tmp_path: Path) -> None:
    address = pool.allocate(100)
    with pytest.raises(ForeignMemory, match=r"missing\.bin"):
        pool.declare_source(address, 100, [FileExtent(0, 100, str(tmp_path / "missing.bin"), 0)])
    with pytest.raises(ForeignMemory):
        pool.declare_source(4096, 100, lambda: None)


def test_the_callback_of_a_small_block_that_is_freed_asleep_writes_nothing(pool: TrackedPool) -> None:
    """Small blocks share an allocation, which wakes whole: what another block's callback has to write is not asked for any more."""
    written: list[int] = []
    blocks = [pool.allocate(300, "buffers", Policy.PRESERVE, shared=True) for _ in range(3)]
    for number, address in enumerate(blocks):
        pool.write(address, bytes([number]) * 300)

    def writes(number: int) -> Callable[[], None]:
        def write() -> None:
            written.append(number)
            pool.write(blocks[number], bytes([number]) * 300)

        return write

    for number in (0, 1):
        pool.declare_source(blocks[number], 300, writes(number))
    pool.sleep(SOURCE)
    pool.free(blocks[0])
    pool.wake()
    assert written == [1]
    assert [pool.read(blocks[number], 300) for number in (1, 2)] == [bytes([number]) * 300 for number in (1, 2)]
