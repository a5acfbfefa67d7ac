"""A rank's recurrent states: a slot for each row of the block table, which holds the states of all layers of one sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hardpoint.interfaces.allocator import KV_CACHE, DeviceAllocator, Policy
from hardpoint.interfaces.dtypes import DType
from hardpoint.layers.states import StateStep, StateTensor

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.batch import StepBatch

_ALIGNMENT = 64


def slot_layout(layers: Sequence[Sequence[StateTensor]]) -> tuple[list[list[int]], int]:
    """Return where each state of each layer begins in a slot, and the bytes of a slot."""
    offsets: list[list[int]] = []
    end = 0
    for layer in layers:
        offsets.append([])
        for state in layer:
            offsets[-1].append(end)
            size = prod(state.shape) * DType.of(state.dtype).itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


class StateMemory:
    """The slots of all rows, part of the KV cache where that is put to sleep.

    A sequence has its row, and with it its slot, for as long as it runs. What a slot held before counts for nothing: a sequence's states
    are zero where a step has its first token, which also follows a preemption and the loss of the KV cache.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[StateTensor]],
        num_slots: int,
        *,
        allocator: DeviceAllocator,
        upload: Callable[[Any], Tensor],
    ) -> None:
        """Take the memory; raises DeviceOutOfMemory.

        Args:
            layers: what each layer keeps of a sequence.
            num_slots: rows of the block table.
            upload: see `Platform.upload`.
        """
        offsets, size = slot_layout(layers)
        self._slots = allocator.empty((num_slots, size), DType.UINT8, KV_CACHE, Policy.DISCARD)
        self._upload = upload
        self._tables = tuple(
            tuple(self._table(state, first) for state, first in zip(layer, starts, strict=True))
            for layer, starts in zip(layers, offsets, strict=True)
        )

    def prepare(self, batch: StepBatch) -> StateStep:
        """Return what the layers need of a step."""
        starts, lengths = batch.query_start[:-1].astype(np.int64), np.diff(batch.query_start)
        return StateStep(
            tables=self._tables,
            rows=self._upload(batch.rows.astype(np.int64)),
            begins=self._upload(batch.positions[starts] == 0),
            query_start=tuple(batch.query_start.tolist()),
            first_tokens=self._upload(starts),
            owners=self._upload(np.repeat(np.arange(len(starts)), lengths)),
            num_decodes=batch.num_decodes,
        )

    def copy_rows(self, batch: StepBatch) -> None:
        """Give forked sequences their parents' states."""
        if len(batch.row_copies):
            pairs = self._upload(batch.row_copies.astype(np.int64))
            self._slots.index_copy_(0, pairs[:, 1], self._slots.index_select(0, pairs[:, 0]))

    def _table(self, state: StateTensor, first: int) -> Tensor:
        size = prod(state.shape) * DType.of(state.dtype).itemsize
        return self._slots[:, first : first + size].view(state.dtype).view(len(self._slots), *state.shape)
