"""Level 6: memory over many cycles, from many threads, in forked processes, and at the end of the process."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hardpoint.interfaces import Policy, SleepPlan, SleepTier
from hardpoint.memory import DriverFlags
from hardpoint_conformance.clauses import clause, proves
from hardpoint_conformance.levels import Level
from hardpoint_conformance.memory import (
    PROCESS,
    WAYS,
    Block,
    Memory,
    PoolMemory,
    TensorMemory,
    content,
    differences,
    driver_of,
    files_below,
    obstacle,
    open_memory,
    process_counts,
    require,
    run_program,
    wait_until,
)
from hardpoint_conformance.target import Target

if TYPE_CHECKING:
    import numpy as np

MIB = 1 << 20
HOST = pytest.param(SleepTier.HOST, id="host", marks=proves("memory.tier.host"))
DISK = pytest.param(SleepTier.DISK, id="disk", marks=proves("memory.tier.disk"))


def runs_cleanly(target: Target, way: str, program: str, directory: Path) -> str:
    """Run a program, assert that it ends with status 0 and writes no error; return its output."""
    ended = run_program(target, way, program, directory)
    assert (ended.returncode, ended.stderr) == (0, ""), f"status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def resident_bytes() -> int:
    """Return the process's resident memory; 0 where the system does not tell."""
    file = PROCESS / "statm"
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.exists() else 0


@clause(
    "stress.memory.cycles@1", Level.STRESS, capability="memory.sleep.1", facts="allocator fact 1, allocator fact 25"
)
@pytest.mark.parametrize("tier", [HOST, DISK])
def test_many_cycles_grow_nothing(memory: Memory, tier: SleepTier, tmp_path: Path) -> None:
    """A hundred cycles of sleep and wake, with memory coming and going, leave device memory, driver handles, addresses, resident memory,
    mappings and open files as they were, and every byte right."""
    plan = SleepPlan(tier=tier, disk_directory=str(tmp_path))
    size = memory.unit // 2 + 5
    blocks = [(memory.filled(content(size, seed)), seed) for seed in range(4)]

    def cycles(first: int, count: int) -> None:
        for seed in range(first, first + count):
            memory.sleep(plan)
            memory.free(blocks.pop(0)[0])
            memory.wake()
            blocks.append((memory.filled(content(size, seed)), seed))

    def measured() -> dict[str, int]:
        is_gone = wait_until(lambda: max(files_below(tmp_path).values(), default=0) < size)
        assert is_gone, f"backups are still on disk: {files_below(tmp_path)}"
        held = memory.driver.held() if isinstance(memory, PoolMemory) else {}
        return {**held, "mapped": memory.mapped(), "allocated": memory.stats().allocated}

    cycles(10, 10)
    before, process, resident = measured(), process_counts(), resident_bytes()
    cycles(100, 100 if tier is SleepTier.HOST else 30)
    assert differences(before, measured()) == {}
    grown = differences(process, process_counts())
    assert grown.get("files", 0) <= 0, f"{grown.get('files')} more files are open after the cycles"
    assert grown.get("mappings", 0) < 25, f"the process has {grown.get('mappings')} more mappings after the cycles"
    more = resident_bytes() - resident
    assert more < 8 * memory.unit + 32 * MIB, f"the process keeps {more} bytes more after the cycles"
    for block, seed in blocks:
        assert memory.read(block) == content(size, seed)


