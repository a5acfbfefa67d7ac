"""Backups on disk: their budget and room, and every way in which a file can be wrong; none is ever served."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hardpoint.interfaces import SleepPlan, SleepTier
from hardpoint.interfaces.errors import BackupCorrupt, HostBudgetExceeded, MemoryFault
from hardpoint_conformance.fault_matrix import FaultTarget
from hardpoint_conformance.memory import content, differences, wait_until
from hardpoint_conformance.memory_model import TrackedPool

from .support import run_program, runs_cleanly


def plan(directory: Path, **settings: object) -> SleepPlan:
    return SleepPlan(tier=SleepTier.DISK, disk_directory=str(directory), **settings)  # type: ignore[arg-type]


def backup_files(directory: Path) -> list[Path]:
    return sorted(file for file in directory.rglob("*") if file.suffix in (".backup", ".partial"))


def test_a_backup_on_disk_takes_no_host_memory_and_is_removed_after_wake(pool: TrackedPool, tmp_path: Path) -> None:
    data = content(3 * pool.unit + 5)
    address = pool.filled(data)
    report = pool.sleep(plan(tmp_path))
    assert report.tiers == {SleepTier.DISK: len(data)}
    books = pool.books()
    assert books.host_used == 0
    assert [file.stat().st_size for file in backup_files(tmp_path)] == [books.disk_used]
    assert len(data) <= books.disk_used < len(data) + 4 * 4096
    pool.wake()
    assert pool.read(address, len(data)) == data
    wait_until(lambda: not backup_files(tmp_path))
    wait_until(lambda: pool.books().disk_used == 0)


def test_a_directory_that_was_not_there_is_made_for_the_user_alone(
    cpu_pool: TrackedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HARDPOINT_SLEEP_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_pool.filled(content(cpu_pool.unit))
    mask = os.umask(0)
    try:
        cpu_pool.sleep(SleepPlan(tier=SleepTier.DISK))
    finally:
        os.umask(mask)
    (file,) = backup_files(tmp_path)
    assert file.is_relative_to(tmp_path / "hardpoint" / "sleep")
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "hardpoint" / "sleep", file.parent, file)}
    assert list(modes.values()) == [0o700, 0o700, 0o600]


def test_a_backup_beyond_the_disk_budget_is_refused_before_any_driver_call(
    pool: TrackedPool, target: FaultTarget, tmp_path: Path
) -> None:
    data = content(4 * pool.unit)
    address = pool.filled(data)
    before = target.calls()
    with pytest.raises(HostBudgetExceeded, match="budget"):
        pool.sleep(plan(tmp_path, disk_budget=len(data)))
    assert differences(before, target.calls()) == {}
    assert pool.read(address, len(data)) == data
    assert backup_files(tmp_path) == []
    pool.sleep(plan(tmp_path, disk_budget=len(data) + 4096))
    assert pool.is_asleep(address)


def test_a_changed_budget_counts_what_is_there_already(pool: TrackedPool, tmp_path: Path) -> None:
    data = content(4 * pool.unit)
    for tag in ("weights", "kv_cache"):
        pool.filled(data, tag)
    pool.sleep(plan(tmp_path, tags=frozenset({"weights"}), disk_budget=5 * pool.unit))
    cache = frozenset({"kv_cache"})
    with pytest.raises(HostBudgetExceeded):
        pool.sleep(plan(tmp_path, tags=cache, disk_budget=7 * pool.unit))
    pool.discard_backup(["weights"])
    pool.sleep(plan(tmp_path, tags=cache, disk_budget=7 * pool.unit))
    pool.wake(["weights"])
    with pytest.raises(HostBudgetExceeded):
        pool.sleep(plan(tmp_path, tags=frozenset({"weights"}), disk_budget=1))


def test_two_directories_are_both_counted(pool: TrackedPool, tmp_path: Path) -> None:
    for tag in ("weights", "kv_cache"):
        pool.filled(content(pool.unit), tag)
        (tmp_path / tag).mkdir()
        pool.sleep(plan(tmp_path / tag, tags=frozenset({tag})))
    assert pool.books().disk_used == sum(file.stat().st_size for file in backup_files(tmp_path)) > 2 * pool.unit


def test_a_full_disk_leaves_everything_awake(pool: TrackedPool, tmp_path: Path) -> None:
    data = content(8 * pool.unit)
    address = pool.filled(data)
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (pool.unit, hard))
    try:
        with pytest.raises(HostBudgetExceeded, match="no room"):
            pool.sleep(plan(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    assert pool.read(address, len(data)) == data
    assert backup_files(tmp_path) == []
    pool.sleep(plan(tmp_path))
    pool.wake()
    assert pool.read(address, len(data)) == data


def flip_a_byte(file: Path, at: int = -10_000) -> None:
    with file.open("r+b") as opened:
        opened.seek(at, os.SEEK_END)
        byte = opened.read(1)
        opened.seek(at, os.SEEK_END)
        opened.write(bytes([byte[0] ^ 1]))


def flip_a_byte_of_the_header(file: Path) -> None:
    flip_a_byte(file, 40 - file.stat().st_size)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def exchange(file: Path) -> None:
    copy = file.with_suffix(".copy")
    copy.write_bytes(file.read_bytes())
    copy.replace(file)


@pytest.mark.parametrize("damage", [flip_a_byte, flip_a_byte_of_the_header, truncate, exchange])
def test_a_damaged_backup_is_found_and_not_served(
    damage: Callable[[Path], None], pool: TrackedPool, target: FaultTarget, tmp_path: Path
) -> None:
    data, other = content(3 * pool.unit), content(pool.unit, 1)
    damaged, whole = pool.filled(data), pool.filled(other, "buffers")
    pool.sleep(plan(tmp_path, tags=frozenset({"weights"})))
    pool.sleep(SleepPlan())
    held = dict(target.held())
    damage(backup_files(tmp_path)[0])
    with pytest.raises(BackupCorrupt, match="discard_backup"):
        pool.wake()
    assert differences(held, target.held(), {"streams"}) == {}
    assert pool.stats().asleep == {"weights", "buffers"}
    assert pool.read_backup(whole, len(other)) == other
    pool.discard_backup(["weights"])
    pool.wake()
    pool.write(damaged, data)
    pool.sleep(plan(tmp_path))
    pool.wake()
    assert pool.read(damaged, len(data)) == data
    assert pool.read(whole, len(other)) == other


def test_a_damaged_byte_is_found_by_read_backup(pool: TrackedPool, tmp_path: Path) -> None:
    data = content(3 * pool.unit)
    address = pool.filled(data)
    pool.sleep(plan(tmp_path))
    flip_a_byte(backup_files(tmp_path)[0])
    with pytest.raises(BackupCorrupt):
        pool.read_backup(address, len(data))


def test_a_cleaner_that_removes_the_folder_does_no_lasting_harm(pool: TrackedPool, tmp_path: Path) -> None:
    def pass_over_what_is_gone(function: object, path: str, failure: tuple[type[BaseException], ...]) -> None:
        assert failure[0] is FileNotFoundError

    data = content(pool.unit)
    address = pool.filled(data)
    pool.sleep(plan(tmp_path / "sleep"))
    pool.wake()
    # The engine removes the backup that it needs no more at the same time.
    shutil.rmtree(tmp_path / "sleep", onerror=pass_over_what_is_gone)
    assert not (tmp_path / "sleep").exists()
    pool.sleep(plan(tmp_path / "sleep"))
    pool.wake()
    assert pool.read(address, len(data)) == data


@pytest.mark.parametrize("while_asleep", [True, False])
def test_a_backup_whose_folder_is_removed_is_read_still(pool: TrackedPool, tmp_path: Path, while_asleep: bool) -> None:
    kept = plan(tmp_path / "sleep", keep=frozenset({"weights"}))
    data = content(3 * pool.unit)
    address = pool.filled(data)
    pool.sleep(kept)
    if not while_asleep:
        pool.wake()
    shutil.rmtree(tmp_path / "sleep")
    if not while_asleep:
        assert pool.sleep(kept).preserved == 0
    pool.wake()
    assert pool.read(address, len(data)) == data


@pytest.mark.parametrize("damage", [flip_a_byte_of_the_header, truncate, exchange])
def test_a_kept_backup_that_was_damaged_while_its_memory_was_awake_is_made_anew(
    damage: Callable[[Path], None], pool: TrackedPool, tmp_path: Path
) -> None:
    kept = plan(tmp_path, keep=frozenset({"weights"}))
    data, other = content(3 * pool.unit), content(pool.unit, 1)
    address, second = pool.filled(data), pool.filled(other)
    pool.sleep(kept)
    pool.wake()
    damage(backup_files(tmp_path)[0])
    assert pool.sleep(kept).preserved == len(data) + len(other)
    pool.wake()
    assert pool.read(address, len(data)) == data
    assert pool.read(second, len(other)) == other
    assert pool.sleep(kept).preserved == 0


KILLED = """
    pool = VirtualPool(driver_table())
    address = pool.allocate(8 << 20, "weights")
    pool.write(address, b"secret!!" * (1 << 20))
    plan = SleepPlan(tier=SleepTier.DISK, disk_directory=sys.argv[1])
    def kill(done, in_all):
        if sys.argv[2] == "before" or done == in_all:
            os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "after":
        pool.sleep(plan)
        os.kill(os.getpid(), signal.SIGKILL)
    pool.sleep(SleepPlan(tier=SleepTier.DISK, disk_directory=sys.argv[1], progress=kill))
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_what_a_killed_process_left_is_removed_and_never_served(
    moment: str, cpu_pool: TrackedPool, tmp_path: Path
) -> None:
    ended = run_program(KILLED, tmp_path, moment)
    assert ended.returncode == -9
    left = backup_files(tmp_path)
    assert [file.suffix for file in left] == [".partial" if moment == "before" else ".backup"]
    data = content(1 << 20)
    address = cpu_pool.filled(data)
    cpu_pool.sleep(plan(tmp_path))
    assert not left[0].exists()
    assert len(backup_files(tmp_path)) == 1
    cpu_pool.wake()
    assert cpu_pool.read(address, len(data)) == data


