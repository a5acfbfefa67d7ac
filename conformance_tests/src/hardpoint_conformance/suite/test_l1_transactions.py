"""Level 1: a sleep or wake in two phases, between which others decide whether it comes to pass."""

from __future__ import annotations

import gc
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest

from hardpoint.interfaces import MemoryReport, MemoryTransaction, Policy
from hardpoint.interfaces.errors import CapabilityRefused, InvalidTransaction, MemoryBusy
from hardpoint_conformance.clauses import clause, proves
from hardpoint_conformance.levels import Level
from hardpoint_conformance.memory import Block, Memory, PoolMemory, TensorMemory, content, differences

KINDS = ("sleep", "wake")
ENDINGS = ("commit", "rollback")


def filled(memory: Memory) -> dict[Block, bytes]:
    """Return memory of two tags with its bytes: several chunks' worth, and a small piece."""
    sizes = {"weights": (2 * memory.unit + 1, 700), "kv_cache": (memory.unit,)}
    return {
        memory.filled(content(size, seed), tag): content(size, seed)
        for tag, own in sizes.items()
        for seed, size in enumerate(own)
    }


def begun(memory: Memory, kind: str) -> MemoryTransaction:
    """Begin a sleep, or a wake of what sleeps."""
    if kind == "sleep":
        return memory.begin_sleep()
    memory.sleep()
    return memory.begin_wake()


def assert_bytes(memory: Memory, data: dict[Block, bytes]) -> None:
    """Wake what sleeps, and assert that everything has its bytes and is where it was."""
    memory.wake()
    assert memory.stats().asleep == frozenset()
    for block, expected in data.items():
        assert memory.read(block) == expected, block
        if block.tensor is not None:
            assert block.tensor.data_ptr() == block.address


