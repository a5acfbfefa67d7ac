"""Level 4: a worker's sleep and wake in two phases, as they are made over several ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hardpoint.interfaces import KV_CACHE, WEIGHTS, SleepPlan, SleepTier, WakePlan, WeightWrite
from hardpoint.interfaces.errors import InvalidTransaction, MemoryAsleep, MemoryBusy, UnknownTag
from hardpoint_conformance.clauses import clause
from hardpoint_conformance.levels import Level
from hardpoint_conformance.memory import files_below, wait_until
from hardpoint_conformance.plugin import Quality
from hardpoint_conformance.target import Target
from hardpoint_conformance.tiny_model import Model, shape_for, tiny_model
from hardpoint_conformance.worker_bench import (
    Served,
    WorkerBench,
    check_tokens,
    level_plan,
    running,
    sleep,
    wake,
    watched,
)

PROMPT = (9, 41, 7, 130, 22, 22, 5, 88, 201, 64, 3, 17, 90, 12, 250, 31, 6, 77)


@pytest.fixture
def model(target: Target) -> Model:
    """A tiny model that the claims cover."""
    return tiny_model(shape_for(target.claims))


@pytest.fixture
def bench(target: Target, model: Model) -> Iterator[WorkerBench]:
    """A worker that is ready."""
    with running(target, model) as bench:
        yield bench


def serving(bench: WorkerBench) -> Served:
    """Return a sequence in the middle of its tokens."""
    sequence = bench.begin(PROMPT, 2)
    bench.run([sequence], 3)
    return sequence


def goes_on(bench: WorkerBench, model: Model, sequence: Served, quality: Quality) -> None:
    """Check that a sequence is served on with the oracle's tokens."""
    bench.run([sequence], len(sequence.generated) + 4)
    check_tokens(model, [sequence], bench.info.dtype, quality)


def plan_of(target: Target, sequence: Served) -> SleepPlan:
    """Return a plan that preserves the weights and the sequence's blocks."""
    return level_plan(1, target.tier, live_blocks=tuple(sequence.blocks))


@clause("worker.transaction.commit@1", Level.WORKER, capability="memory.sleep.1", facts="6.3 sleep across ranks")
def test_sleep_and_wake_in_two_phases(target: Target, bench: WorkerBench, model: Model, quality: Quality) -> None:
    """A sleep that is begun and committed is a sleep, and a wake likewise: the reports agree with the books, nothing runs in between,
    and running sequences go on from their preserved blocks with the same tokens."""
    sequence = serving(bench)
    worker = bench.worker
    before = worker.status().memory
    worker.begin(1, plan_of(target, sequence))
    slept = worker.commit(1)
    during = worker.status().memory
    assert during.asleep >= {WEIGHTS, KV_CACHE}
    assert slept.still_asleep == during.asleep
    gone = sum(before.tags[tag].mapped - during.tags[tag].mapped for tag in before.tags)
    assert slept.unmapped == gone > 0
    with pytest.raises(MemoryAsleep):
        bench.step()
    worker.begin(2, WakePlan())
    woken = worker.commit(2)
    assert (woken.unmapped, woken.still_asleep) == (gone, frozenset())
    assert worker.status().memory.asleep == frozenset()
    goes_on(bench, model, sequence, quality)


@clause("worker.transaction.rollback@1", Level.WORKER, capability="memory.sleep.1", facts="6.3 sleep across ranks")
def test_rolled_back_phases_keep_the_tokens(target: Target, bench: WorkerBench, model: Model, quality: Quality) -> None:
    """After a sleep that was rolled back the worker serves on with the same tokens, from the KV blocks that it had; after a wake that
    was rolled back it is asleep, and the next wake brings everything back."""
    sequence = serving(bench)
    worker = bench.worker
    worker.begin(1, level_plan(1, target.tier))
    worker.rollback(1)
    assert worker.status().memory.asleep == frozenset()
    goes_on(bench, model, sequence, quality)
    sleep(worker, plan_of(target, sequence), 2)
    asleep = worker.status().memory
    worker.begin(3, WakePlan())
    worker.rollback(3)
    assert worker.status().memory == asleep
    with pytest.raises(MemoryAsleep):
        bench.step()
    wake(worker)
    goes_on(bench, model, sequence, quality)


