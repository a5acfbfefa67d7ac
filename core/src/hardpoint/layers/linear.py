"""Linear layers: merged where checkpoints have several tensors, divided among ranks by rows or by columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hardpoint.layers.activations import ACTIVATIONS, KERNEL_ACTIVATIONS
from hardpoint.layers.parallel import Span, aligned_spans, head_spans, scaled, shifted
from hardpoint.layers.weights import Layer, StoredWeight, WeightShard, take_rows

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.capabilities import AttentionLayer
    from hardpoint.interfaces.kernels import AdapterWeights
    from hardpoint.layers.context import ModelContext


class Linear(Layer):
    """`act(x @ weight.T + bias)`; the weight has the outputs as rows, as in torch.

    Args:
        tensors: (name, outputs) of the checkpoint's layers that this one is made of, beside it in the module that it is a part of.
        in_features: inputs of the whole layer.
        rows: outputs that the rank has, as spans of the stacked tensors; None for all.
        columns: inputs that the rank has; None for all.
        activation: one of `ACTIVATIONS`.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, int]],
        in_features: int,
        context: ModelContext,
        *,
        bias: bool = False,
        rows: Sequence[Span] | None = None,
        columns: Span | None = None,
        activation: str = "identity",
    ) -> None:
        super().__init__()
        self.activation = activation
        self._activate, self._known = ACTIVATIONS[activation], KERNEL_ACTIVATIONS.get(activation)
        self._adapters = context.adapters
        self._adapter_weights: AdapterWeights | None = None
        weights = [WeightShard(f"{name}.weight", (size, in_features), columns=columns) for name, size in tensors]
        shards = _taken(weights, rows)
        size = sum(shard.num_rows for shard in shards)
        width = in_features if columns is None else columns[1] - columns[0]
        self.method = method = context.linear_method(size, width, context.dtype)
        stored = StoredWeight(shards, method.write, method.verbatim)
        self.add_stored("weight", stored, method.create(size, width, context.dtype))
        self.bias: Tensor | None
        if bias:
            biases = [WeightShard(f"{name}.bias", (size,)) for name, size in tensors]
            self.add_weight("bias", _taken(biases, rows), dtype=context.dtype)
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., outputs] of x [..., inputs]; within a step, with what the adapters of its tokens add before the activation."""
        adapters, weights = self._adapters, self._adapter_weights
        if adapters is not None and weights is not None and adapters.rows is not None:
            product = self.method.multiply(self, x, self.bias)
            adapters.add(product, x, weights)
            return self._activate(product)
        out = None if self._known is None else self.method.multiply_activated(self, x, self.bias, self._known)
        return self._activate(self.method.multiply(self, x, self.bias)) if out is None else out

    def take_adapters(self, weights: AdapterWeights) -> None:
        """Add from here on what adapters in these slots make of the inputs."""
        self._adapter_weights = weights


def _taken(shards: Sequence[WeightShard], rows: Sequence[Span] | None) -> tuple[WeightShard, ...]:
    return tuple(shards) if rows is None else take_rows(shards, rows)


class ColumnLinear(Linear):
    """A layer whose outputs are divided among the ranks; each goes on with its own.

    Args:
        span: outputs that this rank has.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        context: ModelContext,
        *,
        span: Span,
        bias: bool = False,
        activation: str = "identity",
    ) -> None:
        rows = None if context.rank.tensor_size == 1 else [span]
        super().__init__([(name, out_features)], in_features, context, bias=bias, rows=rows, activation=activation)


class RowLinear(Linear):
    """A layer whose inputs are divided among the ranks; their parts of the output are summed.

    Args:
        span: inputs that this rank has.
    """

    def __init__(
        self, name: str, in_features: int, out_features: int, context: ModelContext, *, span: Span, bias: bool = False
    ) -> None:
        rank = context.rank
        columns = None if rank.tensor_size == 1 else span
        # All ranks' parts are summed, so that only one adds the bias.
        bias = bias and rank.tensor_rank == 0
        super().__init__([(name, out_features)], in_features, context, bias=bias, columns=columns)
        self._ranks = context.ranks.tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return [rows, outputs] of this rank's x [rows, inputs], summed over the ranks."""
        out = super().forward(x)
        if self._ranks is not None and out.shape[0]:
            self._ranks.all_reduce(out)
        return out


class QKVLinear(Linear):
    """The projections to queries, keys and values in one: rows of q, then k, then v, of this rank's heads.

    Args:
        layer: the whole layer's heads.
        names: of the checkpoint's three layers; a single one where it has them as one tensor.
    """

    def __init__(
        self,
        hidden_size: int,
        layer: AttentionLayer,
        context: ModelContext,
        *,
        bias: bool = False,
        names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
    ) -> None:
        dim = layer.head_dim
        q, kv = layer.num_heads * dim, layer.num_kv_heads * dim
        tensors = [(names[0], q + 2 * kv)] if len(names) == 1 else list(zip(names, (q, kv, kv), strict=True))
        rows = None
        if context.rank.tensor_size > 1:
            queries, keys = (scaled(span, dim) for span in head_spans(layer, context.rank))
            rows = [queries, shifted(keys, q), shifted(keys, q + kv)]
        super().__init__(tensors, hidden_size, context, bias=bias, rows=rows)


class GateUpLinear(Linear):
    """The two projections into a gated feed-forward in one: rows of gate, then up.

    Args:
        names: of the checkpoint's two layers; a single one where it has them as one tensor.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        context: ModelContext,
        *,
        names: tuple[str, ...] = ("gate_proj", "up_proj"),
    ) -> None:
        inner = intermediate_size
        tensors = [(names[0], 2 * inner)] if len(names) == 1 else [(name, inner) for name in names]
        rows = None
        if context.rank.tensor_size > 1:
            span = aligned_spans(inner, context.rank.tensor_size)[context.rank.tensor_rank]
            rows = [span, shifted(span, inner)]
        super().__init__(tensors, hidden_size, context, rows=rows)


def shard_heads(layer: AttentionLayer, context: ModelContext) -> AttentionLayer:
    """Return a layer with the heads that the rank has."""
    queries, keys = head_spans(layer, context.rank)
    return replace(layer, num_heads=queries[1] - queries[0], num_kv_heads=keys[1] - keys[0])
