"""Short causal convolutions of each channel over a sequence's last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hardpoint.layers.parallel import Span, length
from hardpoint.layers.states import StateTensor, states_of
from hardpoint.layers.weights import Layer, WeightShard, take_rows

if TYPE_CHECKING:
    from hardpoint.layers.attention import Step
    from hardpoint.layers.context import ModelContext


class CausalConvolution(Layer):
    """A kernel for each of the rank's channels.

    Args:
        channels: of the whole layer.
        kernel: tokens that an output sees, its own included.
        spans: channels that the rank has.
    """

    weight: Tensor

    def __init__(
        self, channels: int, kernel: int, spans: Sequence[Span], context: ModelContext, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.kernel, self.channels = kernel, sum(map(length, spans))
        weight = WeightShard("weight", (channels, 1, kernel))
        self.add_weight("weight", take_rows([weight], spans), dtype=context.dtype)
        self.bias: Tensor | None
        if bias:
            self.add_weight("bias", take_rows([WeightShard("bias", (channels,))], spans), dtype=context.dtype)
        else:
            self.bias = None

    @property
    def state(self) -> StateTensor:
        """What is kept of a sequence: the last inputs."""
        return StateTensor((self.kernel - 1, self.channels), self.weight.dtype)

    def forward(self, x: Tensor, step: Step, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32[T, channels] of x [T, channels], and the state after the step; see `causal_convolution`."""
        return causal_convolution(step, x, self.weight[:, 0], self.bias, state)


def causal_convolution(
    step: Step, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Convolve each channel of each sequence over its last tokens, in float32.

    Args:
        x: [T, channels].
        weight: [channels, kernel], the newest token's last.
        bias: [channels].
        state: [R, kernel - 1, channels], the inputs before the step's.

    Returns:
        float32[T, channels], and the state after the step.
    """
    given, kept = states_of(step), weight.shape[1] - 1
    tokens, count = torch.arange(len(x), device=x.device), torch.arange(len(state), device=x.device)
    # Each sequence's tokens, with what was kept of those before in front of them.
    begins = (given.first_tokens + count * kept)[:, None] + torch.arange(kept, device=x.device)
    firsts = tokens + given.owners * kept
    joined = torch.empty((len(x) + len(state) * kept, x.shape[1]), dtype=torch.float32, device=x.device)
    joined.index_copy_(0, begins.flatten(), state.flatten(0, 1).float())
    joined.index_copy_(0, firsts + kept, x.float())
    wide = weight.float()
    out = torch.zeros_like(x, dtype=torch.float32) if bias is None else bias.float().expand(x.shape)
    for place in range(kept + 1):
        out = out + joined[firsts + place] * wide[:, place]
    ends = torch.cat((given.first_tokens[1:], given.first_tokens.new_full((1,), len(x))))
    after = joined[(ends + count * kept)[:, None] + torch.arange(kept, device=x.device)]
    return out, after
