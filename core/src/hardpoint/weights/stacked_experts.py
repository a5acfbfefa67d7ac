"""Experts that are stacked into one tensor for all of a layer, under the names of their single tensors.

Published checkpoints have three tensors for each expert; transformers 5 holds them stacked in memory, and saves them so when asked to
(`experts.gate_up_proj` [experts, 2 * inner, hidden] and `experts.down_proj` [experts, hidden, inner]).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hardpoint.weights.checkpoint import Checkpoint, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.dtypes import DType

_SINGLE = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
_PARTS = {
    "gate_proj": ("gate_up_proj", 0),
    "w1": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "w3": ("gate_up_proj", 1),
    "down_proj": ("down_proj", 0),
    "w2": ("down_proj", 0),
}
"""Where an expert's tensor stands: in which stacked one, and in which part of its rows."""


@dataclass(frozen=True)
class ParallelRank:
    """Where a tensor stands in a stacked one: `stacked[expert, first_row : first_row + rows]`; a router's is the other one as a whole."""

    stacked: str
    expert: int | None = None
    first_row: int = 0
    rows: int = 0

    @property
    def end_row(self) -> int:
        """The row after the tensor's."""
        return self.first_row + self.rows


def places(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ParallelRank]:
    """Return where each expert's tensor, and each router's that is named otherwise there, stands in a stacked checkpoint.

    Args:
        shapes: of the model's tensors.
    """
    found = {}
    for name, shape in shapes.items():
        single = _SINGLE.fullmatch(name)
        if single is None or single[3] not in _PARTS:
            continue
        # Mixtral's block is named as other families' when it is stacked.
        block = re.sub(r"\.block_sparse_moe$", ".mlp", single[1])
        stacked, part = _PARTS[single[3]]
        found[name] = ParallelRank(f"{block}.experts.{stacked}", int(single[2]), part * shape[0], shape[0])
        if block != single[1]:
            found[f"{single[1]}.gate.weight"] = ParallelRank(f"{block}.gate.weight")
    return found


class UnstackedCheckpoint(Checkpoint):
    """A checkpoint with stacked experts, as one with single tensors."""

    def __init__(self, inner: Checkpoint, found: Mapping[str, ParallelRank]) -> None:
        self._inner, self._places = inner, found

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        given = self._inner.shapes()
        stacked = {place.stacked for place in self._places.values()}
        shapes = {name: shape for name, shape in given.items() if name not in stacked}
        for name, place in self._places.items():
            whole = given[place.stacked]
            shapes[name] = whole if place.expert is None else (place.rows, *whole[2:])
        return shapes

    def rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        place = self._places.get(name)
        if place is None or place.expert is None:
            yield from self._inner.rows(name if place is None else place.stacked, begin, end)
            return
        last = place.rows if end is None else end
        for first, values in self._inner.expert_rows(
            place.stacked, place.expert, place.first_row + begin, place.first_row + last
        ):
            yield first - place.first_row, values

    def dtype(self) -> DType | None:
        return self._inner.dtype()

    def stored(self, name: str) -> StoredTensor | None:
        place = self._places.get(name)
        if place is None:
            return self._inner.stored(name)
        whole = self._inner.stored(place.stacked)
        if whole is None or place.expert is None:
            return whole
        experts, rows, _ = self._inner.shapes()[place.stacked]
        row_bytes = whole.size // (experts * rows)
        offset = whole.offset + (place.expert * rows + place.first_row) * row_bytes
        return replace(whole, offset=offset, size=place.rows * row_bytes)


def unstacked(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """Return a checkpoint whose experts have tensors of their own, as the model of these shapes has them.

    A stacked tensor of another shape than the experts' is left alone, to be found wrong by its name.
    """
    given = checkpoint.shapes()
    found: dict[str, ParallelRank] = {}
    for stacked, parts in _by_stacked(shapes).items():
        if stacked in given and not parts.keys() & given.keys() and given[stacked] == _whole(parts, shapes):
            found |= parts
    return UnstackedCheckpoint(checkpoint, found) if found else checkpoint


def unstacked_pairs(
    given: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) pairs with those of stacked experts taken apart, as the model of these shapes has them."""
    by_stacked = _by_stacked(shapes)
    for name, values in given:
        parts = by_stacked.get(name if name in by_stacked else f"model.{name}", {})
        if not parts or tuple(values.shape) != _whole(parts, shapes):
            yield name, values
            continue
        for part, place in parts.items():
            yield part, values if place.expert is None else values[place.expert, place.first_row : place.end_row]


def _by_stacked(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, ParallelRank]]:
    """Return, for each stacked tensor, where the model's tensors stand in it."""
    found: dict[str, dict[str, ParallelRank]] = {}
    for name, place in places(shapes).items():
        found.setdefault(place.stacked, {})[name] = place
    return found


def _whole(parts: Mapping[str, ParallelRank], shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of the stacked tensor that the model's tensors make together."""
    name, place = next(iter(parts.items()))
    if place.expert is None:
        return shapes[name]
    experts = 1 + max(part.expert or 0 for part in parts.values())
    return (experts, max(part.end_row for part in parts.values()), *shapes[name][1:])
