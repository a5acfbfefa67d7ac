"""Recurrent states: what a layer keeps of a whole sequence, in one slot for each row of the block table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hardpoint.layers.weights import Layer

if TYPE_CHECKING:
    from hardpoint.layers.attention import Step


@dataclass(frozen=True)
class StateTensor:
    """One state of a sequence in one layer: its shape, and the dtype that it is kept in."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StateStep:
    """What layers with states need of the step under way.

    Attributes:
        tables: of each such layer, its states of all slots, [slots, *shape].
        rows: int64[R], the slot of each sequence of the step.
        begins: bool[R], sequences whose first token is in the step: their states are zero, whatever the slots hold.
        query_start: R + 1 numbers on the host, as `StepBatch.query_start`.
        first_tokens: int64[R], the same without the last, on the device.
        owners: int64[T], the sequence of the step that each token is of.
        num_decodes: how many sequences, from the first, have one token.
    """

    tables: tuple[tuple[Tensor, ...], ...]
    rows: Tensor
    begins: Tensor
    query_start: tuple[int, ...]
    first_tokens: Tensor
    owners: Tensor
    num_decodes: int


class LayerWithStates(Layer):
    """A layer that keeps something of a sequence from one step to the next.

    Attributes:
        states: what it keeps, on this rank.

    Args:
        index: number of the layer among those of the model with states.
    """

    def __init__(self, index: int, states: tuple[StateTensor, ...]) -> None:
        super().__init__()
        self._index, self.states = index, states

    def read(self, step: Step) -> list[Tensor]:
        """Return copies of the states of the step's sequences, [R, *shape] each."""
        given = states_of(step)
        return [
            table.index_select(0, given.rows).masked_fill_(given.begins.view(-1, *(1,) * (table.ndim - 1)), 0)
            for table in given.tables[self._index]
        ]

    def write(self, step: Step, *states: Tensor) -> None:
        """Keep the states [R, *shape] of the step's sequences."""
        given = states_of(step)
        for table, state in zip(given.tables[self._index], states, strict=True):
            table.index_copy_(0, given.rows, state.to(table.dtype))


Recurrence = Callable[..., tuple[Tensor, Tensor]]
"""(state, inputs ...) to (outputs, state): over a batch of single tokens, or over one sequence's tokens in order."""


def over_sequences(step: Step, one: Recurrence, scan: Recurrence, state: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Run a recurrence over a step's tokens: its decodes in one batch, its prefill chunks one after the other.

    Args:
        one: takes states [B, ...] and inputs [B, ...].
        scan: takes a state [...] and inputs [L, ...].
        state: [R, ...], replaced by what follows it.
        inputs: [T, ...] each.

    Returns:
        Outputs of all tokens, [T, ...].
    """
    given, outputs = states_of(step), []
    if given.num_decodes:
        first = slice(given.num_decodes)
        output, after = one(state[first], *(each[first] for each in inputs))
        outputs.append(output)
        state[first] = after
    for row in range(given.num_decodes, len(given.rows)):
        tokens = slice(given.query_start[row], given.query_start[row + 1])
        output, after = scan(state[row], *(each[tokens] for each in inputs))
        outputs.append(output)
        state[row] = after
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def states_of(step: Step) -> StateStep:
    """Return what a step has for layers with states."""
    assert step.states is not None, "a model whose layers keep states is given them"
    return step.states
