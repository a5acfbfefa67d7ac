"""Backups on the host: their budget, their memory, and those that are kept over a wake and not made again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hardpoint.interfaces import SleepPlan, SleepTier
from hardpoint.interfaces.errors import HostBudgetExceeded
from hardpoint_conformance.fault_matrix import FaultTarget
from hardpoint_conformance.memory import content, differences, wait_until
from hardpoint_conformance.memory_model import TrackedPool
from hardpoint_simulators.libraries import library

KEEP = SleepPlan(keep=frozenset({"weights"}))


def copies(before: dict[str, int], after: dict[str, int]) -> int:
    """Return how many calls moved bytes from the device to the host."""
    changed = differences(before, after)
    names = ("copy_to_host", "cuMemcpyDtoHAsync", "hipMemcpyAsync", "aclrtMemcpyAsync")
    return sum(count for call, count in changed.items() if call.startswith(names))


def registrations(target: FaultTarget) -> int:
    """Return how many calls pinned host memory."""
    return sum(count for call, count in target.calls().items() if "HostRegister" in call)


def unpins(target: FaultTarget) -> list[str]:
    """Return the name of the call that unpins host memory; empty for a device whose memory the host's is."""
    return [call for call in target.calls() if call.endswith("HostUnregister")]


def test_a_backup_beyond_the_budget_is_refused_before_any_driver_call(pool: TrackedPool, target: FaultTarget) -> None:
    """Fact 20."""
    data = content(4 * pool.unit)
    address = pool.filled(data)
    before = target.calls()
    with pytest.raises(HostBudgetExceeded, match="budget"):
        pool.sleep(SleepPlan(host_budget=len(data) - 1))
    with pytest.raises(HostBudgetExceeded):
        pool.prepare_sleep(SleepPlan(host_budget=len(data) - 1))
    assert differences(before, target.calls()) == {}
    assert pool.books().host_held == 0
    assert pool.read(address, len(data)) == data
    pool.sleep(SleepPlan(host_budget=len(data)))
    assert pool.is_asleep(address)


IN_A_LIMITED_GROUP = """
mount -t tmpfs none /sys/fs/cgroup && cd /sys/fs/cgroup || exit 77
echo $((8 << 30)) > memory.max; echo $(((8 << 30) - (10 << 20))) > memory.current; echo inactive_file "$1" > memory.stat
cd / && exec "$2" -c "$3" "$4"
"""

NO_ROOM = "0 bytes are in use by other backups, and the host has room for 10485760 bytes"

SLEEP_OF_64_MIB = """
import sys
from hardpoint.interfaces import SleepPlan
from hardpoint.interfaces.errors import HostBudgetExceeded
from hardpoint.memory import VirtualPool
from hardpoint_cuda.allocator import driver_table
pool = VirtualPool(driver_table(0))
address = pool.allocate(64 << 20)
for operation in (pool.prepare_sleep, pool.sleep):
    try:
        operation(SleepPlan(host_budget=int(sys.argv[1]) or None))
        print("done")
    except HostBudgetExceeded as error:
        print(error.found)
"""


@pytest.mark.parametrize(
    ("cache", "budget", "said"),
    # With a budget, a sleep that is made ready takes nothing where there is no room, and the sleep itself says so.
    [(7 << 30, 0, ["done", "done"]), (0, 0, [NO_ROOM, NO_ROOM]), (0, 1 << 30, ["done", NO_ROOM])],
    ids=["full of page cache", "full", "full, with a budget"],
)
def test_a_sleep_of_a_simulated_device_takes_what_the_control_group_has_in_its_page_cache(
    cache: int, budget: int, said: list[str]
) -> None:
    namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    shell = [*namespace, "sh", "-c", IN_A_LIMITED_GROUP, "sh"]
    command = [*shell, str(cache), sys.executable, SLEEP_OF_64_MIB, str(budget)]
    # A device with memory of its own: that of the CPU's is the group's.
    environment = os.environ | {"HARDPOINT_CUDA_DRIVER": str(library("cuda"))}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if ended.returncode == 77 or "unshare" in ended.stderr:
        pytest.skip(f"no file system can be mounted here: {ended.stderr.strip()}")
    assert (ended.stdout.splitlines(), ended.stderr) == (said, "")


def test_the_budget_counts_all_backups_together(pool: TrackedPool) -> None:
    data = content(4 * pool.unit)
    for tag in ("weights", "kv_cache"):
        pool.filled(data, tag)
    budget = 6 * pool.unit
    pool.sleep(SleepPlan(tags=frozenset({"weights"}), host_budget=budget))
    with pytest.raises(HostBudgetExceeded):
        pool.sleep(SleepPlan(tags=frozenset({"kv_cache"}), host_budget=budget))
    pool.discard_backup(["weights"])
    pool.sleep(SleepPlan(tags=frozenset({"kv_cache"}), host_budget=budget))
    assert pool.stats().asleep == {"weights", "kv_cache"}


