"""The kernel set: torch_npu's fused operators for what lies between the matrix products and attention; everything else is torch's.

In torch's own operators a norm is six to ten launches, a gated activation three, the rotation of queries and keys about twenty.
No device has run this yet; `operators.py` has the operators' schemas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from hardpoint.interfaces.kernels import Activation, KernelSet
from hardpoint_ascend.operators import RMS_NORM, ROTATE, SWIGLU

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces import Device


class AscendKernels(KernelSet):
    """Norms, rotary embedding and gated activations over torch_npu.

    Raises:
        CapabilityRefused, BackendBroken: as `Operator.bind` does.
    """

    def __init__(self, device: Device) -> None:
        self._rms_norm, self._rotate, self._swiglu = RMS_NORM.bind(), ROTATE.bind(), SWIGLU.bind()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return RMSNorm over the last axis, computed in float32, in x's dtype."""
        normalised: Tensor = self._rms_norm(x.contiguous(), weight, eps)[0]
        return normalised

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place, and return RMSNorm of the sum.

        Two launches, as it would be by `npu_add_rms_norm`, which does not work in place: its sum would have to be copied.
        """
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate q [T, heads, dim] and k [T, kv_heads, dim] in place (halves); cos, sin float32[max, rotary_dim / 2].

        In float32, as everywhere: angles in bfloat16 would cost two digits of a rotated element.
        """
        r1, r2 = (torch.cat((table, table), -1)[None, :, None] for table in (cos[positions], sin[positions]))
        for x in (q, k):
            part = x[..., : r1.shape[-1]]
            part.copy_(self._rotate(part[None].float(), r1, r2, "half")[0])

    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Return the activation of the gates x[..., :n] and x[..., n:]."""
        if activation is Activation.SILU:
            gated: Tensor = self._swiglu(x.contiguous(), -1)
            return gated
        gate, up = x.chunk(2, dim=-1)
        if activation in (Activation.GELU, Activation.GELU_TANH):
            return functional.gelu(gate, approximate="none" if activation is Activation.GELU else "tanh") * up
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)

    def argmax(self, logits: Tensor) -> Tensor:
        """Return int64[rows], the lowest index of the highest value in each row."""
        return logits.argmax(dim=-1)
