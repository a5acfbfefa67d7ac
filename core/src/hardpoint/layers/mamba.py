"""Mamba 2's mixer (arXiv:2405.21060): a convolution, a state space for each head, and a gate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from hardpoint.layers.activations import ACTIVATIONS
from hardpoint.layers.convolution import CausalConvolution
from hardpoint.layers.linear import Linear, RowLinear
from hardpoint.layers.parallel import even_span, length, scaled, shifted
from hardpoint.layers.selective import state_scan, state_step
from hardpoint.layers.states import LayerWithStates, StateTensor, over_sequences
from hardpoint.layers.weights import Layer, WeightShard, take_rows

if TYPE_CHECKING:
    from hardpoint.layers.attention import Step
    from hardpoint.layers.context import ModelContext
    from hardpoint.layers.parallel import Span


@dataclass(frozen=True)
class MambaShape:
    """What a mixer computes.

    Attributes:
        num_heads, head_dim: of the state space; their product is the mixer's width.
        num_groups: of neighbouring heads that have the same directions into and out of their states.
        state_size: elements of a state for each element of a head.
        kernel: tokens that the convolution sees.
        conv_bias, bias, output_bias: of the convolution, and of the projections into and out of the mixer.
        activation: of the convolution, one of `ACTIVATIONS`.
        least_time: least time step.
        eps: of the norm before the output, over a group's heads; None for no norm.
        norm_first: it is before the gate and not after it.
        factors: of what the projection gives: gate, input, directions in, directions out, time steps.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    activation: str = "silu"
    least_time: float = 0.0
    eps: float | None = None
    norm_first: bool = False
    factors: tuple[float, ...] = (1.0,) * 5

    @property
    def width(self) -> int:
        """Elements of all heads."""
        return self.num_heads * self.head_dim

    @property
    def directions(self) -> int:
        """Elements of all groups' directions into their states."""
        return self.num_groups * self.state_size


class Mamba2(LayerWithStates):
    """A mixer, by whole groups divided among the ranks, or by heads where there is one group.

    A slot holds the convolution's last inputs, and each head's state in float32.
    """

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor

    def __init__(self, index: int, shape: MambaShape, hidden_size: int, context: ModelContext) -> None:
        size, rank = context.rank.tensor_size, context.rank.tensor_rank
        groups = (0, 1) if shape.num_groups == 1 else even_span(shape.num_groups, size, rank)
        heads = scaled(groups, shape.num_heads // shape.num_groups)
        if shape.num_groups == 1:
            heads = even_span(shape.num_heads, size, rank)
        inner, directions = scaled(heads, shape.head_dim), scaled(groups, shape.state_size)
        channels = [inner, shifted(directions, shape.width), shifted(directions, shape.width + shape.directions)]
        all_channels = shape.width + 2 * shape.directions
        conv1d = CausalConvolution(all_channels, shape.kernel, channels, context, bias=shape.conv_bias)
        state = StateTensor((length(heads), shape.head_dim, shape.state_size), torch.float32)
        super().__init__(index, (conv1d.state, state))
        self.shape, self.conv1d = shape, conv1d
        self._widths = [length(span) for span in (inner, *channels, heads)]
        rows = [inner, *(shifted(span, shape.width) for span in channels), shifted(heads, shape.width + all_channels)]
        total = shape.width + all_channels + shape.num_heads
        self.in_proj = Linear([("in_proj", total)], hidden_size, context, bias=shape.bias, rows=rows)
        for name in ("dt_bias", "A_log", "D"):
            self.add_weight(name, take_rows([WeightShard(name, (shape.num_heads,))], [heads]), dtype=torch.float32)
        self.norm = None if shape.eps is None else GroupsNorm(shape, shape.eps, inner, context)
        self.out_proj = RowLinear("out_proj", shape.width, hidden_size, context, span=inner, bias=shape.output_bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Go on with the states of the step's sequences, and return [T, hidden_size] of x [T, hidden_size]."""
        shape, tokens, heads = self.shape, len(x), self._widths[-1]
        parts = torch.split(self.in_proj(x), self._widths, dim=-1)
        gate, *mixed, times = (
            part if factor == 1.0 else part * factor for part, factor in zip(parts, shape.factors, strict=True)
        )
        kept, state = self.read(step)
        joined, kept = self.conv1d(torch.cat(mixed, dim=-1), step, kept)
        joined = ACTIVATIONS[shape.activation](joined).to(x.dtype).float()
        inputs, b, c = torch.split(joined, self._widths[1:-1], dim=-1)
        inputs = inputs.reshape(tokens, heads, shape.head_dim)
        b, c = (self._by_head(each) for each in (b, c))
        times = functional.softplus(times.float() + self.dt_bias).clamp_min(shape.least_time)
        a = -self.A_log.exp()
        one, scan = partial(state_step, a=a), partial(state_scan, a=a)
        out = over_sequences(step, one, scan, state, (inputs, times, b, c)) + self.D[:, None] * inputs
        self.write(step, kept, state)
        return self.out_proj(self._gated(out.flatten(1), functional.silu(gate.float())).to(x.dtype))  # type: ignore[no-any-return]

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        if self.norm is None:
            return out * gate
        return self.norm(out) * gate if self.shape.norm_first else self.norm(out * gate)  # type: ignore[no-any-return]

    def _by_head(self, directions: Tensor) -> Tensor:
        """Return the directions [T, heads, state_size] of groups' [T, groups * state_size]."""
        of_groups = directions.reshape(len(directions), -1, self.shape.state_size)
        return of_groups.repeat_interleave(self._widths[-1] // of_groups.shape[1], dim=1)

    def tensor_obstacle(self, size: int) -> str | None:
        """Return why the layer cannot be divided among `size` ranks, or None."""
        shape = self.shape
        most, what = (shape.num_heads, "heads") if shape.num_groups == 1 else (shape.num_groups, "groups of heads")
        return None if size <= most else f"{most} {what} of a Mamba mixer are fewer than {size} ranks"


class GroupsNorm(Layer):
    """RMSNorm over each group's heads, in float32. Where the ranks share one group, the mean square is that of all ranks' heads."""

    weight: Tensor

    def __init__(self, shape: MambaShape, eps: float, span: Span, context: ModelContext) -> None:
        super().__init__()
        self.eps, self.group_size = eps, shape.width // shape.num_groups
        self._ranks = context.ranks.tensor if shape.num_groups == 1 else None
        self.add_weight("weight", take_rows([WeightShard("weight", (shape.width,))], [span]), dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Return the rank's x float32[T, width] normalised."""
        groups = x.view(len(x), -1, min(self.group_size, x.shape[1]))
        squares = groups.pow(2).sum(-1, keepdim=True)
        if self._ranks is not None and len(x):
            self._ranks.all_reduce(squares)
        return (groups * torch.rsqrt(squares / self.group_size + self.eps)).flatten(1) * self.weight
