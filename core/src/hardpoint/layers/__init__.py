"""The layers that models are made of. Each knows its shape, its rank's shard of it, and which checkpoint tensors it is stored from.

A model is built on torch's meta device from a `ModelContext` (dtype, rank, operators), before anything is allocated or read; what it
asks of attention and of its checkpoint is then read off its layers. Nothing here knows a family, a file format or a device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.layers.attention import Attention, AttentionOverCache, Step
    from hardpoint.layers.context import ModelContext
    from hardpoint.layers.convolution import CausalConvolution
    from hardpoint.layers.embedding import LMHead, SmallEmbedding, VocabEmbedding
    from hardpoint.layers.latent import LatentAttention, LatentShape
    from hardpoint.layers.linear import ColumnLinear, GateUpLinear, Linear, QKVLinear, RowLinear
    from hardpoint.layers.mamba import Mamba2, MambaShape
    from hardpoint.layers.mlp import GatedMLP
    from hardpoint.layers.moe import Experts, ExpertsShape, MixtureOfExperts
    from hardpoint.layers.norm import HeadsNorm, LayerNorm, RMSNorm
    from hardpoint.layers.operators import TORCH_OPERATORS, TorchOperators
    from hardpoint.layers.parallel import ParallelRank, Ranks
    from hardpoint.layers.rope import Rope
    from hardpoint.layers.rotary import RotaryEmbedding
    from hardpoint.layers.routing import GroupedRouter, Routing
    from hardpoint.layers.states import LayerWithStates, StateTensor
    from hardpoint.layers.weights import Layer, StoredWeight, WeightShard

__all__ = [
    "TORCH_OPERATORS",
    "Attention",
    "AttentionOverCache",
    "CausalConvolution",
    "ColumnLinear",
    "Experts",
    "ExpertsShape",
    "GateUpLinear",
    "GatedMLP",
    "GroupedRouter",
    "HeadsNorm",
    "LMHead",
    "LatentAttention",
    "LatentShape",
    "Layer",
    "LayerNorm",
    "LayerWithStates",
    "Linear",
    "Mamba2",
    "MambaShape",
    "MixtureOfExperts",
    "ModelContext",
    "ParallelRank",
    "QKVLinear",
    "RMSNorm",
    "Ranks",
    "Rope",
    "RotaryEmbedding",
    "Routing",
    "RowLinear",
    "SmallEmbedding",
    "StateTensor",
    "Step",
    "StoredWeight",
    "TorchOperators",
    "VocabEmbedding",
    "WeightShard",
]

# Resolved on first use: what divides a model among ranks is asked for where torch is not wanted.
_HOMES = {
    "TORCH_OPERATORS": "hardpoint.layers.operators",
    "Attention": "hardpoint.layers.attention",
    "AttentionOverCache": "hardpoint.layers.attention",
    "CausalConvolution": "hardpoint.layers.convolution",
    "ColumnLinear": "hardpoint.layers.linear",
    "Experts": "hardpoint.layers.moe",
    "ExpertsShape": "hardpoint.layers.moe",
    "GateUpLinear": "hardpoint.layers.linear",
    "GatedMLP": "hardpoint.layers.mlp",
    "GroupedRouter": "hardpoint.layers.routing",
    "LMHead": "hardpoint.layers.embedding",
    "LatentAttention": "hardpoint.layers.latent",
    "LatentShape": "hardpoint.layers.latent",
    "Layer": "hardpoint.layers.weights",
    "LayerNorm": "hardpoint.layers.norm",
    "LayerWithStates": "hardpoint.layers.states",
    "Linear": "hardpoint.layers.linear",
    "Mamba2": "hardpoint.layers.mamba",
    "MambaShape": "hardpoint.layers.mamba",
    "MixtureOfExperts": "hardpoint.layers.moe",
    "ModelContext": "hardpoint.layers.context",
    "ParallelRank": "hardpoint.layers.parallel",
    "QKVLinear": "hardpoint.layers.linear",
    "HeadsNorm": "hardpoint.layers.norm",
    "RMSNorm": "hardpoint.layers.norm",
    "Ranks": "hardpoint.layers.parallel",
    "Rope": "hardpoint.layers.rope",
    "RotaryEmbedding": "hardpoint.layers.rotary",
    "Routing": "hardpoint.layers.routing",
    "RowLinear": "hardpoint.layers.linear",
    "SmallEmbedding": "hardpoint.layers.embedding",
    "StateTensor": "hardpoint.layers.states",
    "Step": "hardpoint.layers.attention",
    "StoredWeight": "hardpoint.layers.weights",
    "TorchOperators": "hardpoint.layers.operators",
    "VocabEmbedding": "hardpoint.layers.embedding",
    "WeightShard": "hardpoint.layers.weights",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hardpoint.layers' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
