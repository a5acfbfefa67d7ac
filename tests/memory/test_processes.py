"""The process around the engine: forks, its end at any moment, what grows, and who else gets the memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from hardpoint.interfaces import Policy, SleepPlan, SleepTier
from hardpoint.interfaces.errors import ForkedProcess
from hardpoint_conformance.fault_matrix import FaultTarget
from hardpoint_conformance.memory import content, wait_until
from hardpoint_conformance.memory_model import TrackedPool

from .support import PRELUDE, run_program, runs_cleanly
from .test_disk_tier import backup_files

FORKED = """
    directory = sys.argv[1]
    pool = VirtualPool(driver_table())
    weights, cache = pool.allocate(4 << 20, "weights"), pool.allocate(4 << 20, "kv_cache")
    for address in (weights, cache):
        pool.write(address, b"abcdefgh" * (1 << 19))
    plan = SleepPlan(tags=frozenset({"weights"}), tier=SleepTier.DISK, disk_directory=directory)
    pool.sleep(plan)
    other = pool.allocate(4 << 20, "other")
    pool.sleep(SleepPlan(tags=frozenset({"other"})))
    files = sum(len(names) for _, _, names in os.walk(directory))
    pool.prepare_sleep(SleepPlan())
    child = os.fork()
    if child == 0:
        calls = {
            "allocate": lambda: pool.allocate(100), "shared": lambda: pool.allocate(100, shared=True),
            "free": lambda: pool.free(cache), "resize": lambda: pool.resize(cache, 1),
            "is_asleep": lambda: pool.is_asleep(cache), "read": lambda: pool.read(cache, 1),
            "write": lambda: pool.write(cache, b"x"), "declare": lambda: pool.declare_source(cache, 1, lambda: None),
            "declare file": lambda: pool.declare_source(cache, 1, [FileExtent(0, 1, __import__("sys").executable, 0)]),
            "mark_written": lambda: pool.mark_written(["weights"]), "prepare": lambda: pool.prepare_sleep(plan),
            "sleep": lambda: pool.sleep(SleepPlan()), "wake": pool.wake, "stats": pool.stats, "books": pool.books,
            "discard": lambda: pool.discard_backup(["weights"]), "read_backup": lambda: pool.read_backup(weights, 1),
            "memory_info": pool.memory_info, "trim": pool.trim,
        }
        for name, call in calls.items():
            try:
                call()
            except ForkedProcess:
                continue
            print(name, "did not raise ForkedProcess", flush=True)
        pool.close()
        del pool, calls, call
        gc.collect()
        sys.exit(0)  # with the interpreter's own end
    print("child", os.waitpid(child, 0)[1])
    assert sum(len(names) for _, _, names in os.walk(directory)) == files
    pool.wake()
    for address in (weights, cache):
        assert pool.read(address, 4 << 20) == b"abcdefgh" * (1 << 19)
"""


def test_a_forked_child_is_refused_and_the_parent_unharmed(tmp_path: Path) -> None:
    """Fact 37: every method, while the host is being pinned in the background, with backups of all kinds."""
    assert runs_cleanly(FORKED, tmp_path) == "child 0\n"


FORKED_IN_AN_OPERATION = """
    pool = VirtualPool(driver_table())
    address = pool.allocate(8 << 20, "weights")
    pool.write(address, b"abcdefgh" * (1 << 20))
    operation = pool.begin_sleep(SleepPlan())
    child = os.fork()
    if child == 0:
        del operation, pool
        gc.collect()
        sys.exit(0)
    print("child", os.waitpid(child, 0)[1])
    operation.rollback()
    assert pool.read(address, 8) == b"abcdefgh"