@clause("stress.memory.any-order@1", Level.STRESS, capability="memory.sleep.1", facts="allocator fact 26")
def test_any_order_keeps_every_byte(memory: Memory, rng: np.random.Generator, draw: str) -> None:
    """Allocations of all sizes under several tags that come, go, sleep and wake in random order keep their bytes, and the books count
    them right."""
    tags = ("weights", "kv_cache", "buffers")
    living: dict[Block, bytes] = {}
    asleep: set[str] = set()
    for step in range(60):
        action = rng.integers(0, 8)
        chosen = [tag for tag in tags if rng.integers(0, 2)]
        if action < 3 and len(living) < 12:
            size = int(rng.choice([1, 700, 5000, memory.unit - 1, memory.unit + 1, 2 * memory.unit]))
            tag = str(rng.choice([tag for tag in tags if tag not in asleep] or ["other"]))
            living[memory.filled(content(size, step), tag)] = content(size, step)
        elif action == 3 and living:
            block = list(living)[int(rng.integers(0, len(living)))]
            del living[block]
            memory.free(block)
            asleep = set(memory.stats().asleep)
        elif action < 6:
            present = [tag for tag in chosen if tag in memory.stats().tags]
            memory.sleep(SleepPlan(tags=frozenset(present)))
            asleep = set(memory.stats().asleep)
        else:
            memory.wake([tag for tag in chosen if tag in memory.stats().tags])
            asleep = set(memory.stats().asleep)
        assert asleep <= {block.tag for block in living}
        assert memory.stats().allocated == sum(map(len, living.values()))
    for block, data in living.items():
        if block.tag in asleep:
            assert memory.read_backup(block) == data
    memory.wake()
    for block, data in living.items():
        assert memory.read(block) == data


@clause(
    "stress.memory.threads@1", Level.STRESS, capability="memory.sleep.1", facts="allocator fact 10, allocator fact 33"
)
def test_threads_allocate_while_another_tag_sleeps(memory: Memory) -> None:
    """Threads allocate, use and free memory of one tag while another tag sleeps and wakes over and over: no deadlock, no lost byte, and
    the books balance."""
    data = content(memory.unit + 3, 99)
    kept = memory.filled(data)
    stop = threading.Event()

    def churn(number: int) -> int:
        rounds = 0
        while not stop.is_set() and rounds < 400:
            mine = content(1000 + 7 * number, number)
            block = memory.filled(mine, "kv_cache", Policy.DISCARD)
            assert memory.read(block) == mine
            memory.free(block)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(3) as executor:
        churning = [executor.submit(churn, number) for number in range(3)]
        try:
            for _ in range(30):
                memory.sleep(SleepPlan(tags=frozenset({"weights"})))
                memory.wake(["weights"])
                assert memory.read(kept) == data
        finally:
            stop.set()
        assert min(one.result(timeout=60) for one in churning) > 0, "a thread could not allocate at all"
    assert memory.stats().allocated == len(data)


@clause("stress.memory.operations@1", Level.STRESS, capability="memory.sleep.1", facts="allocator fact 33")
def test_operations_of_several_threads_follow_one_another(memory: Memory) -> None:
    """Sleeps and wakes started from several threads at a time follow one another, and each leaves a legal state."""
    blocks = {tag: memory.filled(content(memory.unit, seed), tag) for seed, tag in enumerate(("weights", "kv_cache"))}

    def work(number: int) -> None:
        for _ in range(15):
            if number % 2:
                memory.sleep(SleepPlan(tags=frozenset({"weights" if number == 1 else "kv_cache"})))
            else:
                memory.wake()

    with ThreadPoolExecutor(4) as executor:
        for one in [executor.submit(work, number) for number in range(4)]:
            one.result(timeout=60)
    memory.wake()
    assert [memory.read(block) for block in blocks.values()] == [content(memory.unit, seed) for seed in range(2)]


@clause("stress.memory.fork@1", Level.STRESS, facts="allocator fact 37")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize("way", WAYS)
def test_a_forked_child_is_refused(target: Target, way: str, tmp_path: Path) -> None:
    """In a forked child every use of the memory is refused with ForkedProcess, which the child may end with; the parent is unharmed."""
    require(target, way)
    program = """
    import warnings
    # Python 3.12 warns of every fork of a process that has several threads, as libraries' are.
    warnings.simplefilter("ignore", DeprecationWarning)
    block = memory.filled(content(unit), "weights")
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: memory.allocate(1000), memory.sleep, memory.wake):
            try:
                call()
            except ForkedProcess:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert memory.read(block) == content(unit)
    memory.free(memory.filled(content(1000), "kv_cache"))
    print("unharmed")
    """
    assert runs_cleanly(target, way, program, tmp_path) == "unharmed\n"


