"""Mamba 2's state-space recurrence (arXiv:2405.21060) in plain torch: one token at a time, and in chunks.

A head's state h [values, states] becomes `exp(t a) h + t x bᵀ` with a token's time step t, input x and directions b and c, and the token's
output is `h c` of it. Everything is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 64


def state_step(state: Tensor, x: Tensor, t: Tensor, b: Tensor, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return (outputs [B, H, values], states) after one token of each of B sequences.

    Args:
        state: [B, H, values, states].
        x: [B, H, values].
        t: [B, H], after softplus.
        b, c: [B, H, states].
        a: [H], negative.
    """
    state = state * (t * a).exp()[..., None, None] + (t[..., None] * x)[..., None] * b[:, :, None]
    return torch.einsum("bhvs,bhs->bhv", state, c), state


def state_scan(state: Tensor, x: Tensor, t: Tensor, b: Tensor, c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return (outputs [L, H, values], state) after a sequence's next L tokens.

    Within a chunk a token's output is a weighted sum of the inputs before it, as in attention, and what the chunk began with.

    Args:
        state: [H, values, states].
        x: [L, H, values].
        t: [L, H], after softplus.
        b, c: [L, H, states].
        a: [H], negative.
    """
    outputs = []
    for first in range(0, len(x), _CHUNK):
        some = slice(first, first + _CHUNK)
        inputs, into, out_of = ((each[some]).transpose(0, 1) for each in (x * t[..., None], b, c))
        decays = (t[some] * a).T.cumsum(-1)
        between = (decays[:, :, None] - decays[:, None]).tril().exp().tril()
        since, left = decays.exp()[..., None], (decays[:, -1:] - decays).exp()[..., None]
        within = (out_of @ into.transpose(1, 2)) * between
        outputs.append((within @ inputs + since * (out_of @ state.transpose(1, 2))).transpose(0, 1))
        state = state * since[:, -1:] + inputs.transpose(1, 2) @ (into * left)
    return torch.cat(outputs), state
