"""The linear layers of a model that LoRA adapters are added to: those of its decoder's layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hardpoint.layers.weights import WeightShard
    from hardpoint.models.family import Family

_DECODER = "model.layers."


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer of a rank's share by its weight's name, and the checkpoint tensors that its rows are of."""

    name: str
    shards: tuple[WeightShard, ...]


def adapted_layers(model: Family) -> Iterator[AdaptedLayer]:
    """Yield the layers of a model, or of a rank's share, that adapters are added to."""
    from hardpoint.layers.linear import Linear

    stored = model.stored_weights()
    for path, module in model.named_modules():
        if isinstance(module, Linear) and path.startswith(_DECODER):
            name = f"{path}.weight"
            yield AdaptedLayer(name, stored[name].shards)


def adapter_targets(whole: Family) -> Mapping[str, tuple[int, int]]:
    """Return (outputs, inputs) of what adapters of a model may have matrices for, by checkpoint names without ".weight"."""
    shards = (shard for adapted in adapted_layers(whole) for shard in adapted.shards)
    return {shard.name.removesuffix(".weight"): (shard.shape[0], shard.shape[1]) for shard in shards}
