"""What encoders have in common: layers that see both sides of a token, over whole texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hardpoint.interfaces.batch import Pooling
from hardpoint.layers.activations import ACTIVATIONS
from hardpoint.models.config import FULL, SLIDING
from hardpoint.models.family import Family

if TYPE_CHECKING:
    from hardpoint.models.config import ModelConfig


class Encoder(Family):
    """An encoder: steps of whole texts, whose hidden states are pooled. It generates nothing, and has no KV cache."""

    pooling: ClassVar[Pooling] = Pooling.CLS
    activation_names: ClassVar[tuple[str, ...]] = ("hidden_act",)
    """What configurations call the activations."""

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        reasons = [
            f"its activation {name} is {config.values.get(name)}"
            for name in cls.activation_names
            if config.values.get(name) not in ACTIVATIONS
        ]
        unknown = sorted(set(config.layer_types) - {FULL, SLIDING})
        return [*reasons, *(f"it has layers of the type {kind}" for kind in unknown)]

    def stages_obstacle(self, stages: int) -> str | None:
        return "an encoder is one stage" if stages > 1 else None
