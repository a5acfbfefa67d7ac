"""A rank's weights and memory between steps: what is valid, who writes it, and the sleeps and wakes that change it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Set
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
    CapabilityRefused,
    HardpointError,
    InvalidTransaction,
    MemoryAsleep,
    MemoryBusy,
    WeightsMissing,
)
from hardpoint.models import open_model
from hardpoint.worker.communicators import Communicators
from hardpoint.worker.kv_memory import KVMemory
from hardpoint.worker.loading import LoadedModel, kept_default_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.models import ModelSource
    from hardpoint.worker.draft_model import DraftModel


class WeightLedger:
    """Keeps account of the weights that a sleep discarded and that were not written since.

    Args:
        names: the checkpoint names of all weights.
    """

    def __init__(self, names: Set[str]) -> None:
        self._names = frozenset(names)
        self._missing: frozenset[str] = frozenset()

    @property
    def missing(self) -> frozenset[str]:
        """Names of the weights without valid values."""
        return self._missing

    def discard_all(self) -> None:
        """Note that no weight is valid any more."""
        self._missing = self._names

    def declare_valid(self) -> None:
        """Note that all weights are valid."""
        self._missing = frozenset()

    @contextmanager
    def writing(self, written: Set[str]) -> Iterator[None]:
        """Note what a write did when it ends: what it wrote is valid, or everything is missing when it broke off in the middle.

        Args:
            written: filled during the write, with each name before its weight is written.
        """
        try:
            yield
        except BaseException:
            if written:
                self.discard_all()
            raise
        self._missing -= written


KEPT = frozenset({WEIGHTS})
"""Tags all of whose writers say so: the loader, updates and reloads."""


class Weights:
    """Writes a model's weights, and tells the allocator of every write.

    Attributes:
        ledger: which weights hold valid values.
    """

    def __init__(self, loaded: LoadedModel, allocator: DeviceAllocator, synchronize: Callable[[], None]) -> None:
        """Take charge of weights that were just loaded.

        Args:
            synchronize: waits until the device has done all its work.
        """
        self._model, self._source = loaded.model, loaded.source
        self._allocator, self._synchronize = allocator, synchronize
        self.ledger = WeightLedger(loaded.model.weight_names())
        self._unsourced = ""
        self._declare_sources(loaded.source, loaded.fingerprint)

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Replace weights by (checkpoint name, tensor) pairs; see `Worker.update_weights`."""
        self._synchronize()
        written: set[str] = set()
        try:
            with torch.inference_mode(), self.ledger.writing(written):
                return self._model.update_weights(weights, written)
        finally:
            self._note_written(written, "they were updated since they were loaded")

    def reload(self, model: str | None, *, trust_remote_code: bool) -> int:
        """Load the weights again from the source that was loaded last, or from `model`; see `Worker.reload_weights`."""
        if model is None:
            source = self._source.opener()()
        else:
            overrides = self._source.hf_overrides
            source = open_model(model, trust_remote_code=trust_remote_code, hf_overrides=overrides)
        fingerprint = source.fingerprint()
        self._synchronize()
        written: set[str] = set()
        try:
            with torch.no_grad(), kept_default_dtype(), self.ledger.writing(written):
                count = self._model.reload(source, written)
        finally:
            self._note_written(written, "a reload broke off")
        self._source = source
        self._declare_sources(source, fingerprint)
        return count

    def restore(self, *, trust_remote_code: bool) -> None:
        """Load the weights again where a sleep has discarded them; raises what `reload` raises."""
        if self.ledger.missing:
            self.reload(None, trust_remote_code=trust_remote_code)

    def declare_valid(self) -> None:
        """Say that the weights are right as they stand; backups and sources of them are void."""
        self._note_written(self.ledger.missing or KEPT, "they were written by ways that the engine does not see")
        self.ledger.declare_valid()

    def check_valid(self) -> None:
        """Raise WeightsMissing where not all weights hold valid values."""
        missing = self.ledger.missing
        if missing:
            raise WeightsMissing(
                "the weights were discarded and have not been loaded again",
                found=f"{len(missing)} tensors are missing",
                hint="Call reload_weights(), update_weights() with all of them, or declare_weights_valid()",
            )

    def check_sourced(self, stats: MemoryStats) -> None:
        """Raise CapabilityRefused for weights that are nowhere to be read again."""
        weights = stats.tags.get(WEIGHTS)
        if weights is None or not weights.sourced:
            raise CapabilityRefused(
                "the weights cannot be left to their source",
                (self._unsourced or "they cannot be told apart from other memory of the decoder",),
                hint="Use the tier host or disk, or reload_weights() first",
            )

    def _declare_sources(self, source: ModelSource, fingerprint: object) -> None:
        """Tell the allocator where the weights can be read again, unless their files changed while they were loaded."""
        if source.fingerprint() == fingerprint:
            self._model.declare_sources(self._allocator, source)
            self._unsourced = ""
        else:
            self._unsourced = "the checkpoint changed while it was loaded"
        source.close_weights()

    def _note_written(self, written: Set[str], reason: str) -> None:
        if written:
            self._allocator.mark_written([WEIGHTS])
            self._unsourced = reason


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
                # Only now: all ranks have prepared, and so all come to it. Their libraries wait for one another.
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
