"""The gated delta rule (arXiv:2412.06464) in plain torch: one token at a time, and in chunks whose tokens are solved for at once.

A head's state S [keys, values] becomes `a S + k (b (v - (a S)ᵀ k))ᵀ` with a token's decay a = exp(g), rate b, key k and value v, and the
token's output is `Sᵀ q` of it. Everything is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 64


def delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (outputs [B, H, values], states) after one token of each of B sequences.

    Args:
        state: [B, H, keys, values].
        q, k: [B, H, keys].
        v: [B, H, values].
        g, b: [B, H].
    """
    state = state * g.exp()[:, :, None, None]
    update = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * b[:, :, None]
    state = state + k[..., None] * update[:, :, None]
    return torch.einsum("bhkv,bhk->bhv", state, q), state


def delta_scan(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return (outputs [L, H, values], state) after a sequence's next L tokens, of which those of a chunk are solved for together.

    With u the update that a token writes along its key and G the sum of g up to it in the chunk,
    `u_t = b_t (v_t - exp(G_t) S₀ᵀ k_t - Σ_{s<t} exp(G_t - G_s) (k_t · k_s) u_s)`: a triangular system.

    Args:
        state: [H, keys, values].
        q, k: [L, H, keys].
        v: [L, H, values].
        g, b: [L, H].
    """
    outputs = []
    for first in range(0, len(q), _CHUNK):
        some = slice(first, first + _CHUNK)
        queries, keys, values = (each[some].transpose(0, 1) for each in (q, k, v))
        rates, decays = b[some].T[..., None], g[some].T.cumsum(-1)
        between = (decays[:, :, None] - decays[:, None]).tril().exp().tril()
        since, left = decays.exp()[..., None], (decays[:, -1:] - decays).exp()[..., None]
        system = (keys @ keys.transpose(1, 2)) * between * rates
        known = rates * (values - since * (keys @ state))
        updates = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        within = (queries @ keys.transpose(1, 2)) * between
        outputs.append((since * (queries @ state) + within @ updates).transpose(0, 1))
        state = state * since[:, -1:] + (keys * left).transpose(1, 2) @ updates
    return torch.cat(outputs), state
