"""A rank's sleeps and wakes before they are committed: what the worker adds to a plan, refuses, and notes at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hardpoint.interfaces.allocator import (
    KV_CACHE,
    WEIGHTS,
    DeviceAllocator,
    MemoryStats,
    MemoryTransaction,
    Policy,
    SleepPlan,
)
from hardpoint.interfaces.capabilities import SleepTier
from hardpoint.interfaces.errors import MemoryAsleep
from hardpoint.worker.kv_memory import KVMemory
from hardpoint.worker.transactions import MemoryChange
from hardpoint.worker.weights import KEPT, Weights


class SleepCycle:
    """Prepares sleeps and wakes of a rank's memory, and knows what is asleep."""

    def __init__(
        self, allocator: DeviceAllocator, weights: Weights, kv: KVMemory, synchronize: Callable[[], None]
    ) -> None:
        self._allocator, self._weights, self._kv = allocator, weights, kv
        self._synchronize = synchronize
        self._asleep: frozenset[str] = frozenset()

    def prepare_sleep(self, plan: SleepPlan) -> MemoryChange:
        """Return a sleep that is ready to commit; raises what the allocator raises, and CapabilityRefused without a source."""
        self._synchronize()
        before = self._allocator.stats()
        plan = self._completed(plan)
        if plan.tier is SleepTier.SOURCE and _preserves(plan, WEIGHTS) and WEIGHTS not in before.asleep:
            self._weights.check_sourced(before)
        obsolete = [tag for tag in sorted(before.asleep) if _discards(plan, tag) and _is_restorable(before, tag)]

        def on_commit() -> None:
            if _discards(plan, WEIGHTS):
                self._weights.ledger.discard_all()
            if obsolete:
                self._allocator.discard_backup(obsolete)

        return self._change(lambda: self._allocator.begin_sleep(plan), on_commit)

    def prepare_wake(self, tags: Sequence[str] | None) -> MemoryChange:
        """Return a wake that is ready to commit; raises what the allocator raises."""
        with torch.no_grad():
            return self._change(lambda: self._allocator.begin_wake(tags), lambda: None)

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

    def _change(self, begin: Callable[[], MemoryTransaction], on_commit: Callable[[], None]) -> MemoryChange:
        try:
            return MemoryChange(begin(), on_commit, self._note_asleep)
        except BaseException:
            self._note_asleep()
            raise

    def _note_asleep(self) -> None:
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
