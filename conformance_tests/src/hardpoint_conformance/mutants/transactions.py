"""Faults of sleep and wake in two phases: of the allocator's transactions, of the engine's below them, and of the worker's."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces import (
    Capabilities,
    Device,
    DType,
    MemoryCapabilities,
    MemoryChange,
    MemoryReport,
    MemoryTransaction,
    Policy,
    SleepPlan,
    SleepTier,
    TorchPoolScope,
)
from hardpoint.interfaces.errors import (
    DriverError,
    ForeignMemory,
    InvalidTransaction,
    MemoryAsleep,
    MemoryBusy,
    MemoryFault,
)
from hardpoint.memory import ALL_CLAIMS, DriverTable, PoolBooks, TensorAllocator, VirtualPool
from hardpoint_conformance.mutants import Mutant
from hardpoint_conformance.mutants.derived import Faults, Methods, derived
from hardpoint_conformance.mutants.worker import forgetting_blocks, other_sleep
from hardpoint_conformance.target import Target

if TYPE_CHECKING:
    from torch import Tensor

_ALLOCATOR_FAULTS, _WORKER_FAULTS = Faults("allocator"), Faults("worker")
_ENGINE_FAULTS: list[Mutant] = []
allocator_fault, worker_fault = _ALLOCATOR_FAULTS.fault, _WORKER_FAULTS.fault

_SLEEPING = ("prepare_sleep", "begin_sleep", "begin_wake", "sleep", "wake", "discard_backup", "read_backup")
"""Methods of an allocator that never sleeps refuse these."""


class _Altered(MemoryTransaction):
    """A transaction with other ends."""

    def __init__(self, commit: Callable[[], MemoryReport], rollback: Callable[[], None]) -> None:
        self._commit, self._rollback = commit, rollback

    def commit(self) -> MemoryReport:
        return self._commit()

    def rollback(self) -> None:
        self._rollback()


def _altered(base: Any, change: Callable[[Any, MemoryTransaction], MemoryTransaction]) -> Methods:
    """Hand out other transactions than those that were begun; `change` is given the allocator and the right one."""

    def begin_sleep(self: Any, plan: SleepPlan) -> MemoryTransaction:
        return change(self, base.begin_sleep(self, plan))

    def begin_wake(self: Any, tags: Sequence[str] | None = None) -> MemoryTransaction:
        return change(self, base.begin_wake(self, tags))

    return {"begin_sleep": begin_sleep, "begin_wake": begin_wake}


# Allocators


@allocator_fault("A rollback makes it so.", "alloc.transaction.rollback@1")
def rollback_commits(base: Any) -> Methods:
    def altered(_: Any, right: MemoryTransaction) -> MemoryTransaction:
        def rollback() -> None:
            right.commit()

        return _Altered(right.commit, rollback)

    return _altered(base, altered)


@allocator_fault("A commit reports, and changes nothing.", "alloc.transaction.commit@1")
def commit_rolls_back(base: Any) -> Methods:
    def commit(right: MemoryTransaction) -> MemoryReport:
        right.rollback()
        return MemoryReport(preserved=0, discarded=0, skipped=0, seconds={"total": 0.0}, free_before=0, free_after=0)

    return _altered(base, lambda _, right: _Altered(lambda: commit(right), right.rollback))


@allocator_fault("A transaction that has ended ends again without a word.", "alloc.transaction.once@1")
def ends_twice(base: Any) -> Methods:
    def ended(right: MemoryTransaction) -> MemoryTransaction:
        reports: list[MemoryReport] = []

        def commit() -> MemoryReport:
            with suppress(InvalidTransaction):
                reports.append(right.commit())
            return reports[-1]

        def rollback() -> None:
            with suppress(InvalidTransaction):
                right.rollback()

        return _Altered(commit, rollback)

    return _altered(base, lambda _, right: ended(right))


@allocator_fault(
    "Nothing is prepared: a commit does all of the sleep or wake, so that others are not kept out before.",
    "alloc.transaction.busy@1",
)
def prepares_nothing(base: Any) -> Methods:
    def begin_sleep(self: Any, plan: SleepPlan) -> MemoryTransaction:
        return _Altered(lambda: base.sleep(self, plan), lambda: None)

    def begin_wake(self: Any, tags: Sequence[str] | None = None) -> MemoryTransaction:
        return _Altered(lambda: base.wake(self, tags), lambda: None)

    return {"begin_sleep": begin_sleep, "begin_wake": begin_wake}


@allocator_fault("A transaction that is dropped stays open.", "alloc.transaction.dropped@1")
def dropped_stays_open(base: Any) -> Methods:
    def kept(self: Any, right: MemoryTransaction) -> MemoryTransaction:
        vars(self).setdefault("_begun", []).append(right)
        return right

    return _altered(base, kept)


@allocator_fault("While a transaction is open no memory is handed out.", "alloc.transaction.free@1")
def open_refuses_memory(base: Any) -> Methods:
    def counted(self: Any, right: MemoryTransaction) -> MemoryTransaction:
        vars(self)["_open"] = True

        def commit() -> MemoryReport:
            vars(self)["_open"] = False
            return right.commit()

        def rollback() -> None:
            vars(self)["_open"] = False
            right.rollback()

        return _Altered(commit, rollback)

    def empty(
        self: Any,
        shape: Sequence[int],
        dtype: DType,
        tag: str = "default",
        policy: Policy = Policy.PRESERVE,
        max_rows: int | None = None,
    ) -> Tensor:
        if vars(self).get("_open"):
            raise MemoryBusy("a transaction is open")
        tensor: Tensor = base.empty(self, shape, dtype, tag, policy, max_rows)
        return tensor

    return {**_altered(base, counted), "empty": empty}


# Memory that claims no sleep


def _without_sleep(target: Target, *names: str) -> Target:
    """Return a target that claims no sleep; `names` are the allocator's methods that do it all the same, the others refuse it."""

    def capabilities(device: Device) -> Capabilities:
        claims = target.descriptor.capabilities(device)
        return replace(claims, memory=replace(claims.memory, sleep_levels=frozenset(), tiers=frozenset()))

    @cache
    def allocator() -> Any:
        refusing = {name: getattr(TensorAllocator, name) for name in _SLEEPING if name not in names}
        claimed = capabilities(target.device).memory
        return derived(target.descriptor.allocator(), {**refusing, "capabilities": lambda self: claimed})

    return target.with_descriptor(capabilities=capabilities, allocator=allocator)