def test_what_a_process_left_that_was_killed_since_is_removed(cpu_pool: TrackedPool, tmp_path: Path) -> None:
    """By the next sleep of a pool that has used the directory before, and where a sleep is prepared."""
    cpu_pool.filled(content(1 << 20))
    cpu_pool.sleep(plan(tmp_path))
    cpu_pool.wake()
    for uses in (cpu_pool.sleep, cpu_pool.prepare_sleep):
        assert wait_until(lambda: not backup_files(tmp_path))
        run_program(KILLED, tmp_path, "after")
        (left,) = backup_files(tmp_path)
        uses(plan(tmp_path))
        assert not left.exists()
        cpu_pool.wake()


@pytest.mark.parametrize("name", ["a\0b", "\udcff"])
def test_a_directory_that_cannot_be_named_is_a_typed_error(name: str, cpu_pool: TrackedPool) -> None:
    address = cpu_pool.filled(content(cpu_pool.unit))
    with pytest.raises(MemoryFault, match="no directory"):
        cpu_pool.sleep(SleepPlan(tier=SleepTier.DISK, disk_directory=name))
    cpu_pool.prepare_sleep(SleepPlan(tier=SleepTier.DISK, disk_directory=name))
    assert not cpu_pool.is_asleep(address)


def test_a_directory_that_takes_no_files_is_named_with_the_ways_out(cpu_pool: TrackedPool) -> None:
    data = content(cpu_pool.unit)
    address = cpu_pool.filled(data)
    for directory in ("/proc", "/proc/backups"):
        with pytest.raises(MemoryFault, match=f"mkdir.*{directory}/|{directory} for backups cannot be made") as refused:
            cpu_pool.sleep(plan(Path(directory)))
        assert "sleep_disk_directory" in str(refused.value)
        assert "HARDPOINT_SLEEP_DIR" in str(refused.value)
        assert "another tier" in str(refused.value)
    assert cpu_pool.read(address, len(data)) == data


