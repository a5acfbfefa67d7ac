"""Several threads: allocation goes on under operations, operations wait for one another, and nothing stops Python."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from hardpoint.interfaces import Policy, SleepPlan
from hardpoint.interfaces.errors import ForeignMemory, MemoryAsleep, MemoryFault
from hardpoint.memory import VirtualPool
from hardpoint_conformance.interposed import InterposedDriver
from hardpoint_conformance.memory import content
from hardpoint_conformance.memory_model import TrackedPool
from tests.fault_matrix.targets import CpuTarget


class Crew:
    """Threads whose failures are the test's."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.threads: list[threading.Thread] = []

    def start(self, work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as failure:
                self.failures.append(failure)

        thread = threading.Thread(target=run)
        self.threads.append(thread)
        thread.start()
        return thread

    def join(self) -> None:
        for thread in self.threads:
            thread.join()
        assert self.failures == []


@contextmanager
def crew() -> Iterator[Crew]:
    """Give a crew, and wait for all of it."""
    members = Crew()
    try:
        yield members
    finally:
        members.join()


def test_a_wake_that_waits_while_the_pool_is_closed_is_refused(pool: TrackedPool) -> None:
    """It would find no backup, and memory without one wakes as if it had been discarded."""
    for tag in ("weights", "kv_cache"):
        pool.filled(content(pool.unit), tag)
    pool.sleep(SleepPlan(tags=frozenset({"weights"})))
    sleeps, is_closed = threading.Event(), threading.Event()

    def progress(done: int, whole: int) -> None:
        sleeps.set()
        assert is_closed.wait(30)

    def wake() -> None:
        with pytest.raises(MemoryFault, match="closed"):
            pool.wake(["weights"])

    with crew() as threads:
        threads.start(lambda: pool.sleep(SleepPlan(tags=frozenset({"kv_cache"}), progress=progress)))
        assert sleeps.wait(30)
        threads.start(wake)
        time.sleep(0.05)  # it waits for the sleep
        pool.close()
        is_closed.set()
    assert pool.books().host_held == 0


def test_threads_allocate_and_free_while_another_tag_sleeps_and_wakes(pool: TrackedPool) -> None:
    """Fact 33."""
    data = content(3 * pool.unit)
    weights = pool.filled(data)
    done = threading.Event()
    rounds = 400 if pool.unit < 1 << 20 else 100

    def churn(seed: int) -> None:
        dice = random.Random(seed)
        living: list[int] = []
        native = VirtualPool.allocate, VirtualPool.free
        for _ in range(rounds):
            size = dice.choice([100, 5000, pool.unit, 2 * pool.unit + 1])
            living.append(native[0](pool, size, "kv_cache", Policy.DISCARD, shared=dice.random() < 0.5))
            pool.write(living[-1], content(100, seed))
            if len(living) > 5:
                address = living.pop(dice.randrange(len(living)))
                assert pool.read(address, 100) == content(100, seed)
                native[1](pool, address)
        for address in living:
            native[1](pool, address)

    cycles = 0
    plan = SleepPlan(tags=frozenset({"weights"}))
    with crew() as threads:
        churners = [threads.start(lambda seed=seed: churn(seed)) for seed in range(3)]
        while any(thread.is_alive() for thread in churners) or cycles < 3:
            pool.sleep(plan)
            pool.wake(["weights"])
            cycles += 1
        done.set()
    assert pool.read(weights, len(data)) == data
    assert pool.stats().tags["kv_cache"].allocated == 0
    assert cycles >= 3


def test_threads_free_what_is_being_put_to_sleep(pool: TrackedPool) -> None:
    """Each free wins or loses the race with the sleep and the wake; the memory is gone afterwards either way."""
    kept = pool.filled(content(2 * pool.unit))
    contents = [content(pool.unit, seed) for seed in range(10)]
    for _ in range(15):
        doomed = [pool.filled(data, shared=seed % 2 == 0) for seed, data in enumerate(contents)]
        with crew() as threads:
            for part in (doomed[::2], doomed[1::2]):
                threads.start(lambda part=part: [pool.free(address) for address in part])
            pool.sleep(SleepPlan())
            pool.wake()
        for address in doomed:
            with pytest.raises(ForeignMemory):
                pool.free(address)
        assert pool.stats().tags["weights"].allocations == 1
    assert pool.read(kept, 2 * pool.unit) == content(2 * pool.unit)


@pytest.mark.parametrize("ending", ["free", "free of a shared block", "sleep", "shrink"])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_memory_stays_while_its_bytes_are_copied(cpu_target: CpuTarget, kind: str, ending: str) -> None:
    """Another thread frees it, puts it to sleep or resizes it in the middle of the copy: it is unmapped after that."""
    entry = "copy_to_host" if kind == "read" else "copy_to_device"
    calls: list[str] = []
    threads = Crew()

    def copy(call: Callable[..., int], *arguments: int) -> int:
        if not threads.threads and ready:
            threads.start(endings[ending]).join(0.05)
            calls.append("copied")
        return call(*arguments)

    def unmap(call: Callable[..., int], *arguments: int) -> int:
        calls.append("unmapped")
        return call(*arguments)

    pool = TrackedPool(InterposedDriver(cpu_target.table(), {entry: copy, "unmap": unmap}))
    shared = ending == "free of a shared block"
    size = 4096 if shared else 4 * pool.unit
    data = content(size)
    ready = False
    address = pool.allocate(size, "weights", Policy.PRESERVE, 0 if shared else 2 * size, shared=shared)
    pool.write(address, data)
    endings: dict[str, Callable[[], object]] = {
        "free": lambda: pool.free(address),
        "free of a shared block": lambda: (pool.free(address), taken.append(pool.allocate(size, shared=True))),
        "sleep": lambda: pool.sleep(SleepPlan()),
        "shrink": lambda: pool.resize(address, pool.unit),
    }
    taken: list[int] = []
    ready = True
    if kind == "read":
        assert pool.read(address, size) == data
    else:
        pool.write(address, data)
    threads.join()
    assert calls[0] == "copied"
    assert "unmapped" in calls
    assert address not in taken, "handed out while it was written"
    pool.free_all()


def test_threads_read_and_write_what_others_free_or_put_to_sleep(pool: TrackedPool) -> None:
    data = content(pool.unit)
    kept = pool.filled(data)
    over = threading.Event()
    doomed: list[int] = []

    def touch(address: Callable[[], int]) -> None:
        while not over.is_set():
            with suppress(MemoryAsleep, ForeignMemory):
                pool.write(address(), data)
                found = pool.read(address(), pool.unit)
                assert address() != kept or found == data

    with crew() as threads:
        doomed.append(pool.filled(data))
        for address in (lambda: kept, lambda: doomed[-1]):
            threads.start(lambda address=address: touch(address))
        for _ in range(60):
            pool.sleep(SleepPlan())
            pool.wake()
            doomed.append(pool.filled(data))
            pool.free(doomed[-2])
        over.set()
    assert pool.stats().tags["weights"].allocations == 2


def test_operations_of_two_threads_follow_one_another(pool: TrackedPool) -> None:
    blocks = {tag: pool.filled(content(2 * pool.unit, seed), tag) for seed, tag in enumerate(("weights", "kv_cache"))}

    def cycle(tag: str) -> None:
        for _ in range(30):
            pool.sleep(SleepPlan(tags=frozenset({tag})))
            pool.wake([tag])

    with crew() as threads:
        for tag in blocks:
            threads.start(lambda tag=tag: cycle(tag))
    for seed, address in enumerate(blocks.values()):
        assert pool.read(address, 2 * pool.unit) == content(2 * pool.unit, seed)


def test_a_sleep_waits_for_the_one_of_another_thread(cpu_pool: TrackedPool) -> None:
    """The second begins when the first is over, and then finds the memory asleep."""
    cpu_pool.filled(content(8 << 20))
    entered, go_on = threading.Event(), threading.Event()
    reports: list[int] = []

    def hold(done: int, in_all: int) -> None:
        entered.set()
        assert go_on.wait(240)

    with crew() as threads:
        threads.start(lambda: cpu_pool.sleep(SleepPlan(progress=hold)))
        assert entered.wait(240)
        second = threads.start(lambda: reports.append(cpu_pool.sleep(SleepPlan()).preserved))
        second.join(0.05)
        assert second.is_alive()
        go_on.set()
    assert reports == [0]


def test_two_pools_do_not_wait_for_one_another() -> None:
    """Fact 40: one of them is in the middle of a sleep all the while."""
    first, second = (TrackedPool(CpuTarget().table()) for _ in range(2))
    data = content(4 << 20)
    addresses = first.filled(data), second.filled(data)

    def other(done: int, in_all: int) -> None:
        second.sleep(SleepPlan())
        second.wake()

    first.sleep(SleepPlan(progress=other))
    assert not second.is_asleep(addresses[1])
    with pytest.raises(ForeignMemory):
        second.free(addresses[0])
    first.wake()
    assert first.read(addresses[0], len(data)) == second.read(addresses[1], len(data)) == data
    for pool in (first, second):
        pool.free_all()


def test_python_goes_on_during_a_long_sleep(cpu_pool: TrackedPool) -> None:
    """Fact 35: a heartbeat ticks while bytes move, of which there are more where few were moved before it could."""
    ticks: list[float] = []
    done = threading.Event()

    def beat() -> None:
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    def goes_on(call: Callable[[], object]) -> bool:
        before = len(ticks)
        call()
        return len(ticks) > before + 1

    with crew() as threads:
        threads.start(beat)
        try:
            for size in (4 << 20, 16 << 20, 64 << 20):
                addresses = [cpu_pool.allocate(size) for _ in range(4)]
                for address in addresses:
                    cpu_pool.write(address, content(1 << 20))
                during = {"sleep": goes_on(lambda: cpu_pool.sleep(SleepPlan())), "wake": goes_on(cpu_pool.wake)}
                if all(during.values()):
                    break
                for address in addresses:
                    cpu_pool.free(address)
        finally:
            done.set()
    assert during == {"sleep": True, "wake": True}


def test_a_call_from_a_fresh_thread_works(pool: TrackedPool) -> None:
    """Fact 32."""
    data = content(pool.unit)
    addresses: list[int] = []
    with crew() as threads:
        threads.start(lambda: addresses.append(pool.filled(data))).join()
        threads.start(lambda: pool.sleep(SleepPlan())).join()
        threads.start(pool.wake).join()
    assert pool.read(addresses[0], len(data)) == data
