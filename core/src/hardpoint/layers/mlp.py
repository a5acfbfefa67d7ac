"""The gated feed-forward (GLU variants, arXiv:2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from hardpoint.layers.linear import GateUpLinear, RowLinear
from hardpoint.layers.parallel import aligned_obstacle, aligned_spans

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.kernels import Activation
    from hardpoint.layers.context import ModelContext


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`, its inner elements divided among the ranks.

    Args:
        names: of the checkpoint's layers gate and up; a single one where it has them as one tensor.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Activation,
        context: ModelContext,
        *,
        names: tuple[str, ...] = ("gate_proj", "up_proj"),
    ) -> None:
        super().__init__()
        self.intermediate_size, self.activation = intermediate_size, activation
        self._operators = context.operators
        span = aligned_spans(intermediate_size, context.rank.tensor_size)[context.rank.tensor_rank]
        self.gate_up_proj = GateUpLinear(hidden_size, intermediate_size, context, names=names)
        self.down_proj = RowLinear("down_proj", intermediate_size, hidden_size, context, span=span)

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, hidden_size] of x [rows, hidden_size]."""
        return self.down_proj(self._operators.gated_activation(self.gate_up_proj(x), self.activation))  # type: ignore[no-any-return]

    def tensor_obstacle(self, size: int) -> str | None:
        """Return why the layer cannot be divided among `size` ranks, or None."""
        return aligned_obstacle(self.intermediate_size, "intermediate size", size)
