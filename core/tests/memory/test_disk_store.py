"""Backups on disk: whole or not there, found out when damaged, gone when their process is."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint._native import BudgetExceeded, CorruptFile, DiskError, DiskFile, DiskFull, DiskStore, xxh64

PAGE = 4096
BLOCK = 8 << 20
MUCH = 1 << 40


def pages(size: int, seed: int = 1) -> memoryview:
    """Return page-aligned memory with bytes that differ from page to page."""
    memory = memoryview(mmap.mmap(-1, size))
    for start in range(0, size, PAGE):
        memory[start : start + 8] = (start * 2654435761 + seed).to_bytes(8, "little")
    return memory


def backup(store: DiskStore, data: memoryview) -> DiskFile:
    """Return a committed backup in two pieces."""
    half = len(data) // 2 // PAGE * PAGE
    file = store.create(len(data), 2)
    file.write(0, data[:half])
    file.write(half, data[half:])
    file.commit([(0, half, xxh64(data[:half])), (half, len(data) - half, xxh64(data[half:]))])
    return file


def contents(file: DiskFile, size: int) -> bytes:
    memory = memoryview(mmap.mmap(-1, size))
    file.read(0, memory)
    return bytes(memory)


def damaged_pieces(file: DiskFile) -> list[int]:
    """Return the numbers of the pieces whose bytes are not those of their checksum."""
    damaged = []
    for number, (offset, size, checksum) in enumerate(file.pieces):
        memory = memoryview(mmap.mmap(-1, size))
        file.read(offset, memory)
        if xxh64(memory) != checksum:
            damaged.append(number)
    return damaged


def overwrite(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def run_child(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(str(tmp_path), MUCH)


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * PAGE, hard))
    yield 64 * PAGE
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))


# Round trip


def test_a_backup_gives_back_its_bytes(store: DiskStore) -> None:
    data = pages(2 * BLOCK + 3 * PAGE)
    file = backup(store, data)
    file.verify_header()
    assert file.committed
    assert contents(file, len(data)) == data
    assert damaged_pieces(file) == []


def test_an_empty_backup_is_a_backup(store: DiskStore) -> None:
    file = store.create(0, 0)
    file.commit([])
    file.verify_header()
    assert file.pieces == []


def test_a_header_of_many_pieces_is_kept(store: DiskStore) -> None:
    pieces = [(index * PAGE, PAGE, index * 7919) for index in range(1000)]
    file = store.create(1000 * PAGE, len(pieces))
    file.commit(pieces)
    file.verify_header()
    assert file.pieces == pieces


def test_threads_write_and_read_one_file(store: DiskStore) -> None:
    share = 16 * PAGE
    parts = [pages(share, seed) for seed in range(8)]
    file = store.create(8 * share, 8)
    found = [b""] * 8

    def write(index: int) -> None:
        file.write(index * share, parts[index])

    def read(index: int) -> None:
        memory = memoryview(mmap.mmap(-1, share))
        file.read(index * share, memory)
        found[index] = bytes(memory)

    for work in (write, read):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [bytes(part) for part in parts]


@pytest.mark.parametrize("call", ["pwrite", "pread"])
def test_short_and_interrupted_transfers_are_continued(store: DiskStore, call: str) -> None:
    data = pages(5 * PAGE)
    file = store.create(len(data), 1)
    for error in (0, errno.EINTR):
        store.fail(call, error, times=2)
        file.write(0, data)
        assert contents(file, len(data)) == data


def test_a_file_system_without_direct_io_is_used_and_told(store: DiskStore) -> None:
    store.fail("open_direct", errno.EINVAL)
    data = pages(4 * PAGE)
    file = backup(store, data)
    assert not file.direct
    assert contents(file, len(data)) == data


def test_a_file_system_that_refuses_direct_transfers_is_used_and_told(store: DiskStore) -> None:
    store.fail("pread", errno.EINVAL)
    data = pages(4 * PAGE)
    file = backup(store, data)
    assert not file.direct
    assert contents(file, len(data)) == data


def test_a_file_system_in_memory_is_told() -> None:
    place = Path("/dev/shm")
    if not place.is_dir():
        pytest.skip("no file system in memory here")
    directory = place / f"hardpoint-test-{os.getpid()}"
    try:
        assert not DiskStore(str(directory), MUCH).create(PAGE, 1).direct
    finally:
        directory.rmdir()


# Refusals


@pytest.mark.parametrize(("offset", "start", "size"), [(1, 0, PAGE), (0, 8, PAGE), (0, 0, PAGE + 512)])
def test_unaligned_transfers_are_refused(store: DiskStore, offset: int, start: int, size: int) -> None:
    file = store.create(4 * PAGE, 1)
    memory = pages(4 * PAGE)[start : start + size]
    with pytest.raises(ValueError, match="multiples of 4096"):
        file.write(offset, memory)
    with pytest.raises(ValueError, match="multiples of 4096"):
        file.read(offset, memory)


def test_transfers_beyond_the_payload_are_refused(store: DiskStore) -> None:
    file = store.create(2 * PAGE, 1)
    for offset in (PAGE, 2 * PAGE, 2**64 - PAGE):
        with pytest.raises(ValueError, match="beyond"):
            file.write(offset, pages(2 * PAGE))


def test_a_committed_backup_cannot_be_written(store: DiskStore) -> None:
    data = pages(2 * PAGE)
    file = backup(store, data)
    with pytest.raises(RuntimeError, match="committed"):
        file.write(0, data)
    with pytest.raises(RuntimeError, match="committed"):
        file.commit([])


def test_more_pieces_than_announced_are_refused(store: DiskStore) -> None:
    file = store.create(2 * PAGE, 1)
    with pytest.raises(ValueError, match="2 pieces"):
        file.commit([(0, PAGE, 0), (PAGE, PAGE, 0)])
    assert not file.committed


def test_an_uncommitted_backup_is_not_verified(store: DiskStore) -> None:
    with pytest.raises(RuntimeError, match="not committed"):
        store.create(PAGE, 1).verify_header()


# Budget and space


def test_the_budget_counts_whole_files_and_is_given_back(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path), 10 * PAGE)
    first = store.create(4 * PAGE, 1)
    assert first.file_bytes == store.bytes_used == 5 * PAGE
    with pytest.raises(BudgetExceeded, match=f"{6 * PAGE} bytes asked.*{10 * PAGE}.*{5 * PAGE} are used"):
        store.create(5 * PAGE, 1)
    second = store.create(4 * PAGE, 1)
    assert store.bytes_used == store.budget
    first.remove()
    second.remove()
    assert store.bytes_used == 0
    assert store.create(9 * PAGE, 1).file_bytes == store.budget


@pytest.mark.parametrize("size", [2**63, 2**64 - PAGE])
def test_an_absurd_size_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(BudgetExceeded):
        DiskStore(str(tmp_path), MUCH).create(size, 1)
    with pytest.raises(DiskFull):
        DiskStore(str(tmp_path), 2**64 - 1).create(size, 1)


def test_a_budget_is_not_exceeded_by_threads(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path), 8 * 2 * PAGE)
    files: list[DiskFile] = []
    refused: list[BudgetExceeded] = []

    def take() -> None:
        for _ in range(4):
            try:
                files.append(store.create(PAGE, 1))
            except BudgetExceeded as error:
                refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(files) == len(refused) == 8
    assert store.bytes_used == store.budget


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_known_before_anything_is_written(store: DiskStore, error: int) -> None:
    store.fail("fallocate", error)
    with pytest.raises(DiskFull, match=r"fallocate of .*: "):
        store.create(4 * PAGE, 1)
    assert store.bytes_used == 0
    assert os.listdir(store.path) == ["lock"]
    assert store.create(4 * PAGE, 1).file_bytes == 5 * PAGE


def test_a_limit_on_file_sizes_is_a_full_disk_and_no_signal(store: DiskStore, file_size_limit: int) -> None:
    """The signal would end a process that does not ignore it, as Python does when it starts."""
    sent: list[int] = []
    before = signal.signal(signal.SIGXFSZ, lambda number, _: sent.append(number))
    try:
        with pytest.raises(DiskFull):
            store.create(file_size_limit, 1)
        store.fail("fallocate", errno.EOPNOTSUPP)
        with pytest.raises(DiskFull):
            store.create(file_size_limit, 1)
        assert store.bytes_used == 0
        file = store.create(file_size_limit - PAGE, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with pytest.raises(DiskFull):
            file.write(4 * PAGE, pages(PAGE))
    finally:
        signal.signal(signal.SIGXFSZ, before)
    assert sent == []


def test_a_file_system_that_cannot_allocate_is_used(store: DiskStore) -> None:
    store.fail("fallocate", errno.EOPNOTSUPP)
    data = pages(4 * PAGE)
    assert contents(backup(store, data), len(data)) == data


def test_a_full_disk_is_known_where_the_file_system_cannot_allocate(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path), 2**63)
    store.fail("fallocate", errno.EOPNOTSUPP)
    with pytest.raises(DiskFull):
        store.create(1 << 60, 1)
    assert os.listdir(store.path) == ["lock"]


@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "rename"])
def test_a_commit_that_fails_leaves_no_backup_and_can_be_repeated(store: DiskStore, call: str) -> None:
    data = pages(2 * PAGE)
    file = store.create(len(data), 1)
    file.write(0, data)
    store.fail(call, errno.EIO)
    with pytest.raises(DiskError, match=f"{call} of .*Input/output error"):
        file.commit([(0, len(data), xxh64(data))])
    assert not file.committed
    assert file.path.endswith(".partial")
    file.commit([(0, len(data), xxh64(data))])
    file.verify_header()
    assert contents(file, len(data)) == data


@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_failed_creation_takes_nothing(store: DiskStore, call: str) -> None:
    store.fail(call, errno.EIO)
    with pytest.raises(DiskError):
        store.create(PAGE, 1)
    assert store.bytes_used == 0
    assert os.listdir(store.path) == ["lock"]


def test_failing_transfers_are_errors(store: DiskStore) -> None:
    data = pages(2 * PAGE)
    file = store.create(len(data), 1)
    store.fail("pwrite", errno.ENOSPC)
    with pytest.raises(DiskFull):
        file.write(0, data)
    file.write(0, data)
    store.fail("pread", errno.EIO)
    with pytest.raises(DiskError, match="pread"):
        contents(file, len(data))
    assert contents(file, len(data)) == data


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"mkdir of .*No such file"):
        DiskStore(str(tmp_path / "missing" / "deeper"), MUCH)
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="Not a directory"):
        DiskStore(str(tmp_path / "file"), MUCH)


# Damage


def test_a_changed_byte_of_the_header_is_found(store: DiskStore) -> None:
    file = backup(store, pages(4 * PAGE))
    original = Path(file.path).read_bytes()
    for offset in (0, 8, 16, 24, 32, 40, 48, 60, 95, PAGE - 1):
        overwrite(file.path, offset, bytes([original[offset] ^ 1]))
        with pytest.raises(CorruptFile, match="is not what was written"):
            file.verify_header()
        overwrite(file.path, offset, original[offset : offset + 1])
    file.verify_header()


def test_a_changed_byte_of_a_piece_is_found(store: DiskStore) -> None:
    file = backup(store, pages(4 * PAGE))
    overwrite(file.path, PAGE + 3 * PAGE + 17, b"\xff")
    file.verify_header()
    assert damaged_pieces(file) == [1]


@pytest.mark.parametrize("left", [0, 100, PAGE, 3 * PAGE, 3 * PAGE + 100])
def test_a_truncated_file_is_found(store: DiskStore, left: int) -> None:
    data = pages(4 * PAGE)
    file = backup(store, data)
    os.truncate(file.path, left)
    with pytest.raises(CorruptFile, match="size has changed"):
        file.verify_header()
    with pytest.raises(CorruptFile, match="shorter"):
        contents(file, len(data))


def test_a_longer_file_is_found(store: DiskStore) -> None:
    file = backup(store, pages(4 * PAGE))
    os.truncate(file.path, 8 * PAGE)
    with pytest.raises(CorruptFile, match="size has changed"):
        file.verify_header()


def test_an_exchanged_file_is_found(store: DiskStore) -> None:
    file, other = backup(store, pages(4 * PAGE, 1)), backup(store, pages(4 * PAGE, 2))
    os.replace(other.path, file.path)
    with pytest.raises(CorruptFile, match="another file has its name"):
        file.verify_header()


def test_a_pipe_in_place_of_a_file_is_found_and_not_waited_for(store: DiskStore) -> None:
    file = backup(store, pages(4 * PAGE))
    os.unlink(file.path)
    os.mkfifo(file.path)
    with pytest.raises(CorruptFile, match="another file has its name"):
        file.verify_header()


def test_exchanged_contents_are_found(store: DiskStore) -> None:
    file, other = backup(store, pages(4 * PAGE, 1)), backup(store, pages(4 * PAGE, 2))
    overwrite(file.path, 0, Path(other.path).read_bytes())
    with pytest.raises(CorruptFile, match="it is another backup"):
        file.verify_header()


def test_a_file_whose_name_is_gone_is_read_still_and_its_damage_found(store: DiskStore) -> None:
    data = pages(4 * PAGE)
    file = backup(store, data)
    with open(file.path, "r+b") as opened:
        shutil.rmtree(store.path)
        file.verify_header()
        assert contents(file, len(data)) == data
        opened.truncate(PAGE)
        with pytest.raises(CorruptFile, match="its size has changed"):
            file.verify_header()


# Life of the directory


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path / "new"), MUCH)
    committed, partial = backup(store, pages(2 * PAGE)), store.create(PAGE, 1)
    assert len(os.listdir(store.path)) == 3
    committed.remove()
    assert len(os.listdir(store.path)) == 2
    del store
    assert len(os.listdir(tmp_path / "new")) == 1, "a file keeps its directory"
    partial.remove()
    assert os.listdir(tmp_path / "new") == []


def test_a_store_is_removed_after_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = DiskStore("relative", MUCH)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    backup(store, pages(2 * PAGE)).remove()
    del store
    assert os.listdir(tmp_path / "relative") == []


WRITE_AND_DIE = """
    import mmap, os, signal, sys
    from hardpoint._native import DiskStore, xxh64
    store = DiskStore(sys.argv[1], 1 << 40)
    data = mmap.mmap(-1, 8192)
    partial = store.create(8192, 1)
    partial.write(0, data)
    committed = store.create(8192, 1)
    committed.write(0, data)
    committed.commit([(0, 8192, xxh64(data))])
    print(store.path, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_by_the_next_store(tmp_path: Path) -> None:
    ended = run_child(WRITE_AND_DIE, str(tmp_path))
    assert ended.returncode == -signal.SIGKILL
    left = Path(ended.stdout.strip())
    assert sorted(path.suffix for path in left.iterdir()) == ["", ".backup", ".partial"]
    store = DiskStore(str(tmp_path), MUCH)
    assert os.listdir(tmp_path) == [Path(store.path).name]


def test_the_store_of_a_living_process_stays(tmp_path: Path) -> None:
    script = textwrap.dedent(WRITE_AND_DIE).replace("os.kill(os.getpid(), signal.SIGKILL)", "sys.stdin.read()")
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with child:
        other = Path(child.stdout.readline().strip())
        before = sorted(os.listdir(other))
        store = DiskStore(str(tmp_path), MUCH)
        assert sorted(os.listdir(other)) == before
        child.stdin.close()
    assert os.listdir(tmp_path) == [Path(store.path).name], "a process that ends cleanly leaves nothing"


def test_two_stores_of_one_process_share_a_directory(tmp_path: Path) -> None:
    first = DiskStore(str(tmp_path), MUCH)
    file = backup(first, pages(2 * PAGE))
    second = DiskStore(str(tmp_path), MUCH)
    assert first.path != second.path
    file.verify_header()


def test_an_interrupted_start_or_cleaning_is_finished(tmp_path: Path) -> None:
    without_lock = tmp_path / "hardpoint-1-00000000000000aa"
    without_lock.mkdir()
    half_removed = tmp_path / "hardpoint-1-00000000000000ab"
    half_removed.mkdir()
    (half_removed / "lock").touch()
    store = DiskStore(str(tmp_path), MUCH)
    assert os.listdir(tmp_path) == [Path(store.path).name]


def test_what_is_not_a_store_is_never_touched(tmp_path: Path) -> None:
    name = "hardpoint-1-00000000000000aa"
    (tmp_path / "target" / "inside").mkdir(parents=True)
    (tmp_path / "target" / "lock").touch()
    (tmp_path / name).symlink_to(tmp_path / "target", target_is_directory=True)
    (tmp_path / "hardpoint-1-00000000000000ab").write_text("a file of that name")
    foreign = tmp_path / "hardpoint-1-00000000000000ac"
    foreign.mkdir()
    (foreign / "lock").touch()
    (foreign / "notes.txt").touch()
    for other in ("hardpoint-notes", "hardpoint-x-00000000000000aa", "hardpoint-1-aa", "model.gguf"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "lock").touch()
    before = sorted(path for path in tmp_path.rglob("*") if path != foreign / "lock")
    DiskStore(str(tmp_path), MUCH)
    assert sorted(tmp_path.rglob("*")) == before


def test_stores_that_open_together_do_not_remove_each_other(tmp_path: Path) -> None:
    alive: list[DiskStore] = []

    def open_many() -> None:
        for _ in range(20):
            alive.append(DiskStore(str(tmp_path), MUCH))

    threads = [threading.Thread(target=open_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(os.listdir(tmp_path)) == sorted(Path(store.path).name for store in alive)
    assert all(os.listdir(store.path) == ["lock"] for store in alive)


FORK = """
    import mmap, os, sys
    from hardpoint._native import DiskStore, OwnedByParent
    store = DiskStore(sys.argv[1], 1 << 40)
    data = mmap.mmap(-1, 8192)
    file = store.create(8192, 1)
    file.write(0, data)
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (
            lambda: store.create(4096, 1),
            lambda: file.write(0, data),
            lambda: file.read(0, data),
            lambda: file.commit([]),
            lambda: file.verify_header(),
        ):
            try:
                use()
            except OwnedByParent:
                refused += 1
        del use
        file.remove()
        del file, store
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 5, status
    assert sorted(os.listdir(store.path)) == sorted(["lock", os.path.basename(file.path)])
    file.commit([])
    file.verify_header()
"""


def test_a_forked_child_removes_and_changes_nothing(tmp_path: Path) -> None:
    ended = run_child(FORK, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert os.listdir(tmp_path) == []


def test_descriptors_are_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        store = DiskStore(str(tmp_path), MUCH)
        file = backup(store, pages(2 * PAGE))
        file.verify_header()
        store.fail("fallocate", errno.ENOSPC)
        with pytest.raises(DiskFull):
            store.create(PAGE, 1)
        del file, store
    assert len(os.listdir("/proc/self/fd")) == before
