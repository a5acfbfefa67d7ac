"""Mixtures of experts (arXiv:1701.06538, 2401.04088): a router sends each token through a few of many gated feed-forwards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hardpoint.interfaces.attention import Refusal
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.kernels import Activation, ExpertsRequest
from hardpoint.layers.experts import TorchExperts
from hardpoint.layers.linear import Linear
from hardpoint.layers.mlp import GatedMLP
from hardpoint.layers.parallel import Ranks, Span, aligned_obstacle, aligned_spans, length
from hardpoint.layers.weights import Layer, StoredWeight, WeightShard

if TYPE_CHECKING:
    from hardpoint.layers.context import ModelContext


@dataclass(frozen=True)
class ExpertsShape:
    """What the experts of a layer compute.

    Attributes:
        num_experts: how many there are.
        top_k: how many each token goes through.
        hidden_size, intermediate_size: of one expert, on all ranks together.
        renormalise: the weights of a token's experts add up to 1.
        names: of an expert's gate, up and down in the checkpoint.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    renormalise: bool = True
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


class Experts(Layer):
    """All experts of a layer, their inner elements divided among the ranks; each returns its part of the sum.

    They lie one after the other in two parameters, in the layout of whatever runs them: the kernel set's operator, or torch.
    """

    def __init__(self, shape: ExpertsShape, context: ModelContext) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.renormalise = shape.num_experts, shape.top_k, shape.renormalise
        self.intermediate_size, self.activation = shape.intermediate_size, shape.activation
        rank = context.rank
        self.span: Span = aligned_spans(shape.intermediate_size, rank.tensor_size)[rank.tensor_rank]
        request = ExpertsRequest(
            shape.num_experts,
            shape.top_k,
            shape.hidden_size,
            length(self.span),
            shape.activation,
            DType.of(context.dtype),
            shape.renormalise,
        )
        planned = context.operators.plan_experts(request)
        self.program = TorchExperts(request) if isinstance(planned, Refusal) else planned
        self.gate_up: Tensor
        self.down: Tensor
        self.gate_up_bias: Tensor | None
        self.down_bias: Tensor | None
        for name, stored, size in zip(
            ("gate_up", "down"), self.stored(shape, context), self.program.weight_shapes(), strict=True
        ):
            self.add_stored(name, stored, torch.empty(size, dtype=context.dtype, device="meta"))
        self.add_biases(shape, context)

    def stored(self, shape: ExpertsShape, context: ModelContext) -> tuple[StoredWeight, StoredWeight]:
        """Return where gates and ups, and downs, come from: here a tensor for each of every expert."""
        program = self.program
        gate, up, down = shape.names
        inner, part = shape.intermediate_size, None if context.rank.tensor_size == 1 else self.span
        plain = program.stores_plainly()
        gate_up = [
            WeightShard(f"experts.{expert}.{name}.weight", (inner, shape.hidden_size), rows=part)
            for expert in range(shape.num_experts)
            for name in (gate, up)
        ]
        downs = [
            WeightShard(f"experts.{expert}.{down}.weight", (shape.hidden_size, inner), columns=part)
            for expert in range(shape.num_experts)
        ]
        return (
            StoredWeight(tuple(gate_up), program.write_gate_up, plain),
            StoredWeight(tuple(downs), program.write_down, plain),
        )

    def add_biases(self, shape: ExpertsShape, context: ModelContext) -> None:
        """Add `gate_up_bias` and `down_bias`: here none."""
        self.gate_up_bias = self.down_bias = None

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return this rank's part of [T, hidden_size] of x [T, hidden_size] and the router's logits [T, num_experts]."""
        return self.program.run(x, logits, self.gate_up, self.down, self.gate_up_bias, self.down_bias)

    def tensor_obstacle(self, size: int) -> str | None:
        """Return why the layer cannot be divided among `size` ranks, or None."""
        return aligned_obstacle(self.intermediate_size, "experts' intermediate size", size)


class MixtureOfExperts(nn.Module):
    """Router, experts and, where there is one, a shared expert that every token goes through, behind a gate of its own.

    Args:
        shared_size: intermediate size of the shared expert; 0 for none.
    """

    def __init__(self, shape: ExpertsShape, context: ModelContext, *, shared_size: int = 0) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.gate = self.router(shape, context)
        self.experts = self.all_experts(shape, context)
        self.shared_expert: GatedMLP | None = None
        if shared_size:
            # Its part is summed over the ranks together with the experts'.
            alone = replace(context, ranks=Ranks())
            self.shared_expert = GatedMLP(hidden, shared_size, shape.activation, alone)
            self.shared_expert_gate = Linear([("shared_expert_gate", 1)], hidden, context)
        self._ranks = context.ranks.tensor

    def router(self, shape: ExpertsShape, context: ModelContext) -> Linear:
        """Return what gives each expert's logit."""
        return Linear([("gate", shape.num_experts)], shape.hidden_size, context)

    def all_experts(self, shape: ExpertsShape, context: ModelContext) -> Experts:
        """Return the experts."""
        return Experts(shape, context)

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, hidden_size] of x [T, hidden_size], summed over the ranks."""
        out: Tensor = self.experts(x, self.gate(x))
        if self.shared_expert is not None:
            out += torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        if self._ranks is not None and len(out):
            self._ranks.all_reduce(out)
        return out
