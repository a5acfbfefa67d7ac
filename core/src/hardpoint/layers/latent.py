"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are expanded from one small latent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from hardpoint.interfaces.capabilities import AttentionLayer
from hardpoint.layers.attention import AttentionOverCache
from hardpoint.layers.linear import ColumnLinear, Linear, RowLinear
from hardpoint.layers.norm import RMSNorm
from hardpoint.layers.parallel import head_spans, scaled

if TYPE_CHECKING:
    from hardpoint.layers.attention import Step
    from hardpoint.layers.context import ModelContext
    from hardpoint.layers.rotary import RotaryEmbedding


_NORM_EPS = 1e-6
"""Of the latents' norms, whatever the configuration has for others."""


@dataclass(frozen=True)
class LatentShape:
    """The sizes of a layer's latents and heads.

    Attributes:
        num_heads: query heads; each has keys and values of its own.
        query_rank: elements of the queries' latent; None where queries are projected at once.
        kv_rank: elements of the latent of keys and values.
        nope_dim, rope_dim: elements of a key that are not rotated, and that are; the rotated ones are the same for all heads.
        value_dim: elements of a value.
        interleaved: neighbouring elements are rotated together; otherwise those half a head apart.
    """

    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True

    @property
    def key_dim(self) -> int:
        """Elements of a key."""
        return self.nope_dim + self.rope_dim

    def attention(self, scale: float) -> AttentionLayer:
        """Return what the layer asks of a backend: heads that hold a key, and a value with zeros behind it."""
        return AttentionLayer(self.num_heads, self.num_heads, max(self.key_dim, self.value_dim), scale)


class LatentAttention(AttentionOverCache):
    """Latent attention over a cache of expanded keys and values, by whole heads divided among the ranks.

    The cache holds what any backend's attention reads: for each head a key, and a value of the same length, filled up with zeros. That is
    far more than the latent, from which a backend could attend as well (one key of `kv_rank + rope_dim` elements for all heads, whose
    first `kv_rank` are the value), but none has heads of so many elements.

    Args:
        index: number of the layer in the model.
        bias: of the projections to the latents, and of the output's.
    """

    def __init__(
        self,
        index: int,
        shape: LatentShape,
        scale: float,
        hidden_size: int,
        rotary: RotaryEmbedding,
        context: ModelContext,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(index, shape.attention(scale), context)
        self.shape = shape
        self.rotary = rotary
        heads, _ = head_spans(self.layer, context.rank)
        queries, width = scaled(heads, shape.key_dim), shape.num_heads * shape.key_dim
        if shape.query_rank is None:
            self.q_proj = ColumnLinear("q_proj", hidden_size, width, context, span=queries)
        else:
            self.q_a_proj = Linear([("q_a_proj", shape.query_rank)], hidden_size, context, bias=bias)
            self.q_a_layernorm = RMSNorm(shape.query_rank, _NORM_EPS, context)
            self.q_b_proj = ColumnLinear("q_b_proj", shape.query_rank, width, context, span=queries)
        latent = shape.kv_rank + shape.rope_dim
        self.kv_a_proj_with_mqa = Linear([("kv_a_proj_with_mqa", latent)], hidden_size, context, bias=bias)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank, _NORM_EPS, context)
        expanded = shape.nope_dim + shape.value_dim
        span = scaled(heads, expanded)
        self.kv_b_proj = ColumnLinear("kv_b_proj", shape.kv_rank, shape.num_heads * expanded, context, span=span)
        span = scaled(heads, shape.value_dim)
        self.o_proj = RowLinear("o_proj", shape.num_heads * shape.value_dim, hidden_size, context, span=span, bias=bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Write the step's keys and values to the cache, attend, and return [T, hidden_size] of x [T, hidden_size]."""
        shape, heads, dim = self.shape, self.shard.num_heads, self.shard.head_dim
        queries = self._queries(x).view(-1, heads, shape.key_dim)
        q_nope, q_rope = torch.split(queries, [shape.nope_dim, shape.rope_dim], dim=-1)
        latent, k_rope = torch.split(self.kv_a_proj_with_mqa(x), [shape.kv_rank, shape.rope_dim], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(len(x), heads, -1)
        k_nope, v = torch.split(expanded, [shape.nope_dim, shape.value_dim], dim=-1)
        q_rope, k_rope = self._in_halves(q_rope), self._in_halves(k_rope[:, None])
        self.rotary(q_rope, k_rope, step.positions)
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, heads, -1)), dim=-1)
        q, k, v = (functional.pad(each, (0, dim - each.shape[-1])) for each in (q, k, v))
        out = self.attend(q, k, v, step)[..., : shape.value_dim]
        return self.o_proj(out.reshape(len(x), -1))  # type: ignore[no-any-return]

    def _queries(self, x: Tensor) -> Tensor:
        if self.shape.query_rank is None:
            return self.q_proj(x)  # type: ignore[no-any-return]
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))  # type: ignore[no-any-return]

    def _in_halves(self, x: Tensor) -> Tensor:
        """Return x with what is rotated together half a head apart, as the rotary table takes it. Queries and keys are permuted alike."""
        if not self.shape.interleaved:
            return x.contiguous()
        return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
