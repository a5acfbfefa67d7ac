"""What a layer's parameters are stored from: shards of checkpoint tensors, one below the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from hardpoint.interfaces.blocks import BlockFormat
    from hardpoint.layers.parallel import Span
    from hardpoint.quantization import Blocks


@dataclass(frozen=True)
class WeightShard:
    """The part of a checkpoint tensor that some rows of a parameter are stored from.

    Attributes:
        name: of the tensor. As a layer gives it, one without a dot is the layer's own ("weight"), and one with dots is counted from
            the module that the layer is a part of ("q_proj.weight"); as a model gives it, the checkpoint's.
        shape: of the whole tensor.
        rows, columns: (first, end) of the part; None for all.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    @property
    def first_row(self) -> int:
        """The first row of the part."""
        return self.rows[0] if self.rows else 0

    @property
    def end_row(self) -> int:
        """The row after the part."""
        return self.rows[1] if self.rows else self.shape[0]

    @property
    def num_rows(self) -> int:
        """Rows of the parameter that it fills."""
        return self.end_row - self.first_row

    @property
    def num_columns(self) -> int:
        """Elements of a row of the part."""
        return self.shape[-1] if self.columns is None else self.columns[1] - self.columns[0]

    def of(self, values: Tensor) -> Tensor:
        """Return the wanted columns of rows of the tensor."""
        return values if self.columns is None else values[:, self.columns[0] : self.columns[1]]

    def blocks_of(self, rows: Tensor, format: BlockFormat) -> Tensor:
        """Return the wanted columns, whole blocks, of rows in blocks of a format."""
        if self.columns is None:
            return rows
        return rows[:, format.row_bytes(self.columns[0]) : format.row_bytes(self.columns[1])]


def take_rows(shards: Iterable[WeightShard], spans: Iterable[Span]) -> tuple[WeightShard, ...]:
    """Return what lies in spans of the rows of stacked shards, in the order of the spans."""
    placed, row = [], 0
    for shard in shards:
        placed.append((row, shard))
        row += shard.num_rows
    found = []
    for first, end in spans:
        for row, shard in placed:
            begin, stop = max(first - row, 0), min(end - row, shard.num_rows)
            if begin < stop:
                found.append(replace(shard, rows=(shard.first_row + begin, shard.first_row + stop)))
    return tuple(found)


Write = Callable[[Tensor, int, Tensor], None]
"""(parameter, first row, values): stores rows of a parameter from what the checkpoint has."""


def write_rows(stored: Tensor, row: int, values: Tensor) -> None:
    """Store rows as they are, converted to the parameter's dtype."""
    stored[row : row + len(values)].copy_(values)


@dataclass(frozen=True)
class StoredWeight:
    """How a parameter comes from a checkpoint.

    Attributes:
        shards: what its rows are, one below the other.
        write: stores rows of it.
        verbatim: whether the checkpoint's bytes, in the parameter's dtype, are the stored ones.
        blocks: the format that the parameter is stored in; `write` takes a checkpoint's blocks of it as they are.
    """

    shards: tuple[WeightShard, ...]
    write: Write = write_rows
    verbatim: bool = True
    blocks: BlockFormat | None = None

    @property
    def num_rows(self) -> int:
        """Rows of all shards."""
        return sum(shard.num_rows for shard in self.shards)

    def renamed(self, name: Callable[[str], str]) -> StoredWeight:
        """Return it with other names of tensors."""
        return replace(self, shards=tuple(replace(shard, name=name(shard.name)) for shard in self.shards))


class Layer(nn.Module):
    """A module with weights, which are registered on the meta device together with where they come from.

    Public attributes of plain types, and dataclasses, are what the layer computes with: two models whose layers have the same ones
    differ in their weights alone (`models.description.computes_the_same`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._stored: dict[str, StoredWeight] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer: without torch's hooks, which nothing here uses, and whose look-ups each call of a step would pay."""
        return self.forward(*args, **kwargs)

    def add_weight(
        self,
        name: str,
        shards: Sequence[WeightShard],
        *,
        dtype: torch.dtype,
        write: Write = write_rows,
        verbatim: bool = True,
    ) -> None:
        """Register a parameter that has the rows of all shards, and their columns."""
        stored = StoredWeight(tuple(shards), write, verbatim)
        columns = stored.shards[0].columns
        inner = stored.shards[0].shape[1:] if columns is None else (columns[1] - columns[0],)
        self.add_stored(name, stored, torch.empty((stored.num_rows, *inner), dtype=dtype, device="meta"))

    def add_stored(self, name: str, stored: StoredWeight, tensor: Tensor) -> None:
        """Register a parameter, still on the meta device, and where it comes from."""
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self._stored[name] = stored

    def store_in_blocks(self, method: Blocks, dtype: torch.dtype) -> None:
        """Store the parameter `weight`, which is on the meta device, in blocks; the layer's method is the caller's to set."""
        stored = self._stored["weight"]
        columns = stored.shards[0].num_columns
        changed = replace(stored, write=method.write, verbatim=method.verbatim, blocks=method.format)
        self.add_stored("weight", changed, method.create(stored.num_rows, columns, dtype))

    def stored_weights(self) -> Mapping[str, StoredWeight]:
        """Return where each of the layer's own parameters comes from, by its name."""
        return self._stored
