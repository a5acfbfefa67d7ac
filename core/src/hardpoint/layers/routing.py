"""Routers that score experts otherwise than by the softmax of all logits (DeepSeek-V2, arXiv:2405.04434; V3, arXiv:2412.19437)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from hardpoint.layers.weights import Layer, WeightShard

if TYPE_CHECKING:
    from hardpoint.layers.context import ModelContext

_LEAST = 1e-30
"""Of a share, so that its logarithm is a number."""


@dataclass(frozen=True)
class Routing:
    """How a token's experts are chosen and weighed.

    Attributes:
        num_experts, top_k: of how many experts each token goes through how many.
        groups, top_groups: neighbouring experts form groups, of which only the best ones' experts are chosen.
        sigmoid: an expert's score is the sigmoid of its logit, and the best two of a group count; otherwise the softmax, and the best one.
        correction: a bias is added to the scores for the choice (`e_score_correction_bias`), and not to the weights.
        renormalise: the weights of a token's experts add up to 1, before they are scaled.
        scale: of the weights.
    """

    num_experts: int
    top_k: int
    groups: int = 1
    top_groups: int = 1
    sigmoid: bool = False
    correction: bool = False
    renormalise: bool = False
    scale: float = 1.0


class GroupedRouter(Layer):
    """Scores in float32, the same on all ranks.

    Any weights are passed to an operator whose weights are the softmax of logits: a chosen expert's logit is the logarithm of its share of
    the sum, the others' are minus infinity, and what the operator returns is multiplied by the sum.
    """

    weight: Tensor

    def __init__(self, routing: Routing, hidden_size: int, context: ModelContext) -> None:
        super().__init__()
        self.routing = routing
        self.add_weight("weight", [WeightShard("weight", (routing.num_experts, hidden_size))], dtype=context.dtype)
        self.e_score_correction_bias: Tensor | None
        if routing.correction:
            bias = WeightShard("e_score_correction_bias", (routing.num_experts,))
            self.add_weight("e_score_correction_bias", [bias], dtype=torch.float32)
        else:
            self.e_score_correction_bias = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits [T, num_experts], sums [T, 1]), float32, of x [T, hidden_size]."""
        asked = self.routing
        logits = functional.linear(x.float(), self.weight.float())
        scores = logits.sigmoid() if asked.sigmoid else logits.softmax(-1)
        ranked = self._ranked(scores)
        chosen = ranked.topk(asked.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if not asked.sigmoid:
            # Where the best groups have too few experts, others are chosen for nothing.
            weights = weights.masked_fill(ranked.gather(1, chosen).isneginf(), 0.0)
        sums = weights.sum(-1, keepdim=True).clamp_min(_LEAST)
        shares = (weights / sums).clamp_min(_LEAST).log()
        logits = torch.full_like(scores, -torch.inf).scatter_(1, chosen, shares)
        return logits, torch.full_like(sums, asked.scale) if asked.renormalise else sums * asked.scale

    def _ranked(self, scores: Tensor) -> Tensor:
        """Return the scores by which experts are chosen, minus infinity outside the best groups."""
        asked = self.routing
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if asked.top_groups < asked.groups:
            groups = scores.view(len(scores), asked.groups, -1)
            best = groups.topk(2 if asked.sigmoid else 1, dim=-1).values.sum(-1)
            left = torch.zeros_like(best).scatter_(1, best.topk(asked.top_groups, dim=-1).indices, 1.0)
            scores = groups.masked_fill(left[:, :, None] == 0, -torch.inf).flatten(1)
        return scores