def raised_in_thread(call: Callable[[], object]) -> BaseException | None:
    """Return what a call raises in a thread of its own, which must not wait."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the call waits for the transaction's end"
    return raised[0] if raised else None


@clause("alloc.transaction.commit@1", Level.MEMORY, capability="memory.sleep.1", facts="6.3 sleep across ranks")
def test_begun_and_committed_is_what_one_call_does(memory: Memory) -> None:
    """A sleep that is begun and committed, and a wake likewise, do what `sleep` and `wake` do: the reports count the same bytes, the
    books and addresses are the same, and every byte comes back."""

    def counts(report: MemoryReport) -> tuple[Any, ...]:
        return report.preserved, report.discarded, report.skipped, report.unmapped, report.retained, report.still_asleep

    data = filled(memory)
    before = memory.stats()
    slept, asleep, woken = memory.sleep(), memory.stats(), memory.wake()
    assert slept.unmapped > 0
    assert counts(memory.begin_sleep().commit()) == counts(slept)
    assert memory.stats() == asleep
    assert counts(memory.begin_wake().commit()) == counts(woken)
    assert memory.stats() == before
    assert_bytes(memory, data)


@clause("alloc.transaction.rollback@1", Level.MEMORY, capability="memory.sleep.1", facts="6.3 sleep across ranks")
@pytest.mark.parametrize("kind", KINDS)
def test_rolled_back_is_as_if_it_had_not_begun(memory: Memory, kind: str) -> None:
    """A sleep that is rolled back leaves everything awake, a wake everything asleep, each with all bytes, addresses and books as before
    it; nothing more is held of the driver, and the next sleep and wake succeed."""
    data = filled(memory)
    if kind == "wake":
        memory.sleep()
    before = memory.stats()
    held = memory.driver.held() if isinstance(memory, PoolMemory) else {}
    for _ in range(2):
        transaction = memory.begin_sleep() if kind == "sleep" else memory.begin_wake()
        transaction.rollback()
        assert memory.stats() == before
        if isinstance(memory, PoolMemory):
            assert differences(held, memory.driver.held(), ["registered", "streams"]) == {}
    for block, expected in data.items():
        assert (memory.read(block) if kind == "sleep" else memory.read_backup(block)) == expected
    assert_bytes(memory, data)
    memory.sleep()
    assert_bytes(memory, data)


@clause("alloc.transaction.once@1", Level.MEMORY, capability="memory.sleep.1", facts="6.3 sleep across ranks")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_transaction_ends_once(memory: Memory, kind: str, ending: str) -> None:
    """A transaction that was committed or rolled back can be neither again: InvalidTransaction, and nothing changes."""
    data = filled(memory)
    transaction = begun(memory, kind)
    getattr(transaction, ending)()
    after = memory.stats()
    assert bool(after.asleep) is ((kind == "sleep") is (ending == "commit"))
    for again in (transaction.commit, transaction.rollback):
        with pytest.raises(InvalidTransaction):
            again()
    assert memory.stats() == after
    assert_bytes(memory, data)


@clause("alloc.transaction.busy@1", Level.MEMORY, capability="memory.sleep.1", facts="6.3 sleep across ranks")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_else_changes_memory_meanwhile(memory: Memory, kind: str, ending: str) -> None:
    """While a transaction is open every other sleep or wake, in one phase or two, and `discard_backup` raise MemoryBusy at once, in
    this thread and in others, and the transaction can still end either way."""
    data = filled(memory)
    transaction = begun(memory, kind)
    calls: list[Callable[[], object]] = [
        memory.sleep,
        memory.wake,
        memory.begin_sleep,
        memory.begin_wake,
        lambda: memory.discard_backup("weights"),
    ]
    for call in calls:
        with pytest.raises(MemoryBusy):
            call()
        assert isinstance(raised_in_thread(call), MemoryBusy)
    getattr(transaction, ending)()
    assert bool(memory.stats().asleep) is ((kind == "sleep") is (ending == "commit"))
    assert_bytes(memory, data)


@clause("alloc.transaction.free@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 14")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_memory_can_be_freed_meanwhile(memory: Memory, kind: str, ending: str) -> None:
    """Memory that is freed while a transaction is open leaves the books at once and the device when that ends, either way; memory that
    is taken meanwhile is awake. The rest keeps its bytes."""
    data = filled(memory)
    transaction = begun(memory, kind)
    freed = next(iter(data))
    allocated = memory.stats().allocated
    del data[freed]
    memory.free(freed)
    assert memory.stats().allocated == allocated - freed.size
    added = memory.filled(content(1000, 8), "kv_cache")
    assert memory.read(added) == content(1000, 8)
    data[added] = content(1000, 8)
    getattr(transaction, ending)()
    assert_bytes(memory, data)
    if isinstance(memory, PoolMemory):
        assert memory.driver.held()["bytes"] == memory.mapped()


@clause("alloc.transaction.dropped@1", Level.MEMORY, capability="memory.sleep.1", facts="6.3 sleep across ranks")
@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_transaction_is_rolled_back(memory: Memory, kind: str) -> None:
    """A transaction of which nothing is left is rolled back, and others can begin."""
    data = filled(memory)
    transaction = begun(memory, kind)
    del transaction
    gc.collect()
    assert bool(memory.stats().asleep) is (kind == "wake")
    assert_bytes(memory, data)
    memory.begin_sleep().commit()
    assert_bytes(memory, data)


@clause("alloc.transaction.retained@1", Level.MEMORY, capability="memory.sleep.1", facts="allocator fact 18")
@pytest.mark.parametrize("policy", [Policy.PRESERVE, pytest.param(Policy.DISCARD, marks=proves("memory.sleep.2"))])
def test_a_commit_does_not_fail(pool_memory: PoolMemory, policy: Policy) -> None:
    """Where the driver takes no memory back any more a commit succeeds all the same and says how much it retained; the books count that
    as unreturned, wake restores every byte, and a later operation gives it back."""
    data = content(2 * pool_memory.unit)
    block = pool_memory.filled(data)
    scratch = pool_memory.filled(data, "scratch", policy)
    mapped = pool_memory.mapped()
    transaction = pool_memory.begin_sleep()
    pool_memory.driver.fail("release", times=-1)
    report = transaction.commit()
    assert (report.retained, report.unmapped) == (mapped, 0)
    assert pool_memory.pool.books().unreturned == mapped
    assert pool_memory.stats().asleep == {"weights", "scratch"}
    assert pool_memory.driver.disarm(), "the call that was to fail was never made"
    pool_memory.wake()
    assert pool_memory.pool.books().unreturned == 0
    assert pool_memory.driver.held()["bytes"] == pool_memory.mapped() == mapped
    assert pool_memory.read(block) == data
    if policy is not Policy.DISCARD:
        assert pool_memory.read(scratch) == data


@clause("alloc.transaction.refused@1", Level.MEMORY, capability="memory.sleep.1", refusal=True)
def test_unclaimed_transactions_are_refused(tensor_memory: TensorMemory) -> None:
    """Where level 1 is not claimed, a sleep cannot be begun either: CapabilityRefused with reasons, and everything stays awake."""
    block = tensor_memory.filled(content(1000))
    with pytest.raises(CapabilityRefused) as caught:
        tensor_memory.begin_sleep()
    assert caught.value.reasons, "refused without a reason"
    assert tensor_memory.stats().asleep == frozenset()
    assert tensor_memory.read(block) == content(1000)