_ENDS = {
    "awake": "",
    "asleep": "memory.sleep()",
    "half-woken": "memory.sleep(); memory.wake(['kv_cache'])",
    "closed": "memory.sleep(); memory.close()",
    "exit-handler": "import atexit; atexit.register(memory.close); memory.sleep()",
    "daemon-thread": (
        "threading.Thread(target=lambda: [(memory.sleep(), memory.wake()) for _ in range(10**6)], daemon=True).start()"
        "; time.sleep(0.05)"
    ),
}


@clause("stress.memory.exit@1", Level.STRESS, capability="memory.sleep.1", facts="allocator fact 38")
@pytest.mark.parametrize(
    ("way", "state"),
    [("pool", state) for state in _ENDS] + [("tensors", state) for state in ("asleep", "half-woken")],
    ids=lambda part: part,
)
def test_the_process_ends_cleanly_in_any_state(target: Target, way: str, state: str, tmp_path: Path) -> None:
    """A process ends with status 0 and without a word in whatever state its memory is, with tensors alive."""
    require(target, way)
    program = f"""
    blocks = [memory.filled(content(unit), tag) for tag in ("weights", "kv_cache")]
    sys.kept = (memory, blocks)
    {_ENDS[state]}
    """
    runs_cleanly(target, way, program, tmp_path)


@clause("stress.memory.exit-files@1", Level.STRESS, capability="memory.tier.disk", facts="allocator fact 38")
def test_no_backup_outlives_its_process(target: Target, tmp_path: Path) -> None:
    """Backups on disk are removed when their process ends with its memory asleep."""
    way = next((way for way in reversed(WAYS) if not obstacle(target, way)), WAYS[0])
    require(target, way)
    program = """
    block = memory.filled(content(unit), "weights")
    memory.sleep(SleepPlan(tier=SleepTier.DISK, disk_directory=directory))
    sys.kept = (memory, block)
    """
    runs_cleanly(target, way, program, tmp_path)
    assert max(files_below(tmp_path).values(), default=0) < 4096


@clause("stress.memory.other-process@1", Level.STRESS, capability="memory.sleep.2", facts="allocator fact 27")
@pytest.mark.parametrize("way", WAYS)
def test_another_process_can_use_what_sleeps(target: Target, way: str, tmp_path: Path) -> None:
    """While memory is asleep, another process can take and use as much of the same device, and the sleeper wakes after it. On an
    accelerator that is 60 % of what is free, so that both at once would not fit."""
    require(target, way)
    program = """
    import subprocess
    import numpy
    size = unit * 8
    if target.descriptor.accelerator and not target.simulated:
        size = int(memory.memory_info().free * 0.6) // unit * unit
    if len(sys.argv) > 5:
        size = int(sys.argv[5])
    block = memory.allocate(size, "weights", Policy.DISCARD)
    for at in (0, size - 1000):
        memory.write(block, content(1000), at)
        assert memory.read(block, 1000, at) == content(1000)
    if len(sys.argv) == 5:
        memory.sleep()
        other = subprocess.run([*sys.orig_argv[:3], *sys.argv[1:5], str(size)], capture_output=True, text=True, timeout=50)
        assert other.returncode == 0, other.stderr
        memory.wake()
        memory.write(block, content(1000, 1))
        assert memory.read(block, 1000) == content(1000, 1)
    memory.free(block)
    """
    runs_cleanly(target, way, program, tmp_path)