def test_the_budget_holds_although_the_arena_has_room(cpu_pool: TrackedPool) -> None:
    small = [cpu_pool.filled(content(600_000, seed), tag) for seed, tag in enumerate(("weights", "kv_cache"))]
    cpu_pool.sleep(SleepPlan(tags=frozenset({"weights"}), host_budget=1_000_000))
    assert cpu_pool.books().host_held >= 1_200_000
    with pytest.raises(HostBudgetExceeded):
        cpu_pool.sleep(SleepPlan(tags=frozenset({"kv_cache"}), host_budget=1_000_000))
    assert not cpu_pool.is_asleep(small[1])


def test_backups_take_what_is_preserved_and_no_more(pool: TrackedPool) -> None:
    """Fact 24: sizes are not rounded to powers of two, nor to the granularity."""
    sizes = [1000, pool.unit + 1, 3 * pool.unit + 700]
    for size in sizes:
        pool.filled(content(size))
    pool.sleep(SleepPlan())
    assert pool.stats().tags["weights"].backed_up == sum(sizes)
    assert sum(sizes) <= pool.books().host_used < sum(sizes) + 512 * len(sizes)


def test_the_arena_is_used_again_and_given_back(pool: TrackedPool) -> None:
    data = content(8 * pool.unit + 1)
    pool.filled(data)
    held = set()
    for _ in range(5):
        pool.sleep(SleepPlan())
        pool.wake()
        held.add(pool.books().host_held)
    assert len(held) == 1
    assert pool.books().host_used == 0
    pool.trim()
    assert pool.books().host_held == 0


@pytest.mark.parametrize("again", ["trim", "sleep"])
def test_memory_that_the_driver_does_not_unpin_stays_in_the_books_until_it_does(
    pool: TrackedPool, target: FaultTarget, again: str
) -> None:
    address = pool.filled(content(3 * pool.unit))
    pool.sleep(SleepPlan())
    pool.wake()
    held = pool.books().host_held
    for call in unpins(target):
        target.fail(call, 1)
        pool.trim()
        assert target.disarm()
        assert pool.books().host_held == held
    if again == "sleep":
        pool.sleep(SleepPlan())
        assert pool.books().host_held == held
        pool.wake()
    pool.trim()
    assert pool.books().host_held == 0
    assert pool.read(address, 3 * pool.unit) == content(3 * pool.unit)


def test_a_buffer_of_a_disk_sleep_that_the_driver_does_not_unpin_is_unpinned_by_the_next_one(
    pool: TrackedPool, target: FaultTarget, tmp_path: Path
) -> None:
    address = pool.filled(content(3 * pool.unit))
    plan = SleepPlan(tier=SleepTier.DISK, disk_directory=str(tmp_path))
    for call in unpins(target):
        target.fail(call, 1)
        pool.sleep(plan)
        assert target.disarm()
        assert 3 * pool.unit <= pool.books().host_held < 4 * pool.unit
        pool.wake()
    assert pool.books().host_held == 0
    assert pool.read(address, 3 * pool.unit) == content(3 * pool.unit)


def test_memory_freed_in_pieces_serves_the_next_backups(pool: TrackedPool) -> None:
    """Fact 26: holes of every size between living backups."""
    blocks = {pool.filled(content(1 + 777 * n, n), f"tag{n % 4}"): n for n in range(40)}
    pool.sleep(SleepPlan())
    pool.discard_backup(["tag1"])
    pool.wake(["tag1", "tag3"])
    for address, n in blocks.items():
        if n % 4 in (1, 3):
            pool.write(address, content(1 + 777 * n, n))
    pool.sleep(SleepPlan())
    pool.wake()
    for address, n in blocks.items():
        assert pool.read(address, 1 + 777 * n) == content(1 + 777 * n, n)


def test_a_second_sleep_of_unchanged_weights_copies_nothing(pool: TrackedPool, target: FaultTarget) -> None:
    data, cache = content(4 * pool.unit), content(pool.unit, 1)
    weights, other = pool.filled(data), pool.filled(cache, "kv_cache")
    first = pool.sleep(KEEP)
    assert first.skipped == 0
    for _ in range(2):
        pool.wake()
        assert pool.stats().tags["weights"].backed_up == len(data)
        assert pool.stats().tags["kv_cache"].backed_up == 0
        before = target.calls()
        report = pool.sleep(KEEP)
        assert (report.skipped, report.preserved) == (len(data), len(cache))
        assert copies(before, target.calls()) == 1
    pool.wake()
    assert pool.read(weights, len(data)) == data
    assert pool.read(other, len(cache)) == cache


