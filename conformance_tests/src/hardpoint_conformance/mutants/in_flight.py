"""Faults of steps in flight, in a backend whose device is behind its queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hardpoint.interfaces import MemoryChange, StepInput, StepOutput
from hardpoint_conformance.mutants import Mutant
from hardpoint_conformance.mutants.asynchronous import asynchronous
from hardpoint_conformance.mutants.derived import Faults, Methods, MethodsOf, derived
from hardpoint_conformance.target import Target

if TYPE_CHECKING:
    from torch import Tensor

_FAULTS = Faults("worker")
_CLAUSES = (
    "worker.steps.order@1",
    "worker.steps.overlap@1",
    "worker.steps.moves@1",
    "worker.steps.failure@1",
    "worker.steps.sleep@1",
)


def _faulty(target: Target, methods_of: MethodsOf) -> Target:
    """Return the target with these methods in its worker, over a device with steps in flight."""
    found = asynchronous(target)

    @cache
    def worker() -> Any:
        base = target.descriptor.worker()
        return derived(base, methods_of(base))

    return found.with_descriptor(worker=worker)


@_FAULTS.target_fault(
    "No fault: the device is behind its queue, and two steps may be in flight.", *_CLAUSES, harmless=True
)
def steps_in_flight(target: Target) -> Target:
    return asynchronous(target)


@_FAULTS.target_fault(
    "A token that a step in flight samples is taken to be the one before it.", "worker.steps.overlap@1"
)
def stale_token_read(target: Target) -> Target:
    def methods(base: Any) -> Methods:
        def submit(self: Any, step: StepInput) -> None:
            known, samples = vars(self).setdefault("_known", {}), vars(self).setdefault("_samples", [])
            batch = step.batch
            token_ids = batch.token_ids.copy()
            for place in np.flatnonzero(token_ids < 0):
                sequence = int(np.searchsorted(batch.query_start, place, side="right")) - 1
                token_ids[place] = known.get(int(batch.seq_ids[sequence]), 0)
            base.submit(self, replace(step, batch=replace(batch, token_ids=token_ids)))
            samples.append(batch.sample_seq_ids.tolist())

        def collect(self: Any) -> StepOutput:
            output: StepOutput = base.collect(self)
            self._known.update(zip(self._samples.pop(0), output.token_ids.tolist(), strict=True))
            return output

        return {"submit": submit, "collect": collect}

    return _faulty(target, methods)


@_FAULTS.target_fault(
    "A token that a step in flight samples is looked up in another sequence's row.", "worker.steps.overlap@1"
)
def token_of_another_row_read(target: Target) -> Target:
    def methods(base: Any) -> Methods:
        def submit(self: Any, step: StepInput) -> None:
            rows = step.batch.state_rows
            base.submit(self, replace(step, batch=replace(step.batch, state_rows=np.roll(rows, 1))))

        return {"submit": submit}

    return _faulty(target, methods)


def _one_buffer(way: str) -> MethodsOf:
    """Copies in one direction share the host's memory, as if none were in flight."""

    def methods_of(base: Any) -> Methods:
        def _pinned(self: Any, asked: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            if asked != way:
                tensor: Tensor = base._pinned(self, asked, shape, dtype)
                return tensor
            held = vars(self).setdefault("_held", {})
            return held.setdefault((tuple(shape), dtype), torch.empty(tuple(shape), dtype=dtype))  # type: ignore[no-any-return]

        return {"_pinned": _pinned}

    return methods_of


@_FAULTS.target_fault(
    "A step's tokens are copied to the memory of those before, which were not collected.", "worker.steps.overlap@1"
)
def output_buffer_reused(target: Target) -> Target:
    return asynchronous(target, _one_buffer("down"))


@_FAULTS.target_fault(
    "A step's inputs are written where the device has not read those before.", "worker.steps.overlap@1"
)
def input_buffer_reused(target: Target) -> Target:
    return asynchronous(target, _one_buffer("up"))


@_FAULTS.target_fault(
    "Outputs are read before the device has come to them.", "worker.steps.overlap@1", "worker.steps.order@1"
)
def outputs_not_waited_for(target: Target) -> Target:
    return asynchronous(target, lambda base: {"record_event": lambda self: None})


@_FAULTS.target_fault("Blocks are moved ahead of the steps in flight.", "worker.steps.moves@1")
def moves_ahead_of_steps(target: Target) -> Target:
    def methods(base: Any) -> Methods:
        def submit(self: Any, step: StepInput) -> None:
            waiting = vars(self).setdefault("_waiting", [])
            batch = step.batch
            moves = any(len(pairs) for pairs in (batch.swap_out, batch.swap_in, batch.copies))
            if moves and waiting:
                # As by another stream: what the step in flight computes is not there yet.
                before = waiting[-1].batch
                cache = self._loaded.kv.cache
                blocks, offsets = np.divmod(before.slot_mapping, self._loaded.model.plan.block_size)
                axes = self._loaded.model.plan.kv_cache.axes
                index: list[Any] = [slice(None)] * cache.ndim
                index[1 + axes.index("block")] = torch.from_numpy(blocks.astype(np.int64))
                index[1 + axes.index("token")] = torch.from_numpy(offsets.astype(np.int64))
                kept = cache[tuple(index)].clone()
                cache[tuple(index)] = 0
                self._loaded.kv.move_blocks(batch)
                cache[tuple(index)] = kept
                none = batch.copies[:0]
                step = replace(step, batch=replace(batch, swap_out=none, swap_in=none, copies=none))
            base.submit(self, step)
            waiting.append(step)

        def collect(self: Any) -> StepOutput:
            self._waiting.pop(0)
            output: StepOutput = base.collect(self)
            return output

        return {"submit": submit, "collect": collect}

    return _faulty(target, methods)


@_FAULTS.target_fault("A step that fails takes those along that were submitted before it.", "worker.steps.failure@1")
def failure_ends_other_steps(target: Target) -> Target:
    def methods(base: Any) -> Methods:
        def submit(self: Any, step: StepInput) -> None:
            base.submit(self, step)
            in_flight = self._loaded.in_flight
            if isinstance(in_flight[-1], Exception):
                failed = [in_flight[-1]] * len(in_flight)
                in_flight.clear()
                in_flight.extend(failed)

        return {"submit": submit}

    return _faulty(target, methods)


@_FAULTS.target_fault("A sleep forgets the steps in flight.", "worker.steps.sleep@1")
def sleep_forgets_steps(target: Target) -> Target:
    def methods(base: Any) -> Methods:
        def begin(self: Any, transaction: int, change: MemoryChange) -> None:
            base.begin(self, transaction, change)
            self._loaded.in_flight.clear()

        return {"begin": begin}

    return _faulty(target, methods)


MUTANTS: Sequence[Mutant] = _FAULTS.mutants
