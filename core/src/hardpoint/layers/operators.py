"""The kernel set's operators in plain torch, for devices whose backend has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hardpoint.interfaces.kernels import Activation, KernelSet
from hardpoint.layers.experts import gated

if TYPE_CHECKING:
    from torch import Tensor


class TorchOperators(KernelSet):
    """Operators that run wherever torch does; weights of norms may be float32 whatever the activations are."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        cos, sin = cos[positions][:, None], sin[positions][:, None]
        half = cos.shape[-1]
        for x in (q, k):
            first, second = x[..., :half].float(), x[..., half : 2 * half].float()
            x[..., : 2 * half] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        return gated(x, activation)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)


TORCH_OPERATORS = TorchOperators()
"""The one instance; it has no state."""