@pytest.mark.parametrize("announced_by", ["write", "mark_written"])
def test_a_written_tag_is_copied_again(pool: TrackedPool, announced_by: str) -> None:
    """Fact 8: the second wake gives the new bytes."""
    address = pool.filled(content(2 * pool.unit, 1))
    new = content(2 * pool.unit, 2)
    pool.sleep(KEEP)
    pool.wake()
    if announced_by == "write":
        pool.write(address, new)
    else:
        write_unannounced(pool, address, new)
        pool.mark_written(["weights"])
    report = pool.sleep(KEEP)
    assert (report.skipped, report.preserved) == (0, len(new))
    pool.wake()
    assert pool.read(address, len(new)) == new


def write_unannounced(pool: TrackedPool, address: int, data: bytes) -> None:
    """Write as a kernel does, past the books."""
    import ctypes

    host = ctypes.create_string_buffer(data, len(data))
    stream = pool.driver.stream_create()
    pool.driver.copy_to_device(address, ctypes.addressof(host), len(data), stream)
    pool.driver.stream_synchronize(stream)
    pool.driver.stream_destroy(stream)


def test_without_a_promise_a_backup_is_not_trusted(pool: TrackedPool) -> None:
    address = pool.filled(content(pool.unit, 1))
    pool.sleep(KEEP)
    pool.wake()
    write_unannounced(pool, address, content(pool.unit, 2))
    assert pool.sleep(SleepPlan()).skipped == 0
    pool.wake()
    assert pool.stats().tags["weights"].backed_up == 0
    assert pool.read(address, pool.unit) == content(pool.unit, 2)


def test_another_tier_makes_another_backup(pool: TrackedPool, tmp_path: Path) -> None:
    data = content(2 * pool.unit)
    address = pool.filled(data)
    for tier in (SleepTier.HOST, SleepTier.DISK, SleepTier.HOST):
        plan = SleepPlan(tier=tier, keep=frozenset({"weights"}), disk_directory=str(tmp_path))
        assert pool.sleep(plan).tiers == {tier: len(data)}
        pool.wake()
        assert pool.sleep(plan).skipped == len(data)
        pool.wake()
        assert (pool.books().host_used > 0) is (tier is SleepTier.HOST)
    assert pool.read(address, len(data)) == data


def test_a_void_backup_does_not_count_twice(pool: TrackedPool) -> None:
    """A budget for one copy is enough for every sleep, also after a write."""
    data = content(4 * pool.unit)
    pool.filled(data)
    plan = SleepPlan(keep=frozenset({"weights"}), host_budget=len(data))
    for _ in range(3):
        pool.prepare_sleep(plan)
        pool.sleep(plan)
        pool.wake()
        pool.mark_written(["weights"])


def test_a_kept_backup_survives_memory_that_joins_and_leaves(pool: TrackedPool) -> None:
    first = pool.filled(content(pool.unit, 1))
    pool.sleep(KEEP)
    pool.wake()
    second = pool.filled(content(pool.unit, 2))
    report = pool.sleep(KEEP)
    assert (report.skipped, report.preserved) == (pool.unit, pool.unit)
    pool.free(first)
    assert pool.stats().tags["weights"].backed_up == pool.unit
    pool.wake()
    assert pool.read(second, pool.unit) == content(pool.unit, 2)


def test_a_block_in_a_shared_allocation_voids_its_kept_backup(pool: TrackedPool) -> None:
    first = pool.filled(content(5000, 1), shared=True)
    pool.sleep(KEEP)
    pool.wake()
    second = pool.filled(content(6000, 2), shared=True)
    assert pool.sleep(KEEP).preserved == 11000
    pool.wake()
    assert pool.read(first, 5000) == content(5000, 1)
    assert pool.read(second, 6000) == content(6000, 2)


def test_a_prepared_sleep_pins_nothing_more(pool: TrackedPool, target: FaultTarget) -> None:
    """Sizes that do not fill their last page, just below the size of a slab: what is prepared is what is needed."""
    sizes = [10_001] * 32
    rest = (2 << 20) - sum(-(-size // 512) * 512 for size in sizes)
    for size in [*sizes, rest]:
        pool.filled(content(size))
    pool.prepare_sleep(SleepPlan())
    wait_until(lambda: pool.books().host_held > 0)
    held, before = pool.books().host_held, registrations(target)
    pool.sleep(SleepPlan())
    assert pool.books().host_held == held
    assert registrations(target) == before


def test_preparing_for_a_kept_backup_takes_nothing(pool: TrackedPool) -> None:
    data = content(4 * pool.unit)
    pool.filled(data)
    plan = SleepPlan(keep=frozenset({"weights"}), host_budget=len(data))
    pool.sleep(plan)
    pool.wake()
    held = pool.books().host_held
    pool.prepare_sleep(plan)
    assert pool.sleep(plan).skipped == len(data)
    assert pool.books().host_held == held


def test_two_preparations_at_once_are_one_after_the_other(cpu_pool: TrackedPool) -> None:
    cpu_pool.filled(content(8 << 20))
    threads = [
        threading.Thread(target=lambda: [cpu_pool.prepare_sleep(SleepPlan()) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu_pool.sleep(SleepPlan())
    assert cpu_pool.books().host_used == 8 << 20
