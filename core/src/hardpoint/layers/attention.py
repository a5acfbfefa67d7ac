"""A layer's attention: projections, rotary embedding, the cache, and the backend's attention over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hardpoint.layers.linear import QKVLinear, RowLinear, shard_heads
from hardpoint.layers.parallel import head_obstacle, head_spans, scaled
from hardpoint.layers.weights import Layer, WeightShard, take_rows

if TYPE_CHECKING:
    from hardpoint.interfaces.attention import AttentionBackend
    from hardpoint.interfaces.capabilities import AttentionLayer
    from hardpoint.layers.context import ModelContext
    from hardpoint.layers.rotary import RotaryEmbedding
    from hardpoint.layers.states import StateStep


@dataclass(frozen=True)
class Step:
    """What layers need of the step under way.

    Attributes:
        positions: int64[T], of each token in its sequence.
        attention: the backend's.
        metadata: what its `prepare` returned for each KV cache group of the step.
        kv_cache: the whole cache, all layers.
        places: each layer's KV cache group and its number there.
        token_types: int64[T], to which of two texts each token belongs (0 or 1); None where all are 0.
        states: for layers that keep recurrent states; None where no layer of the model does.
        embedded: tokens, int64[k], whose embeddings [k, hidden_size] are given; None where there are none.
    """

    positions: Tensor
    attention: AttentionBackend
    metadata: tuple[Any, ...]
    kv_cache: Tensor
    places: tuple[tuple[int, int], ...]
    token_types: Tensor | None = None
    states: StateStep | None = None
    embedded: tuple[Tensor, Tensor] | None = None


class AttentionOverCache(Layer):
    """A layer that attends over its part of the KV cache, by whole KV heads divided among the ranks.

    Attributes:
        layer: what the whole layer asks of the backend: heads, window, soft cap, sinks, scale.
        shard: what the rank's heads ask.

    Args:
        index: number of the layer among those of the model that attend.
    """

    def __init__(self, index: int, layer: AttentionLayer, context: ModelContext) -> None:
        super().__init__()
        self.layer, self.shard = layer, shard_heads(layer, context)
        self._index = index - context.first_layer

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step, sinks: Tensor | None = None) -> Tensor:
        """Write keys and values [T, kv_heads, head_dim] to the cache, if the layer has one, and return the attention of queries
        [T, heads, head_dim]."""
        group, index = step.places[self._index]
        cache, metadata = step.kv_cache, step.metadata[group]
        if self.layer.causal:
            cache = cache[index]
            step.attention.write_kv(index, k, v, cache, metadata)
        out = q.new_empty(*q.shape)
        step.attention.forward(index, q, k, v, cache, metadata, out, sinks=sinks)
        return out

    def tensor_obstacle(self, size: int) -> str | None:
        """Return why the layer cannot be divided among `size` ranks, or None."""
        return head_obstacle(self.layer, size)


class Attention(AttentionOverCache):
    """Multi-head attention with grouped keys and values (arXiv:2305.13245).

    Args:
        index: number of the layer among those of the model that attend.
        rotary: None for a layer that does not rotate.
        q_norm, k_norm: applied to each head [T, heads, head_dim] before rotary embedding.
        names: of the checkpoint's projections to q, k and v; a single one where it has them as one tensor.
        output: its projection of the heads.
    """

    def __init__(
        self,
        index: int,
        layer: AttentionLayer,
        hidden_size: int,
        rotary: RotaryEmbedding | None,
        context: ModelContext,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        output: str = "o_proj",
    ) -> None:
        super().__init__(index, layer, context)
        queries, _ = head_spans(layer, context.rank)
        width = layer.num_heads * layer.head_dim
        self.qkv_proj = QKVLinear(hidden_size, layer, context, bias=qkv_bias, names=names)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.rotary = rotary
        self.sinks: Tensor | None
        if layer.sinks:
            whole = WeightShard("sinks", (layer.num_heads,))
            self.add_weight("sinks", take_rows([whole], [queries]), dtype=torch.float32)
        else:
            self.sinks = None
        span = scaled(queries, layer.head_dim)
        self.o_proj = RowLinear(output, width, hidden_size, context, span=span, bias=output_bias)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Write the step's keys and values to the cache, if it has one, attend, and return [T, hidden_size] of x [T, hidden_size]."""
        heads, kv_heads, dim = self.shard.num_heads, self.shard.num_kv_heads, self.shard.head_dim
        qkv = self.qkv_proj(x).view(-1, heads + 2 * kv_heads, dim)
        q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            self.rotary(q, k, step.positions)
        out = self.attend(q, k, v, step, self.sinks)
        return self.o_proj(out.view(-1, heads * dim))  # type: ignore[no-any-return]
