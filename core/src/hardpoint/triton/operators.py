"""A kernel set in Triton: what lies between the matrix products and attention, in one launch each, the experts of mixtures, adapters, and
products with weights in blocks.

Other matrix products and the argmax are torch's, whose libraries have the best ones.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from hardpoint.interfaces.attention import Refusal
from hardpoint.interfaces.errors import CapabilityRefused
from hardpoint.interfaces.kernels import (
    Activation,
    ExpertsProgram,
    ExpertsRequest,
    KernelSet,
    LinearProgram,
    LinearRequest,
)
from hardpoint.triton.dispatch import Launch
from hardpoint.triton.tiles import padded

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.backend import Device
    from hardpoint.interfaces.blocks import BlockFormat
    from hardpoint.interfaces.kernels import AdapterRows, AdapterWeights
    from hardpoint.interfaces.sampling import SamplingTables

ACTIVATIONS = (Activation.SILU, Activation.GELU_TANH, Activation.CLAMPED_SWIGLU, Activation.GELU)
"""By the numbers that the kernels know them by."""
_ROTARY_HEADS = 16
"""Heads that one program rotates."""
_ACTIVATION_BLOCK = 1024
_SAMPLING_BLOCK = 1024
"""Logits that a program looks at together."""


class TritonKernels(KernelSet):
    """Norms, rotary embedding and gated activations of rows, for any device that Triton compiles for, and its interpreter.

    Raises:
        CapabilityRefused: triton is not installed.
    """

    def __init__(self, device: Device) -> None:
        if importlib.util.find_spec("triton") is None:
            raise CapabilityRefused(
                f"operators in Triton were asked for on '{device.name}'",
                ["the package triton is not installed (it comes with `pip install 'hardpoint[triton]'`)"],
            )
        rows: Any = importlib.import_module("hardpoint.triton.row_kernels")
        sampling: Any = importlib.import_module("hardpoint.triton.sampling_kernels")
        self._rms_norm = cache(lambda width: Launch(rows.rms_norm, norm_constants(width)))
        self._add_rms_norm = cache(lambda width: Launch(rows.add_rms_norm, norm_constants(width)))
        self._rotary = cache(lambda *shape: Launch(rows.rotary, rotary_constants(*shape)))
        self._gated = cache(lambda *what: Launch(rows.gated_activation, activation_constants(*what)))
        self._sample = cache(lambda width: Launch(sampling.sample, sampling_constants(width)))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return RMSNorm over the last axis of x, which has two or three axes, computed in float32, in x's dtype."""
        shape = x.shape
        out = x.new_empty(*shape)
        rows, width = prod(shape[:-1]), shape[-1]
        if rows:
            outer, inner, count = (*x.stride()[:2], shape[1]) if len(shape) == 3 else (x.stride(0), 0, 1)
            self._rms_norm(width)((rows, 1, 1), (x, weight, out), eps, outer, inner, count)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x [rows, width] to `residual` in place, and return RMSNorm of the sum as it was rounded."""
        rows, width = x.shape
        out = x.new_empty(rows, width)
        if rows:
            tensors = (x, residual, weight, out)
            self._add_rms_norm(width)((rows, 1, 1), tensors, eps, x.stride(0), residual.stride(0))
        return out

    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate q [T, heads, dim] and k [T, kv_heads, dim] in place (halves); cos, sin float32[max, rotary_dim / 2]."""
        tokens, q_heads, _ = q.shape
        if not tokens:
            return
        k_heads = k.shape[1]
        launch = self._rotary(q_heads, k_heads, cos.shape[1])
        heads = launch.constants["HEADS"]
        grid = (tokens, -(-q_heads // heads) + -(-k_heads // heads), 1)
        launch(grid, (q, k, positions, cos, sin), *q.stride()[:2], *k.stride()[:2])

    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Return the activation of the gates x[:, :n] and x[:, n:], of x [rows, 2n]."""
        rows, width = x.shape[0], x.shape[1] // 2
        out = x.new_empty(rows, width)
        if rows:
            launch = self._gated(width, activation)
            launch((rows, -(-width // launch.constants["BLOCK"]), 1), (x, out), x.stride(0))
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        """Return int64[rows], the lowest index of the highest value in each row; torch's reduction keeps to the lowest."""
        return logits.argmax(dim=-1)

    def sample(self, logits: Tensor, step: Tensor, tables: SamplingTables) -> Tensor | None:
        """Return a token for each row of logits, int64[S], and write it to the tables; see `KernelSet.sample`."""
        rows, width = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if rows:
            self._sample(width)(
                (rows, 1, 1),
                (
                    logits,
                    step,
                    tables.parameters,
                    tables.masks,
                    tables.biases,
                    tables.history,
                    tables.last_tokens,
                    tokens,
                ),
                logits.stride(0),
                rows,
                width,
                -(-width // 32),
            )
        return tokens

    def add_adapters(self, out: Tensor, x: Tensor, weights: AdapterWeights, rows: AdapterRows) -> bool:
        """Add what adapters make of rows; see `KernelSet.add_adapters`."""
        from hardpoint.triton.adapters import add_adapters

        add_adapters(out, x, weights, rows)
        return True

    def block_formats(self) -> frozenset[BlockFormat]:
        """Return the formats of blocks that there is a layout for."""
        from hardpoint.triton.blocks import LAYOUTS

        return frozenset(LAYOUTS)

    def plan_linear(self, request: LinearRequest) -> LinearProgram | Refusal:
        """Return the product with a weight in blocks in Triton; plain weights are left to torch, whose library has the best products."""
        from hardpoint.triton.blocks import TritonBlockLinear

        return super().plan_linear(request) if request.blocks is None else TritonBlockLinear(request)

    def plan_experts(self, request: ExpertsRequest) -> ExpertsProgram | Refusal:
        """Return the experts of a mixture in Triton."""
        from hardpoint.triton.experts import TritonExperts

        return TritonExperts(request)


def norm_constants(width: int) -> dict[str, int]:
    """Return the compile-time arguments of norms over `width` elements: a program has one row, eight elements a thread where it is wide."""
    pad = padded(width)
    return {"N": width, "N_PAD": pad, "num_warps": min(16, max(1, pad // 256))}


def rotary_constants(q_heads: int, k_heads: int, half: int) -> dict[str, int]:
    """Return the compile-time arguments of the rotation of heads by `half` angles."""
    heads = min(_ROTARY_HEADS, padded(max(q_heads, k_heads)))
    return {
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "HEADS": heads,
        "HALF": half,
        "HALF_PAD": padded(half),
        "num_warps": 4,
    }


def activation_constants(width: int, activation: Activation) -> dict[str, int]:
    """Return the compile-time arguments of a gated activation whose result has `width` elements."""
    return {
        "N": width,
        "BLOCK": min(_ACTIVATION_BLOCK, padded(width)),
        "ACTIVATION": ACTIVATIONS.index(activation),
        "num_warps": 4,
    }


def sampling_constants(width: int) -> dict[str, int]:
    """Return the compile-time arguments of sampling from rows of `width` logits."""
    block = min(_SAMPLING_BLOCK, padded(width))
    return {"BLOCK": block, "num_warps": min(4, max(1, block // 256))}