@clause("worker.transaction.numbers@1", Level.WORKER, capability="memory.sleep.1", facts="6.3 sleep across ranks")
def test_wrong_numbers_change_nothing(target: Target, bench: WorkerBench, model: Model, quality: Quality) -> None:
    """A number that is not positive, was used before, or is not above all earlier ones begins nothing; one that is not the open
    transaction's ends nothing. Each is InvalidTransaction and changes nothing."""
    sequence = serving(bench)
    worker = bench.worker
    plan = plan_of(target, sequence)

    def refused(*calls: Callable[[], object]) -> None:
        books = worker.status().memory
        for call in calls:
            with pytest.raises(InvalidTransaction):
                call()
        assert worker.status().memory == books

    refused(lambda: worker.begin(0, plan), lambda: worker.begin(-1, WakePlan()), lambda: worker.commit(1))
    worker.begin(5, plan)
    for number in (0, 4, 6):
        refused(lambda at=number: worker.commit(at), lambda at=number: worker.rollback(at))  # type: ignore[misc]
    refused(lambda: worker.begin(5, plan), lambda: worker.begin(4, WakePlan()))
    worker.commit(5)
    refused(lambda: worker.commit(5), lambda: worker.rollback(5), lambda: worker.begin(5, WakePlan()))
    worker.begin(6, WakePlan())
    worker.commit(6)
    with pytest.raises(UnknownTag):
        worker.begin(7, WakePlan(frozenset({"nobody"})))
    refused(lambda: worker.commit(7), lambda: worker.rollback(7), lambda: worker.begin(7, WakePlan()))
    goes_on(bench, model, sequence, quality)


@clause("worker.transaction.open@1", Level.WORKER, capability="memory.sleep.1", facts="6.3 sleep across ranks")
@pytest.mark.parametrize("kind", ["sleep", "wake"])
def test_nothing_runs_while_one_is_open(
    target: Target, bench: WorkerBench, model: Model, kind: str, quality: Quality
) -> None:
    """While a transaction is open a step, every way to write weights, and every other sleep or wake raise MemoryBusy; the worker can
    then still commit, and serves again once it is awake."""
    sequence = serving(bench)
    worker = bench.worker
    plan = plan_of(target, sequence)
    if kind == "wake":
        sleep(worker, plan, 1)
    worker.begin(2, WakePlan() if kind == "wake" else plan)
    calls: list[Callable[[], object]] = [
        bench.step,
        lambda: worker.write_weights(
            WeightWrite.UPDATE, [(name, tensor.clone()) for name, tensor in model.weights.items()]
        ),
        lambda: worker.write_weights(WeightWrite.RELOAD),
        lambda: worker.write_weights(WeightWrite.DECLARE),
        lambda: worker.begin(3, plan),
        lambda: worker.begin(3, WakePlan()),
    ]
    for call in calls:
        with pytest.raises(MemoryBusy):
            call()
    worker.commit(2)
    assert bool(worker.status().memory.asleep) is (kind == "sleep")
    wake(worker)
    goes_on(bench, model, sequence, quality)


@clause("worker.transaction.missing@1", Level.WORKER, capability="memory.sleep.2", facts="allocator fact 43")
def test_weights_are_missing_from_the_commit_on(
    target: Target, bench: WorkerBench, model: Model, quality: Quality
) -> None:
    """A sleep that discards the weights makes them missing when it is committed: not when it is begun, and not when it is rolled back."""
    sequence = serving(bench)
    worker = bench.worker
    worker.begin(1, level_plan(2, target.tier))
    worker.rollback(1)
    assert worker.status().missing_weights == frozenset()
    goes_on(bench, model, sequence, quality)
    worker.begin(2, level_plan(2, target.tier))
    assert worker.status().missing_weights == frozenset()
    worker.commit(2)
    assert worker.status().missing_weights == set(model.weights)
    wake(worker)
    worker.write_weights(WeightWrite.RELOAD)
    bench.forget_kv()
    goes_on(bench, model, sequence, quality)


@clause("worker.transaction.shutdown@1", Level.WORKER, capability="memory.sleep.1", facts="6.3 sleep across ranks")
@pytest.mark.parametrize("kind", ["sleep", "wake"])
def test_shutdown_ends_an_open_one(target: Target, model: Model, kind: str, tmp_path: Path) -> None:
    """A worker that is shut down with a transaction open gives everything back: memory, and a backup on disk."""
    parts = watched(target)
    tier = SleepTier.DISK if SleepTier.DISK in target.claims.memory.tiers else target.tier
    plan = level_plan(1, tier, str(tmp_path))

    def on_disk() -> bool:
        return max(files_below(tmp_path).values(), default=0) >= weights

    with running(parts.target, model) as bench:
        weights = bench.worker.status().memory.tags[WEIGHTS].allocated
        if kind == "wake":
            sleep(bench.worker, plan, 1)
        bench.worker.begin(2, WakePlan() if kind == "wake" else plan)
        assert on_disk() is (tier is SleepTier.DISK)
    gc.collect()
    (allocator,) = parts.allocators
    stats = allocator.stats()
    assert stats.allocated == 0, "bytes are still handed out"
    assert sum(tag.mapped for tag in stats.tags.values()) == 0, "memory is still mapped"
    assert wait_until(lambda: not on_disk()), "a backup is still on disk"
