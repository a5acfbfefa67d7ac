"""What all layers of a model have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hardpoint.interfaces.kernels import KernelSet
from hardpoint.layers.adapters import AdapterSlots
from hardpoint.layers.operators import TORCH_OPERATORS
from hardpoint.layers.parallel import ALONE, NO_OTHERS, ParallelRank, Ranks
from hardpoint.quantization import MethodOfShape, dense


@dataclass(frozen=True)
class ModelContext:
    """What a model is built with.

    Attributes:
        dtype: of weights and activations.
        rank: whose shard of the model is built.
        ranks: the others, where the model is to run and not only to be described.
        operators: norms, rotary embedding, activations and argmax: the backend's, or torch's.
        linear_method: chooses how a linear layer stores its weight.
        max_context: rows of the rotary tables; 0 where the model is only described.
        first_layer: number of the stage's first layer.
        adapters: what linear layers add to their products; None for a model without adapters.
    """

    dtype: torch.dtype
    rank: ParallelRank = ALONE
    ranks: Ranks = NO_OTHERS
    operators: KernelSet = TORCH_OPERATORS
    linear_method: MethodOfShape = dense
    max_context: int = 0
    first_layer: int = 0
    adapters: AdapterSlots | None = None
