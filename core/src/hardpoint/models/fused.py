"""A family's model whose whole step is one call into a backend's program."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hardpoint.interfaces.kernels import DecoderProgram
from hardpoint.models.modular import FamilyModel
from hardpoint.weights.sources import WeightReloader

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.allocator import DeviceAllocator
    from hardpoint.models.description import ModelDescription
    from hardpoint.models.family import Family
    from hardpoint.models.source import ModelSource
    from hardpoint.weights.kv_scales import ScalesInUse


class FusedModel(FamilyModel):
    """A `DecoderProgram` with the loader in front of it; the modules that it was made from stay on the meta device."""

    path: ClassVar[str] = "fused"

    def __init__(
        self, description: ModelDescription, model: Family, scales: ScalesInUse, seed: int, program: DecoderProgram
    ) -> None:
        super().__init__(description, model, scales, seed)
        self._program = program

    def declare_sources(self, allocator: DeviceAllocator, source: ModelSource) -> None:
        reloader = WeightReloader(self._reload_all, source)
        for tensor in self._program.weight_memory():
            allocator.declare_source(tensor, reloader)

    def _reload_all(self, source: ModelSource) -> None:
        self.load(self._checkpoint(source))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as the model has them; a program's own layout may pad them."""
        itemsize = self._description.dtype.itemsize
        return sum(prod(parameter.shape) for parameter in self._model.parameters()) * itemsize

    @property
    def scratch_bytes(self) -> int:
        return self._program.scratch_bytes()

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: tuple[Any, ...],
        kv_cache: Tensor,
        rows: Tensor,
        token_types: Tensor | None = None,
    ) -> Tensor:
        return self._program.run(token_ids, positions, metadata, kv_cache, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._program.logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        return self._program.argmax(hidden)

    def _empty(self, name: str) -> Tensor:
        parameter = self._model.get_parameter(name)
        return torch.empty(parameter.shape, dtype=parameter.dtype)

    def _present(self, name: str) -> Tensor:
        return self._program.read_weight(name)

    def _finish(self, name: str, tensor: Tensor) -> None:
        self._program.load_weight(name, tensor)