@_ALLOCATOR_FAULTS.target_fault(
    "No fault: the memory never sleeps, says so, and refuses it.",
    "alloc.transaction.refused@1",
    "alloc.sleep.refused@1",
    "alloc.discard.refused@1",
    "alloc.tier.host-refused@1",
    "alloc.tier.disk-refused@1",
    "alloc.tier.source-refused@1",
    "worker.sleep.level-refused@1",
    "worker.sleep.tier-refused@1",
    harmless=True,
)
def memory_that_never_sleeps(target: Target) -> Target:
    return _without_sleep(target)


@_ALLOCATOR_FAULTS.target_fault(
    "A sleep that is not claimed can be begun.",
    "alloc.transaction.refused@1",
    "worker.sleep.level-refused@1",
    "worker.sleep.tier-refused@1",
)
def unclaimed_sleep_begins(target: Target) -> Target:
    return _without_sleep(target, "begin_sleep")


@_ALLOCATOR_FAULTS.target_fault(
    "A sleep that is not claimed is done, to any tier.",
    "alloc.sleep.refused@1",
    "alloc.discard.refused@1",
    "alloc.tier.host-refused@1",
    "alloc.tier.disk-refused@1",
    "alloc.tier.source-refused@1",
)
def unclaimed_sleep_done(target: Target) -> Target:
    return _without_sleep(target, "sleep")


def _claiming_less(target: Target, **claims: Any) -> Target:
    """Return a target that claims less about its memory, and whose allocator does all the same."""

    def capabilities(device: Device) -> Capabilities:
        honest = target.descriptor.capabilities(device)
        return replace(honest, memory=replace(honest.memory, **claims))

    return target.with_descriptor(capabilities=capabilities)


@_ALLOCATOR_FAULTS.target_fault("Elastic memory that is not claimed is handed out.", "alloc.elastic.refused@1")
def unclaimed_elastic_made(target: Target) -> Target:
    return _claiming_less(target, elastic=False)


