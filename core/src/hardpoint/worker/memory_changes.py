"""The sleeps and wakes of a rank's memory, and the transaction by which each is prepared and ends."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces.allocator import (
    KV_CACHE,
    WEIGHTS,
    DeviceAllocator,
    MemoryChange,
    MemoryReport,
    MemoryStats,
    MemoryTransaction,
    Policy,
    SleepPlan,
)
from hardpoint.interfaces.capabilities import SleepTier
from hardpoint.interfaces.errors import (
    HardpointError,
    InvalidTransaction,
    MemoryAsleep,
    MemoryBusy,
)
from hardpoint.worker.communicators import Communicators
from hardpoint.worker.kv_memory import KVMemory
from hardpoint.worker.weights import KEPT, Weights

if TYPE_CHECKING:
    from hardpoint.worker.draft_model import DraftModel


_log = logging.getLogger("hardpoint")


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class PreparedChange:
    """A transaction of an allocator, and what a worker has to note of it. An interrupt may come between any two of these.

    Attributes:
        memory: the allocator's.
        before_commit: notes what the commit loses: what is lost and not noted would be served. What it raises rolls the change back.
        after_commit: does what is left to do.
        on_end: called last, whichever way it ended and also when that failed.
    """

    memory: MemoryTransaction
    before_commit: Callable[[], None] = _nothing
    after_commit: Callable[[], None] = _nothing
    on_end: Callable[[], None] = _nothing


class Transactions:
    """The transaction that a worker may have open; its number comes from whoever drives all ranks.

    Attributes:
        open: what was prepared for the number that was taken last; None when it has ended, or was not prepared.
    """

    def __init__(self) -> None:
        self._last = 0
        self.open: PreparedChange | None = None

    def take(self, number: int) -> None:
        """Take a number, for which a change can be prepared and be `open` then; it is used up whatever becomes of that.

        Raises InvalidTransaction for a number that is not above all before, MemoryBusy while one is open; nothing was done.
        """
        if number <= self._last:
            raise InvalidTransaction(
                f"the transaction {number} cannot begin",
                found=f"its number is not above {self._last}, the latest",
                hint="Numbers begin at 1 and grow",
            )
        self.check_none("begin another transaction")
        self._last = number

    def commit(self, number: int) -> MemoryReport:
        """Commit the open transaction; raises InvalidTransaction for another number."""
        change = self._open(number, "committed")
        with self._ending(change):
            try:
                change.before_commit()
            except Exception:
                change.memory.rollback()
                raise
            report = change.memory.commit()
            change.after_commit()
        return report

    def rollback(self, number: int) -> None:
        """Roll the open transaction back; raises InvalidTransaction for another number."""
        change = self._open(number, "rolled back")
        with self._ending(change):
            change.memory.rollback()

    def check_none(self, what: str) -> None:
        """Raise MemoryBusy while a transaction is open; `what` cannot be done then."""
        if self.open is not None:
            raise MemoryBusy(
                f"cannot {what}",
                found=f"the transaction {self._last} over the ranks' memory is open",
                hint="Commit it or roll it back first",
            )

    def abandon(self) -> None:
        """Roll back what is open, if anything, for a worker that ends."""
        if self.open is None:
            return
        try:
            self.rollback(self._last)
        except HardpointError as error:
            _log.warning("the transaction %d was open at shutdown and could not be rolled back: %s", self._last, error)

    def _open(self, number: int, how: str) -> PreparedChange:
        if self.open is None or number != self._last:
            raise InvalidTransaction(
                f"the transaction {number} cannot be {how}",
                found="none is open" if self.open is None else f"the open one is {self._last}",
                hint="Nothing was done",
            )
        return self.open

    @contextmanager
    def _ending(self, change: PreparedChange) -> Iterator[None]:
        """End the open transaction. One whose end was interrupted stays open: ending it again is right whether it had ended or not."""
        try:
            yield
        except Exception:
            self.open = None
            raise
        finally:
            change.on_end()
        self.open = None


class SleepCycle:
    """Prepares sleeps and wakes of a rank's memory, and knows what is asleep."""

    def __init__(
        self,
        allocator: DeviceAllocator,
        weights: Weights,
        kv: KVMemory,
        communicators: Communicators,
        synchronize: Callable[[], None],
        draft: DraftModel | None = None,
    ) -> None:
        self._allocator, self._weights, self._kv, self._draft = allocator, weights, kv, draft
        self._communicators = communicators
        self._synchronize = synchronize
        self._asleep: frozenset[str] | None = None

    def prepare(self, change: MemoryChange) -> PreparedChange:
        """Return a sleep or wake that is ready to commit; raises what the allocator raises, and CapabilityRefused without a source."""
        begun: MemoryTransaction | None = None
        try:
            if not isinstance(change, SleepPlan):
                with torch.no_grad():
                    begun = self._allocator.begin_wake(None if change.tags is None else sorted(change.tags))
                self._communicators.check_room()
                # Communicators resume at the commit, to which all ranks come together: their libraries wait for one another.
                return PreparedChange(begun, self._communicators.resume, on_end=self.forget_asleep)
            self._synchronize()
            before = self._allocator.stats()
            plan = self._completed(change)
            if plan.tier is SleepTier.SOURCE and _preserves(plan, WEIGHTS) and WEIGHTS not in before.asleep:
                self._weights.check_sourced(before)
            begun = self._allocator.begin_sleep(plan)
            return self._noting(plan, before, begun)
        except BaseException as error:
            # After an interrupt, this frame and others may hold a transaction that was begun: dropped, it is rolled back.
            begun = None
            traceback.clear_frames(error.__traceback__)
            self.forget_asleep()
            raise

    def _noting(self, plan: SleepPlan, before: MemoryStats, begun: MemoryTransaction) -> PreparedChange:
        """Return a sleep that was begun with what is to be noted of it."""
        obsolete = [tag for tag in sorted(before.asleep) if _discards(plan, tag) and _is_restorable(before, tag)]

        def note_losses() -> None:
            self._asleep = before.asleep | (before.tags.keys() if plan.tags is None else plan.tags)
            if _discards(plan, WEIGHTS):
                self._weights.ledger.discard_all()
                if self._draft is not None:
                    self._draft.weights.ledger.discard_all()
            self._communicators.suspend()

        def drop_backups() -> None:
            if obsolete:
                self._allocator.discard_backup(obsolete)

        return PreparedChange(begun, note_losses, drop_backups, self.forget_asleep)

    def check_awake(self) -> None:
        """Raise MemoryAsleep while anything is asleep."""
        asleep = self._asleep if self._asleep is not None else self._look_up()
        if asleep:
            raise MemoryAsleep(
                "a step needs memory that is asleep", found=", ".join(sorted(asleep)), hint="Wake it first"
            )

    def check_weights_awake(self) -> None:
        """Raise MemoryAsleep while the weights are asleep."""
        if WEIGHTS in self._look_up():
            raise MemoryAsleep("the weights are asleep and cannot be written", hint="Wake the tag 'weights' first")

    def forget_asleep(self) -> None:
        """Look up in the allocator's books what is asleep before it is needed again."""
        self._asleep = None

    def _look_up(self) -> frozenset[str]:
        self._asleep = self._allocator.stats().asleep
        return self._asleep

    def _completed(self, plan: SleepPlan) -> SleepPlan:
        """Return the plan with what only the worker knows: bytes of live KV blocks, and whose writers are all known."""
        plan = replace(plan, keep=plan.keep | KEPT)
        if plan.live_blocks is None or not _includes(plan, KV_CACHE):
            return plan
        caches = [self._kv] if self._draft is None else [self._kv, self._draft.kv]
        live = [found for kv in caches if (found := kv.live(plan.live_blocks)) is not None]
        if not live:
            return replace(plan, policies={**plan.policies, KV_CACHE: Policy.DISCARD})
        return replace(plan, policies={**plan.policies, KV_CACHE: Policy.PRESERVE}, live=(*plan.live, *live))


def _includes(plan: SleepPlan, tag: str) -> bool:
    return plan.tags is None or tag in plan.tags


def _discards(plan: SleepPlan, tag: str) -> bool:
    return _includes(plan, tag) and plan.policies.get(tag) is Policy.DISCARD


def _preserves(plan: SleepPlan, tag: str) -> bool:
    return _includes(plan, tag) and not _discards(plan, tag)


def _is_restorable(stats: MemoryStats, tag: str) -> bool:
    return bool(stats.tags[tag].backed_up or stats.tags[tag].sourced)