@clause("stress.memory.co-tenant@1", Level.STRESS, capability="memory.sleep.1", facts="allocator fact 44")
def test_co_tenant_may_come_and_go(target: Target, memory: Memory) -> None:
    """Another engine that allocates and frees on the same device while memory sleeps and wakes disturbs neither the operation nor the
    books: what free memory the driver reports is told, and nothing is concluded from it."""
    tenant = open_memory(target, memory.way)
    block = memory.filled(content(4 * memory.unit))
    taken = memory.mapped()  # small tensors share an allocation, which is larger
    stop = threading.Event()

    def come_and_go() -> int:
        rounds = 0
        while not stop.is_set() or rounds == 0:
            other = tenant.filled(content(2 * tenant.unit, rounds))
            assert tenant.read(other, 100) == content(100, rounds)
            tenant.free(other)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as executor:
        coming = executor.submit(come_and_go)
        try:
            for _ in range(20):
                assert memory.sleep().unmapped == memory.wake().unmapped == taken
        finally:
            stop.set()
        assert coming.result(timeout=60) > 0
    assert memory.read(block) == content(4 * memory.unit)
    assert memory.stats().allocated == 4 * memory.unit
    tenant.end()


@proves("memory.sleep.1")
@clause("stress.memory.torch-cache@1", Level.STRESS, capability="memory.torch_pool", facts="allocator fact 39")
def test_torch_may_empty_its_cache_while_memory_sleeps(tensor_memory: TensorMemory, target: Target) -> None:
    """While a pool's tensors are asleep, torch's cache can be emptied, its statistics asked for and garbage collected, where torch has
    these for the device; the tensors wake at their addresses with their bytes."""
    import torch

    with tensor_memory.allocator.pool("weights"):
        tensor = torch.arange(1000, dtype=torch.int32, device=target.device.torch_device)
    address = tensor.data_ptr()
    tensor_memory.sleep()
    module = torch.get_device_module(torch.device(target.device.torch_device).type)
    for name in ("empty_cache", "memory_stats", "memory_snapshot"):
        call = getattr(module, name, None)
        if call is not None:
            call()
    gc.collect()
    assert tensor_memory.stats().asleep == {"weights"}
    tensor_memory.wake()
    assert tensor.data_ptr() == address
    assert tensor.tolist() == list(range(1000))


@clause("stress.memory.asleep-faults@1", Level.STRESS, capability="memory.sleep.1", facts="allocator fact 47")
def test_access_to_sleeping_memory_is_a_fault(target: Target, tmp_path: Path) -> None:
    """Sleeping memory never gives other bytes: a read by the backend is refused, and where device memory is memory of the process, an
    access by address ends the process at once."""
    reachable = DriverFlags.HOST_ACCESSIBLE in driver_of(target).flags
    program = f"""
    import ctypes
    block = memory.filled(content(unit), "weights")
    memory.sleep()
    try:
        memory.read(block)
    except MemoryAsleep:
        print("refused", flush=True)
    if {reachable}:
        print(ctypes.string_at(block.address, 1))
    """
    ended = run_program(target, "pool", program, tmp_path)
    assert ended.stdout == "refused\n"
    assert (ended.returncode != 0) is reachable


@clause("stress.memory.heartbeat@1", Level.STRESS, capability="memory.sleep.1", facts="allocator fact 35")
def test_long_operations_leave_other_threads_alone(memory: Memory) -> None:
    """Python threads go on while memory sleeps and wakes: none is held up for the time of a whole operation."""
    block = memory.allocate(max(96 * MIB, 4 * memory.unit))
    memory.write(block, content(MIB))
    pauses: list[float] = []
    stop = threading.Event()

    def beat() -> None:
        import time

        last = time.perf_counter()
        while not stop.is_set():
            stop.wait(0.001)
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    def slowest(operation: Callable[[], object]) -> float:
        import time

        pauses.clear()
        start = time.perf_counter()
        operation()
        spent = time.perf_counter() - start
        time.sleep(0.01)  # for the thread to note a pause that ended with the operation
        return max(pauses, default=spent) / spent

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        # Other processes hold threads up as well: one clear observation of each is enough.
        shares = [(slowest(memory.sleep), slowest(memory.wake)) for _ in range(6)]
    finally:
        stop.set()
        thread.join()
    assert min(share for share, _ in shares) < 0.8
    assert min(share for _, share in shares) < 0.8