@_ALLOCATOR_FAULTS.target_fault("A torch pool that is not claimed can be entered.", "alloc.torch-pool.refused@1")
def unclaimed_pool_entered(target: Target) -> Target:
    return _claiming_less(target, torch_pool=TorchPoolScope.NONE)


# Engines: what makes memory of a driver, and must hold when the driver does not


def engine_fault(sentence: str, *killed_by: str) -> Callable[[type[VirtualPool]], type[VirtualPool]]:
    """Declare a fault by an engine that has it; the mutant's name is the class's, in lower case."""

    def declare(engine: type[VirtualPool]) -> type[VirtualPool]:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", engine.__name__).lower()
        _ENGINE_FAULTS.append(Mutant(name, sentence, killed_by, lambda target: replace(target, engine=engine)))
        return engine

    return declare


class _OtherCommit(VirtualPool):
    """An engine whose sleeps in two phases end otherwise."""

    def ended(self, report: MemoryReport) -> MemoryReport:
        """Return what a commit reports, or raise, given the right report."""
        raise NotImplementedError

    def begin_sleep(self, plan: SleepPlan) -> MemoryTransaction:
        right = super().begin_sleep(plan)
        return _Altered(lambda: self.ended(right.commit()), right.rollback)


@engine_fault("A commit does not say what the driver did not take back.", "alloc.transaction.retained@1")
class RetainedMemoryHidden(_OtherCommit):
    def ended(self, report: MemoryReport) -> MemoryReport:
        return replace(report, retained=0, unmapped=report.unmapped + report.retained)


@engine_fault("A commit fails where the driver takes no memory back.", "alloc.transaction.retained@1")
class CommitFailsWithTheDriver(_OtherCommit):
    def ended(self, report: MemoryReport) -> MemoryReport:
        if report.retained:
            raise DriverError("release", -1, "the memory is not taken back")
        return report


@engine_fault("What the driver did not take back is forgotten.", "alloc.transaction.retained@1")
class RetainedMemoryForgotten(VirtualPool):
    def books(self) -> PoolBooks:
        return replace(super().books(), unreturned=0)


@engine_fault("A wake goes tag by tag, and stays where it failed.", "alloc.fault.wake-oom@1")
class WakeStopsHalfWay(VirtualPool):
    def wake(
        self, tags: Sequence[str] | None = None, progress: Callable[[int, int], None] | None = None
    ) -> MemoryReport:
        for tag in sorted(self.stats().asleep if tags is None else tags)[:-1]:
            super().wake([tag], progress)
        return super().wake(tags, progress)


@engine_fault("What the driver says of a failure is an error of no type.", "alloc.fault.allocate@1")
class DriverErrorsUntyped(VirtualPool):
    def allocate(
        self,
        size: int,
        tag: str = "default",
        policy: Policy = Policy.PRESERVE,
        capacity: int = 0,
        *,
        shared: bool = False,
    ) -> int:
        try:
            return super().allocate(size, tag, policy, capacity, shared=shared)
        except DriverError as error:
            raise RuntimeError(str(error)) from error


@engine_fault("Sleeping memory is read as zeros.", "alloc.state.asleep-is-guarded@1", "stress.memory.asleep-faults@1")
class SleepingMemoryIsZero(VirtualPool):
    def read(self, address: int, size: int) -> bytes:
        try:
            return super().read(address, size)
        except MemoryAsleep:
            return bytes(size)


@engine_fault("Every allocation is one unit larger than it is.", "alloc.sizes.rounded@1")
class OneUnitMore(VirtualPool):
    def allocate(
        self,
        size: int,
        tag: str = "default",
        policy: Policy = Policy.PRESERVE,
        capacity: int = 0,
        *,
        shared: bool = False,
    ) -> int:
        return super().allocate(size + self.driver.geometry().granularity, tag, policy, capacity, shared=shared)


@engine_fault("What cannot be freed is left without an error.", "alloc.free.once@1")
class FreeingErrorsLost(VirtualPool):
    def free(self, address: int) -> None:
        with suppress(ForeignMemory):
            super().free(address)


@engine_fault("A wake that fails drops the backups.", "alloc.fault.dead-driver@1")
class EngineDropsBackups(VirtualPool):
    def wake(
        self, tags: Sequence[str] | None = None, progress: Callable[[int, int], None] | None = None
    ) -> MemoryReport:
        try:
            return super().wake(tags, progress)
        except MemoryFault:
            self.discard_backup(sorted(self.stats().asleep))
            raise


