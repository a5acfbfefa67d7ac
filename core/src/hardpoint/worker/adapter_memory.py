"""A rank's LoRA adapters: whole on the host, and those that steps go through in slots on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from hardpoint.interfaces.allocator import ADAPTERS
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import WorkerError
from hardpoint.interfaces.kernels import AdapterRows, AdapterWeights
from hardpoint.models import AdaptedLayer, Adapter, adapted_layers, adapter_targets, read_adapter
from hardpoint.models.modular import FamilyModel

if TYPE_CHECKING:
    from hardpoint.interfaces.allocator import DeviceAllocator
    from hardpoint.interfaces.batch import StepInput
    from hardpoint.interfaces.platform import Platform
    from hardpoint.layers.adapters import AdapterSlots
    from hardpoint.layers.weights import WeightShard
    from hardpoint.models import RunnableModel

_ALIGNMENT = 64
"""Bytes to a multiple of which each matrix begins."""


@dataclass(frozen=True)
class _Part:
    """Rows of a linear layer that come of one tensor of the checkpoint, one shard of it after the other.

    Attributes:
        target: the tensor's name without ".weight".
        span: the rows.
        down, up: where the slot of an adapter has the part's matrices.
        number: among the parts of all layers.
    """

    target: str
    shards: tuple[WeightShard, ...]
    span: tuple[int, int]
    down: slice
    up: slice
    layer: int
    number: int


class AdapterMemory:
    """Loads adapters, and gives each step those that it goes through.

    A slot of the device's memory holds the matrices of all layers, so that an adapter comes in one copy. The adapter that no step has used
    for the longest time gives way.
    """

    def __init__(
        self, model: RunnableModel, slots: AdapterSlots, dtype: DType, allocator: DeviceAllocator, platform: Platform
    ) -> None:
        """Take the memory, and let the layers use it; raises DeviceOutOfMemory."""
        assert isinstance(model, FamilyModel)
        layers, max_adapters, max_rank = list(adapted_layers(model.share)), slots.max_adapters, slots.max_rank
        self._targets, self._rank, self._dtype = adapter_targets(model.whole), max_rank, dtype.to_torch()
        self._step, self._platform = slots, platform
        self._host: dict[int, Adapter] = {}
        self._slot_of: OrderedDict[int, int] = OrderedDict()
        self._free = list(range(max_adapters))[::-1]
        self._parts: list[_Part] = []
        self._places: list[tuple[slice, tuple[int, ...]]] = []
        unit = _ALIGNMENT // dtype.itemsize
        size = 0

        def place(*shape: int) -> slice:
            nonlocal size
            first, size = size, size + -(-prod(shape) // unit) * unit
            self._places.append((slice(first, first + prod(shape)), shape))
            return self._places[-1][0]

        spans: list[list[tuple[int, int]]] = []
        for layer, adapted in enumerate(layers):
            groups = _by_tensor(adapted.shards)
            rows = sum(shard.num_rows for shard in adapted.shards)
            down, up = place(len(groups) * max_rank, adapted.shards[0].num_columns), place(max_rank, rows)
            spans.append([])
            first = 0
            for shards in groups:
                span = first, first + sum(shard.num_rows for shard in shards)
                first = span[1]
                spans[-1].append(span)
                name = shards[0].name.removesuffix(".weight")
                self._parts.append(_Part(name, shards, span, down, up, layer, len(self._parts)))
        self._slots = allocator.empty((max_adapters, size), dtype, ADAPTERS)
        count = len(self._parts)
        self._ranks = allocator.empty((max_adapters, count), DType.INT32, ADAPTERS)
        self._scales = allocator.empty((max_adapters, count), DType.FLOAT32, ADAPTERS)
        with torch.no_grad():
            for one in (self._slots, self._ranks, self._scales):
                one.zero_()
            model.take_adapters(dict(self._by_layer(layers, spans)))

    def _by_layer(
        self, layers: Sequence[AdaptedLayer], spans: list[list[tuple[int, int]]]
    ) -> Iterator[tuple[str, AdapterWeights]]:
        """Yield where each layer has its adapters, by the name of its weight."""
        first = 0
        for number, (adapted, own) in enumerate(zip(layers, spans, strict=True)):
            (down, down_shape), (up, up_shape) = self._places[2 * number], self._places[2 * number + 1]
            parts = slice(first, first + len(own))
            first = parts.stop
            yield (
                adapted.name,
                AdapterWeights(
                    self._slots[:, down].view(-1, *down_shape),
                    self._slots[:, up].view(-1, *up_shape),
                    self._ranks[:, parts],
                    self._scales[:, parts],
                    tuple(own),
                ),
            )

    @property
    def slot_bytes(self) -> int:
        """What the device has for each adapter."""
        return sum(one[0].nbytes for one in (self._slots, self._ranks, self._scales))

    def load(self, number: int, path: str) -> int:
        """Read an adapter, and return its bytes on the host; raises InvalidAdapter."""
        adapter = self._host[number] = read_adapter(path, self._targets, self._rank, self._dtype)
        return adapter.nbytes

    def unload(self, number: int) -> None:
        """Forget an adapter."""
        self._host.pop(number, None)
        slot = self._slot_of.pop(number, None)
        if slot is not None:
            self._free.append(slot)

    @contextmanager
    def during(self, step: StepInput) -> Iterator[bool]:
        """Let the layers add the step's adapters; yields whether there are any."""
        rows = self._rows(step)
        with self._step.during(rows):
            yield rows is not None

    def _rows(self, step: StepInput) -> AdapterRows | None:
        """Bring the step's adapters to the device, and return which tokens go through which; None where none does."""
        if not step.adapters:
            return None
        wanted = dict.fromkeys(step.adapters.values())
        for number in wanted:
            if number in self._slot_of:
                self._slot_of.move_to_end(number)
        for number in wanted:
            if number not in self._slot_of:
                self._slot_of[number] = self._write(number, self._take_slot(wanted.keys()))
        batch = step.batch
        slot_of = {seq_id: self._slot_of[number] for seq_id, number in step.adapters.items()}
        of_sequences = np.array([slot_of.get(seq_id, -1) for seq_id in batch.seq_ids.tolist()], np.int32)
        of_tokens = np.repeat(of_sequences, np.diff(batch.query_start))
        tokens = np.flatnonzero(of_tokens >= 0)
        if not len(tokens):
            return None
        tokens = tokens[np.argsort(of_tokens[tokens], kind="stable")]
        slots, starts = np.unique(of_tokens[tokens], return_index=True)
        bounds = np.append(starts, len(tokens)).astype(np.int32)
        upload = self._platform.upload
        groups = tuple(zip(slots.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
        return AdapterRows(upload(tokens.astype(np.int64)), upload(slots.astype(np.int32)), upload(bounds), groups)

    def _take_slot(self, wanted: Collection[int]) -> int:
        if self._free:
            return self._free.pop()
        for number in self._slot_of:
            if number not in wanted:
                return self._slot_of.pop(number)
        raise WorkerError(
            "a step goes through more adapters than there is memory for", found=f"{len(self._slot_of)} slots"
        )

    def _write(self, number: int, slot: int) -> int:
        """Put an adapter into a slot; returns the slot."""
        adapter = self._host.get(number)
        if adapter is None:
            self._free.append(slot)
            raise WorkerError("a step goes through an adapter that is not loaded", found=f"number {number}")
        matrices = self._platform.empty_host((self._slots.shape[1],), self._dtype)
        matrices.zero_()
        ranks, scales = torch.zeros(len(self._parts), dtype=torch.int32), torch.zeros(len(self._parts))
        first_of_layer = -1
        index = 0
        for part in self._parts:
            index = 0 if part.layer != first_of_layer else index + 1
            first_of_layer = part.layer
            found = adapter.layers.get(part.target)
            if found is None:
                continue
            rank = found.rank
            ranks[part.number], scales[part.number] = rank, found.scale
            columns = part.shards[0].columns
            down = found.down if columns is None else found.down[:, columns[0] : columns[1]]
            own = matrices[part.down].view(-1, down.shape[1])
            own[index * self._rank : index * self._rank + rank] = down
            up = torch.cat([found.up[shard.first_row : shard.end_row] for shard in part.shards])
            matrices[part.up].view(self._rank, -1)[:rank, part.span[0] : part.span[1]] = up.T
        with torch.no_grad():
            self._slots[slot].copy_(matrices)
            self._ranks[slot].copy_(ranks)
            self._scales[slot].copy_(scales)
        return slot


def _by_tensor(shards: Sequence[WeightShard]) -> list[tuple[WeightShard, ...]]:
    """Return shards that follow one another and are of one tensor together."""
    found: list[tuple[WeightShard, ...]] = []
    for shard in shards:
        if found and found[-1][0].name == shard.name:
            found[-1] = (*found[-1], shard)
        else:
            found.append((shard,))
    return found
