"""Experts that are stacked into one tensor for all of a layer, under the names of their single tensors.

Published checkpoints have three tensors for each expert; transformers 5 holds them stacked in memory, and saves them so when asked to
(`experts.gate_up_proj` [experts, 2 * inner, hidden] and `experts.down_proj` [experts, hidden, inner]).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hardpoint.weights.checkpoint import Checkpoint, StoredTensor, with_made

if TYPE_CHECKING:
    from torch import Tensor

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
class StackedSlice:
    """Where an expert's tensor stands in a stacked one: `stacked[expert, first_row : end_row]`."""

    stacked: str
    expert: int
    first_row: int
    rows: int

    @property
    def end_row(self) -> int:
        """The row after the tensor's."""
        return self.first_row + self.rows


class _SingleExperts(Checkpoint):
    """The experts of a checkpoint with stacked ones, as single tensors."""

    def __init__(self, inner: Checkpoint, slices: Mapping[str, StackedSlice]) -> None:
        self._inner, self._slices = inner, slices

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        given = self._inner.shapes()
        return {name: (one.rows, *given[one.stacked][2:]) for name, one in self._slices.items()}

    def rows(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Tensor]]:
        one = self._slices[name]
        last = one.rows if end is None else end
        found = self._inner.expert_rows(one.stacked, one.expert, one.first_row + begin, one.first_row + last)
        for first, values in found:
            yield first - one.first_row, values

    def stored(self, name: str) -> StoredTensor | None:
        one = self._slices[name]
        whole = self._inner.stored(one.stacked)
        if whole is None:
            return None
        experts, rows, _ = self._inner.shapes()[one.stacked]
        row_bytes = whole.size // (experts * rows)
        offset = whole.offset + (one.expert * rows + one.first_row) * row_bytes
        return replace(whole, offset=offset, size=one.rows * row_bytes)


def unstacked(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """Return a checkpoint whose experts have tensors of their own, as the model of these shapes has them.

    A stacked tensor of another shape than the experts' is left alone, to be found wrong by its name.
    """
    given = checkpoint.shapes()
    found: dict[str, StackedSlice] = {}
    for stacked, parts in _slices(shapes).items():
        if stacked in given and not parts.keys() & given.keys() and given[stacked] == _whole(parts, shapes):
            found |= parts
    if not found:
        return checkpoint
    sources = {one.stacked for one in found.values()}
    return with_made(checkpoint, _SingleExperts(checkpoint, found), sources, checkpoint.dtype())


def unstacked_pairs(
    given: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) pairs with those of stacked experts taken apart, as the model of these shapes has them."""
    by_stacked = _slices(shapes)
    for name, values in given:
        parts = by_stacked.get(name if name in by_stacked else f"model.{name}", {})
        if not parts or tuple(values.shape) != _whole(parts, shapes):
            yield name, values
            continue
        for part, one in parts.items():
            yield part, values[one.expert, one.first_row : one.end_row]


def _slices(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, StackedSlice]]:
    """Return, for each stacked tensor that a checkpoint of the model may have, where the experts' tensors stand in it."""
    found: dict[str, dict[str, StackedSlice]] = {}
    for name, shape in shapes.items():
        single = _SINGLE.fullmatch(name)
        if single is None or single[3] not in _PARTS:
            continue
        # Mixtral's block is named as other families' when it is stacked.
        block = re.sub(r"\.block_sparse_moe$", ".mlp", single[1])
        leaf, part = _PARTS[single[3]]
        stacked = f"{block}.experts.{leaf}"
        found.setdefault(stacked, {})[name] = StackedSlice(stacked, int(single[2]), part * shape[0], shape[0])
    return found


def _whole(parts: Mapping[str, StackedSlice], shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of the stacked tensor that the experts' tensors make together."""
    experts = 1 + max(part.expert for part in parts.values())
    return (experts, max(part.end_row for part in parts.values()), *shapes[next(iter(parts))][1:])