@engine_fault("What was freed and taken back late stays in the books.", "alloc.fault.free@1")
class ReturnedLateNotNoted(VirtualPool):
    most = 0

    def books(self) -> PoolBooks:
        found = super().books()
        self.most = max(self.most, found.unreturned, self.driver.geometry().granularity)
        return replace(found, unreturned=self.most)


@engine_fault("The end of the process is told to the user.", "stress.memory.exit@1")
class ExitTold(VirtualPool):
    def __init__(self, driver: DriverTable, claims: MemoryCapabilities = ALL_CLAIMS) -> None:
        super().__init__(driver, claims)
        atexit.register(os.write, 2, b"memory was left\n")


@engine_fault("A backup on disk has a copy, which nobody removes.", "stress.memory.exit-files@1")
class CopyOfBackupLeft(VirtualPool):
    def sleep(self, plan: SleepPlan) -> MemoryReport:
        report = super().sleep(plan)
        if plan.tier is SleepTier.DISK and plan.disk_directory is not None:
            (Path(plan.disk_directory) / "copy").write_bytes(bytes(8192))
        return report


# Workers


@worker_fault("A prepared sleep forgets the live KV blocks.", "worker.transaction.commit@1")
def begun_sleep_forgets_blocks(base: Any) -> Methods:
    return other_sleep(base, forgetting_blocks)


@worker_fault("A worker's rollback makes it so.", "worker.transaction.rollback@1")
def worker_rollback_commits(base: Any) -> Methods:
    def rollback(self: Any, transaction: int) -> None:
        base.commit(self, transaction)

    return {"rollback": rollback}


@worker_fault("Whatever number is given, the open transaction is committed.", "worker.transaction.numbers@1")
def any_number_commits(base: Any) -> Methods:
    def begin(self: Any, transaction: int, change: MemoryChange) -> None:
        base.begin(self, transaction, change)
        vars(self)["_number"] = transaction

    def commit(self: Any, transaction: int) -> MemoryReport:
        report: MemoryReport = base.commit(self, vars(self).pop("_number", transaction))
        return report

    return {"begin": begin, "commit": commit}


@worker_fault("A number that was used begins another transaction.", "worker.transaction.numbers@1")
def numbers_used_again(base: Any) -> Methods:
    def begin(self: Any, transaction: int, change: MemoryChange) -> None:
        try:
            base.begin(self, transaction, change)
        except InvalidTransaction:
            self._transactions._last = transaction - 1
            base.begin(self, transaction, change)

    return {"begin": begin}


@worker_fault("Steps and writes go on while a transaction is open.", "worker.transaction.open@1")
def open_does_not_refuse(base: Any) -> Methods:
    def begin(self: Any, transaction: int, change: MemoryChange) -> None:
        vars(self)["_asked"] = transaction, change

    def commit(self: Any, transaction: int) -> MemoryReport:
        asked = vars(self).pop("_asked", None)
        if asked is not None:
            base.begin(self, *asked)
        report: MemoryReport = base.commit(self, transaction)
        return report

    def rollback(self: Any, transaction: int) -> None:
        if vars(self).pop("_asked", None) is None:
            base.rollback(self, transaction)

    return {"begin": begin, "commit": commit, "rollback": rollback}


@worker_fault(
    "Weights that a sleep is to discard are missing also when it is rolled back.", "worker.transaction.missing@1"
)
def rolled_back_weights_missing(base: Any) -> Methods:
    def rollback(self: Any, transaction: int) -> None:
        base.rollback(self, transaction)
        self._loaded.weights.ledger.discard_all()

    return {"rollback": rollback}


@worker_fault("A shutdown leaves an open transaction open.", "worker.transaction.shutdown@1")
def shutdown_leaves_it_open(base: Any) -> Methods:
    def shutdown(self: Any) -> None:
        transactions = self._transactions
        left, transactions._open = transactions._open, None
        vars(self).setdefault("_left_open", left)
        base.shutdown(self)

    return {"shutdown": shutdown}


MUTANTS = [*_ALLOCATOR_FAULTS.mutants, *_ENGINE_FAULTS, *_WORKER_FAULTS.mutants]
