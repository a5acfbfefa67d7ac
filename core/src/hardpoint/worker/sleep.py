"""A rank's sleeps and wakes before they are committed: what the worker adds to a plan, refuses, and notes at the end."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace

import torch

from hardpoint.interfaces.allocator import (
    KV_CACHE,
    WEIGHTS,
    DeviceAllocator,
    MemoryChange,
    MemoryStats,
    Policy,
    SleepPlan,
    WakePlan,
)
from hardpoint.interfaces.capabilities import SleepTier
from hardpoint.interfaces.errors import MemoryAsleep
from hardpoint.worker.kv_memory import KVMemory
from hardpoint.worker.transactions import PreparedChange
from hardpoint.worker.weights import KEPT, Weights


class SleepCycle:
    """Prepares sleeps and wakes of a rank's memory, and knows what is asleep."""

    def __init__(
        self, allocator: DeviceAllocator, weights: Weights, kv: KVMemory, synchronize: Callable[[], None]
    ) -> None:
        self._allocator, self._weights, self._kv = allocator, weights, kv
        self._synchronize = synchronize
        self._asleep: frozenset[str] = frozenset()

    def prepare(self, change: MemoryChange) -> PreparedChange:
        """Return a sleep or wake that is ready to commit; raises what the allocator raises, and CapabilityRefused without a source."""
        try:
            return self._prepare_sleep(change) if isinstance(change, SleepPlan) else self._prepare_wake(change)
        except BaseException as error:
            # After an interrupt, frames may hold a transaction that was begun: dropped, it is rolled back.
            traceback.clear_frames(error.__traceback__)
            self.note_asleep()
            raise

    def _prepare_wake(self, plan: WakePlan) -> PreparedChange:
        with torch.no_grad():
            begun = self._allocator.begin_wake(None if plan.tags is None else sorted(plan.tags))
        return PreparedChange(begun, on_end=self.note_asleep)

    def _prepare_sleep(self, plan: SleepPlan) -> PreparedChange:
        self._synchronize()
        before = self._allocator.stats()
        plan = self._completed(plan)
        if plan.tier is SleepTier.SOURCE and _preserves(plan, WEIGHTS) and WEIGHTS not in before.asleep:
            self._weights.check_sourced(before)
        obsolete = [tag for tag in sorted(before.asleep) if _discards(plan, tag) and _is_restorable(before, tag)]

        def note_losses() -> None:
            self._asleep = self._asleep | (before.tags.keys() if plan.tags is None else plan.tags)
            if _discards(plan, WEIGHTS):
                self._weights.ledger.discard_all()

        def drop_backups() -> None:
            if obsolete:
                self._allocator.discard_backup(obsolete)

        return PreparedChange(self._allocator.begin_sleep(plan), note_losses, drop_backups, self.note_asleep)

    def check_awake(self) -> None:
        """Raise MemoryAsleep while anything is asleep."""
        if self._asleep:
            raise MemoryAsleep(
                "a step needs memory that is asleep", found=", ".join(sorted(self._asleep)), hint="Wake it first"
            )

    def check_weights_awake(self) -> None:
        """Raise MemoryAsleep while the weights are asleep."""
        if WEIGHTS in self._asleep:
            raise MemoryAsleep("the weights are asleep and cannot be written", hint="Wake the tag 'weights' first")

    def note_asleep(self) -> None:
        """Look up in the allocator's books what is asleep."""
        self._asleep = self._allocator.stats().asleep

    def _completed(self, plan: SleepPlan) -> SleepPlan:
        """Return the plan with what only the worker knows: bytes of live KV blocks, and whose writers are all known."""
        plan = replace(plan, keep=plan.keep | KEPT)
        if plan.live_blocks is None or not _includes(plan, KV_CACHE):
            return plan
        live = self._kv.live(plan.live_blocks)
        if live is None:
            return replace(plan, policies={**plan.policies, KV_CACHE: Policy.DISCARD})
        return replace(plan, policies={**plan.policies, KV_CACHE: Policy.PRESERVE}, live=(*plan.live, live))


def _includes(plan: SleepPlan, tag: str) -> bool:
    return plan.tags is None or tag in plan.tags


def _discards(plan: SleepPlan, tag: str) -> bool:
    return _includes(plan, tag) and plan.policies.get(tag) is Policy.DISCARD


def _preserves(plan: SleepPlan, tag: str) -> bool:
    return _includes(plan, tag) and not _discards(plan, tag)


def _is_restorable(stats: MemoryStats, tag: str) -> bool:
    return bool(stats.tags[tag].backed_up or stats.tags[tag].sourced)