def test_a_closed_pool_has_no_backups_although_somebody_keeps_it(pool: TrackedPool, tmp_path: Path) -> None:
    """Nothing can wake any more; and an exception that is kept leads to the pool by its frames."""
    for tag in ("weights", "kv_cache", "buffers"):
        pool.filled(content(pool.unit), tag)
    kept = frozenset({"weights"})
    pool.sleep(plan(tmp_path, tags=kept, keep=kept))
    pool.wake()
    pool.sleep(plan(tmp_path, tags=frozenset({"kv_cache"})))
    pool.sleep(SleepPlan(tags=frozenset({"buffers"})))
    assert len(backup_files(tmp_path)) == 2
    pool.close()
    assert list(tmp_path.iterdir()) == []
    assert not [file for file in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(file)]
    assert (pool.books().host_held, pool.books().disk_used) == (0, 0)
    assert pool.stats().allocated == 3 * pool.unit


def test_a_living_process_keeps_its_backups_when_another_comes(cpu_pool: TrackedPool, tmp_path: Path) -> None:
    data = content(1 << 20)
    address = cpu_pool.filled(data)
    cpu_pool.sleep(plan(tmp_path))
    runs_cleanly(
        """
        pool = VirtualPool(driver_table())
        pool.allocate(1 << 20, "weights")
        pool.sleep(SleepPlan(tier=SleepTier.DISK, disk_directory=sys.argv[1]))
        """,
        tmp_path,
    )
    assert len(backup_files(tmp_path)) == 1
    cpu_pool.wake()
    assert cpu_pool.read(address, len(data)) == data
