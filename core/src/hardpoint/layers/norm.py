"""Root mean square normalisation (arXiv:1910.07467), and layer normalisation (arXiv:1607.06450)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from hardpoint.layers.operators import TORCH_OPERATORS
from hardpoint.layers.parallel import head_spans, scaled
from hardpoint.layers.weights import Layer, WeightShard, take_rows, write_rows

if TYPE_CHECKING:
    from hardpoint.interfaces.capabilities import AttentionLayer
    from hardpoint.layers.context import ModelContext


class RMSNorm(Layer):
    """`x / sqrt(mean(x²) + eps) * weight` over the last axis, computed in float32.

    Args:
        offset: added to the stored weight when it is loaded, for families that store `weight - 1`. The sum loses its precision
            when it is rounded to 8 bits, so it stays in float32, which only torch's operators take.
    """

    weight: Tensor

    def __init__(self, size: int, eps: float, context: ModelContext, *, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self._operators = TORCH_OPERATORS if offset else context.operators
        self.add_weight(
            "weight",
            [WeightShard("weight", (size,))],
            dtype=torch.float32 if offset else context.dtype,
            write=partial(_write_offset, offset) if offset else write_rows,
            verbatim=not offset,
        )

    def forward(self, x: Tensor, branch: Tensor | None = None) -> Tensor:
        """Return x [..., size] normalised. Where a branch is given, it is added to x first, in place, in the same launch."""
        if branch is None:
            return self._operators.rms_norm(x, self.weight, self.eps)
        return self._operators.add_rms_norm(branch, x, self.weight, self.eps)


class HeadsNorm(Layer):
    """RMSNorm over all query heads, or all key heads, at once. A rank has the weights of its heads; the mean square is that of all ranks'.

    Args:
        layer: the whole layer's heads.
        of_keys: over the key heads.
    """

    weight: Tensor

    def __init__(self, layer: AttentionLayer, eps: float, context: ModelContext, *, of_keys: bool = False) -> None:
        super().__init__()
        self.eps = eps
        heads = layer.num_kv_heads if of_keys else layer.num_heads
        self.size = heads * layer.head_dim
        self._operators, self._ranks = context.operators, context.ranks.tensor
        # Where ranks outnumber KV heads, several have the same one.
        self._copies = max(1, context.rank.tensor_size // layer.num_kv_heads) if of_keys else 1
        span = scaled(head_spans(layer, context.rank)[of_keys], layer.head_dim)
        self.add_weight("weight", take_rows([WeightShard("weight", (self.size,))], [span]), dtype=context.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the rank's heads x [T, heads, head_dim] normalised."""
        rows = x.reshape(len(x), -1)
        if self._ranks is None:
            return self._operators.rms_norm(rows, self.weight, self.eps).view(x.shape)
        wide = rows.float()
        squares = wide.pow(2).sum(-1, keepdim=True)
        self._ranks.all_reduce(squares)
        scale = torch.rsqrt(squares / (self._copies * self.size) + self.eps)
        return (wide * scale * self.weight).to(x.dtype).view(x.shape)


class LayerNorm(Layer):
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last axis.

    Args:
        name: of the checkpoint's layer, beside it in the module that it is a part of.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, name: str, size: int, eps: float, context: ModelContext, *, bias: bool = True) -> None:
        super().__init__()
        self.eps, self.size = eps, size
        self._operators = context.operators
        self.add_weight("weight", [WeightShard(f"{name}.weight", (size,))], dtype=context.dtype)
        if bias:
            self.add_weight("bias", [WeightShard(f"{name}.bias", (size,))], dtype=context.dtype)
        else:
            self.bias = None

    def forward(self, x: Tensor, branch: Tensor | None = None) -> Tensor:
        """Return x [..., size], or the sum of x and a branch, normalised."""
        out = self._operators.layer_norm(x, self.weight, self.bias, self.eps, branch)
        if out is not None:
            return out
        return functional.layer_norm(
            x if branch is None else x + branch, (self.size,), self.weight, self.bias, self.eps
        )


def _write_offset(offset: float, stored: Tensor, row: int, values: Tensor) -> None:
    stored[row : row + len(values)].copy_(values.float() + offset)
