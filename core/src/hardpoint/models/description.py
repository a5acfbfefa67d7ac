"""A model of a known family before anything of it is allocated or read: what it computes, and how it can be divided."""

from __future__ import annotations

import math
from dataclasses import is_dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.attention import Refusal
from hardpoint.interfaces.errors import CapabilityRefused, ModelError
from hardpoint.layers import ModelContext, ParallelRank, RotaryEmbedding
from hardpoint.models.decoder import tensor_obstacles
from hardpoint.models.registry import family_of
from hardpoint.weights.loading import ModelWeights

if TYPE_CHECKING:
    from torch import nn

    from hardpoint.interfaces.capabilities import AttentionLayer
    from hardpoint.interfaces.dtypes import DType
    from hardpoint.models.config import ModelConfig
    from hardpoint.models.family import Family


class ModelDescription:
    """A configuration that a family of the core can run.

    Attributes:
        whole: the whole model, on the meta device.
    """

    def __init__(self, family: type[Family], config: ModelConfig, dtype: DType) -> None:
        self._family, self.config, self.dtype = family, config, dtype
        try:
            self.whole = family(config, ModelContext(dtype.to_torch()))
        except RuntimeError as error:  # of sizes whose product torch cannot count
            raise ModelError(f"{config.where} is not a usable configuration", found=str(error)) from error

    @classmethod
    def of(cls, config: ModelConfig, dtype: DType) -> ModelDescription | Refusal:
        """Return the description of a completed configuration, or why it cannot be run; raises ModelError for impossible values."""
        family = family_of(config.architecture)
        if family is None:
            return Refusal((f"{config.architecture} is none of the families that the core runs itself",))
        reasons = family.refusals(config)
        return Refusal(tuple(reasons)) if reasons else cls(family, config, dtype)

    def build(self, context: ModelContext) -> Family:
        """Return the model, or a rank's share of it, on the meta device; it has no `obstacles`."""
        return self._family(self.config, context)

    def attention_layers(self, rank: ParallelRank) -> tuple[AttentionLayer, ...]:
        """Return what each layer of a rank's share asks of attention."""
        share = self.whole if rank.is_alone else self.build(ModelContext(self.dtype.to_torch(), rank))
        return share.attention_layers()

    def weights_of(self, share: Family) -> ModelWeights:
        """Return a share's parameters and the checkpoint tensors of the whole model."""
        return ModelWeights(
            share.stored_weights(), self.checkpoint_shapes, self._optional, self._family.unused(self.config)
        )

    @cached_property
    def checkpoint_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every checkpoint tensor that the whole model is made of."""
        stored = self.whole.stored_weights().values()
        return {shard.name: shard.shape for weight in stored for shard in weight.shards}

    @property
    def _optional(self) -> tuple[str, ...]:
        return ("lm_head.weight",) if self.config.tied or self.config.is_bare else ()

    def obstacles(self, rank: ParallelRank) -> tuple[str, ...]:
        """Return why the model cannot be divided like this, one sentence each; empty where it can."""
        return tensor_obstacles(self.whole, rank)

    def tensor_sizes(self) -> tuple[int, ...]:
        """Return the numbers of ranks that can share each layer."""
        most = max(layer.num_heads for layer in self.whole.attention_layers())
        return tuple(size for size in range(1, most + 1) if not self.obstacles(ParallelRank(tensor_size=size)))

    def check_divides(self, rank: ParallelRank, where: object) -> None:
        """Raise CapabilityRefused with all obstacles, and the sizes that work."""
        reasons = self.obstacles(rank)
        if reasons:
            sizes = ", ".join(map(str, self.tensor_sizes()))
            layers = self.config.num_layers
            most = max(stages for stages in range(1, layers + 1) if self.whole.stages_obstacle(stages) is None)
            stages = "1" if most == 1 else f"1 to {most}"
            hint = f"tensor_parallel_size can be {sizes}; pipeline_parallel_size can be {stages}"
            raise cannot_divide(where, rank, reasons, hint)

    def computes_the_same(self, other: ModelDescription) -> bool:
        """Whether the other model differs from this one in its weights alone.

        Numbers are compared with a tolerance: a GGUF file stores the configuration's in single precision.
        """
        ours, theirs = _settings(self.whole), _settings(other.whole)
        return (
            self.checkpoint_shapes == other.checkpoint_shapes
            and ours.keys() == theirs.keys()
            and all(_alike(ours[name], theirs[name]) for name in ours)
        )


def cannot_divide(where: object, rank: ParallelRank, reasons: tuple[str, ...], hint: str) -> CapabilityRefused:
    """Return the refusal to divide a model."""
    return CapabilityRefused(
        f"{where} cannot be divided among {rank.tensor_size} tensor-parallel ranks in {rank.stages} stages",
        reasons,
        hint=hint,
    )


def _settings(model: nn.Module) -> dict[str, Any]:
    """Return what every module computes with besides weights: its class, and its public attributes of plain types."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[f"{path}:class"] = type(module).__name__
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "training" and (isinstance(value, _PLAIN) or is_dataclass(value)):
                found[f"{path}.{name}"] = value
        if isinstance(module, RotaryEmbedding):
            found[f"{path}.rope"] = module.rope
    return found


_PLAIN = (bool, int, float, str, type(None), Enum, tuple)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    if hasattr(one, "rotates_like"):
        return bool(one.rotates_like(other))
    return bool(one == other)