"""


def test_a_fork_in_the_middle_of_an_operation_is_the_parents() -> None:
    assert runs_cleanly(FORKED_IN_AN_OPERATION) == "child 0\n"


def test_simulated_drivers_of_a_forked_child_are_left_alone(pool: TrackedPool) -> None:
    address = pool.filled(content(pool.unit))
    pool.sleep(SleepPlan())
    child = os.fork()
    if child == 0:
        try:
            pool.wake()
        except ForkedProcess:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    pool.wake()
    assert pool.read(address, pool.unit) == content(pool.unit)


ENDS = {
    "awake": "",
    "asleep on the host": "pool.sleep(SleepPlan())",
    "asleep on disk": "pool.sleep(disk)",
    "half awake": "pool.sleep(disk); pool.wake(['kv_cache'])",
    "a sleep prepared": "operation = pool.begin_sleep(SleepPlan())",
    "a sleep to disk prepared": "operation = pool.begin_sleep(disk)",
    "a wake prepared": "pool.sleep(disk); operation = pool.begin_wake()",
    "a sleep prepared in a cycle": "cycle = [pool.begin_sleep(disk)]; cycle.append(cycle)",
    "pinning in the background": "pool.prepare_sleep(SleepPlan())",
    "removing a file in the background": "pool.sleep(disk); pool.wake()",
    "closed": "pool.sleep(disk); pool.close()",
    "an exit handler that comes late": "import atexit; atexit.register(pool.close); atexit.register(lambda: pool.free(cache))",
    "a daemon thread asleep over and over": (
        "threading.Thread(target=lambda: [(pool.sleep(SleepPlan()), pool.wake()) for _ in range(10**6)], daemon=True).start()"
        "; time.sleep(0.05)"
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_interpreter_ends_cleanly(end: str, tmp_path: Path) -> None:
    """Fact 38: status 0, nothing on standard error, no file left."""
    program = f"""
    pool = VirtualPool(driver_table())
    weights, cache = pool.allocate(32 << 20, "weights"), pool.allocate(4 << 20, "kv_cache")
    disk = SleepPlan(tier=SleepTier.DISK, disk_directory=sys.argv[1])
    {ENDS[end]}
    """
    runs_cleanly(program, tmp_path)
    assert backup_files(tmp_path) == []


@pytest.mark.parametrize("end", ["awake", "asleep on the host", "a sleep prepared", "a wake prepared"])
@pytest.mark.parametrize("vendor", ["cuda", "rocm", "ascend"])
def test_the_interpreter_ends_cleanly_over_a_simulated_driver(vendor: str, end: str, tmp_path: Path) -> None:
    program = f"""
    pool = VirtualPool(SimulatedTarget("{vendor}").table())
    weights, cache = pool.allocate(32 << 20, "weights"), pool.allocate(4 << 20, "kv_cache")
    disk = SleepPlan(tier=SleepTier.DISK, disk_directory=sys.argv[1])
    {ENDS[end]}
    """
    runs_cleanly(program, tmp_path, prelude=PRELUDE + "from tests.fault_matrix.targets import SimulatedTarget")
    assert backup_files(tmp_path) == []


@pytest.mark.parametrize("trial", range(8))
def test_daemon_threads_may_ask_and_change_while_the_interpreter_ends(trial: int) -> None:
    """A race: before the engine handed out plain values, one in four of these ended with a signal.

    A thread that comes to a pool which the interpreter has closed on its way out goes no further, and is told nothing.
    """
    program = """
    pool = VirtualPool(driver_table())
    kept = [pool.allocate(1 << 16, tag) for tag in ("weights", "kv_cache")]
    asks = lambda: [pool.stats() for _ in range(10**6)]
    changes = lambda: [(pool.sleep(SleepPlan()), pool.wake()) for _ in range(10**6)]
    for work in (asks, asks, asks, changes):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.03)
    """
    runs_cleanly(program)


def test_a_daemon_thread_waits_at_a_pool_that_the_interpreter_has_closed() -> None:
    """The main thread, which ends the interpreter, is told so where an exit handler comes late; of others an error would be printed."""
    program = """
    pool = VirtualPool(driver_table())
    kept = pool.allocate(1 << 16, "weights")
    def late():
        time.sleep(0.2)
        try:
            pool.sleep(SleepPlan())
        except MemoryFault as error:
            print(error)
    changes = lambda: [(pool.sleep(SleepPlan()), pool.wake()) for _ in range(10**6)]
    threading.Thread(target=changes, daemon=True).start()
    """
    # Handlers run last that were registered first.
    ended = run_program(program, prelude="import atexit; atexit.register(lambda: late())" + PRELUDE)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "the allocator is closed" in ended.stdout


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("how", ["disk", "source", "discard"])
def test_the_processes_own_memory_falls_by_what_sleeps(how: str, cpu_pool: TrackedPool, tmp_path: Path) -> None:
    """Fact 23 on the CPU: the operating system's count, not ours."""
    from hardpoint.interfaces import FileExtent

    size = 128 << 20
    data = content(size)
    address = cpu_pool.allocate(size)
    cpu_pool.write(address, data)
    if how == "source":
        (tmp_path / "source").write_bytes(data)
        cpu_pool.declare_source(address, size, [FileExtent(0, size, str(tmp_path / "source"), 0)])
    plans = {
        "disk": SleepPlan(tier=SleepTier.DISK, disk_directory=str(tmp_path)),
        "source": SleepPlan(tier=SleepTier.SOURCE),
        "discard": SleepPlan(policies={"weights": Policy.DISCARD}),
    }
    before = resident_bytes()
    cpu_pool.sleep(plans[how])
    assert before - resident_bytes() >= 0.99 * size
    cpu_pool.wake()
    if how != "discard":
        assert cpu_pool.read(address, size) == data


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@pytest.mark.parametrize("tier", [SleepTier.HOST, SleepTier.DISK], ids=str)
def test_many_cycles_grow_nothing(pool: TrackedPool, target: FaultTarget, tier: SleepTier, tmp_path: Path) -> None:
    """Fact 25."""
    plan = SleepPlan(tier=tier, disk_directory=str(tmp_path))
    blocks = [pool.filled(content(pool.unit // 2 + 5, seed), shared=seed % 2 == 0) for seed in range(8)]

    def cycles(count: int) -> None:
        for seed in range(count):
            pool.sleep(plan)
            pool.free(blocks.pop(0))
            pool.wake()
            blocks.append(pool.filled(content(pool.unit // 2 + 5, seed), shared=seed % 2 == 0))

    def measured() -> dict[str, int]:
        wait_until(lambda: pool.books().disk_used == 0)
        counts = {"descriptors": descriptors(), **target.held()}
        return {name: count for name, count in counts.items() if name != "used"}

    cycles(10)
    before, sizes = measured(), (resident_bytes(), address_space(), mappings())
    cycles(100 if tier is SleepTier.HOST else 30)
    assert measured() == before
    grown = [after - early for early, after in zip(sizes, (resident_bytes(), address_space(), mappings()), strict=True)]
    assert grown[0] < 8 * pool.unit + (4 << 20)
    assert grown[1] < 8 * pool.unit + (64 << 20)  # a thread's arena may come once
    assert grown[2] < 20


def test_sleeping_memory_is_there_for_another_process(tmp_path: Path) -> None:
    """Fact 27: the operating system counts it as available, and another process takes it."""
    program = """
    import subprocess
    size = 256 << 20
    pool = VirtualPool(driver_table())
    address = pool.allocate(size, "weights")
    pool.write(address, b"abcdefgh" * (size // 8))
    def available():
        # MemAvailable leaves out what Linux keeps on lists of each processor for a while, which may be an eighth of the memory.
        lately = sum(int(line.split()[1]) for line in open("/proc/zoneinfo") if line.split()[0] == "count:")
        found = int(next(line for line in open("/proc/meminfo") if line.startswith("MemAvailable")).split()[1]) * 1024
        return found + lately * os.sysconf("SC_PAGE_SIZE")
    gained = 0
    for _ in range(8):  # others take and give memory, too
        awake = available()
        pool.sleep(SleepPlan(tier=SleepTier.DISK, disk_directory=sys.argv[1]))
        patience = time.monotonic() + 3
        while (gained := available() - awake) <= size // 2 and time.monotonic() < patience:
            time.sleep(0.05)
        if gained > size // 2:
            break
        pool.wake()
    print(gained > size // 2)
    taking = "taken = bytearray(%d); taken[::4096] = b'x' * %d" % (size, size // 4096)
    subprocess.run([sys.executable, "-S", "-c", taking], check=True)
    pool.wake()
    assert pool.read(address, 8) == b"abcdefgh"
    """
    assert runs_cleanly(program, tmp_path) == "True\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only the superuser can leave a user for one with a limit")
def test_a_system_without_a_thread_left_is_slower_and_no_worse() -> None:
    program = """
    import resource
    pool = VirtualPool(driver_table())
    addresses = [pool.allocate(64 << 20, "weights") for _ in range(2)]
    for address in addresses:
        pool.write(address, b"abcdefgh" * (1 << 20))
    os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    told = []
    pool.prepare_sleep(SleepPlan())
    pool.sleep(SleepPlan(progress=lambda done, in_all: told.append(done)))
    pool.wake()
    assert told and all(pool.read(address, 8) == b"abcdefgh" for address in addresses)
    """
    ended = run_program(program)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
