"""A family's model whose whole step is one call into a backend's program."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hardpoint.interfaces.kernels import DecoderProgram
from hardpoint.models.modular import FamilyModel
from hardpoint.weights.loading import load_weights
from hardpoint.weights.sources import WeightReloader

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import Tensor

    from hardpoint.interfaces.allocator import DeviceAllocator
    from hardpoint.interfaces.kernels import AdapterWeights
    from hardpoint.layers.adapters import AdapterSlots
    from hardpoint.models.description import ModelDescription
    from hardpoint.models.family import Family
    from hardpoint.models.source import ModelSource
    from hardpoint.weights.checkpoint import Checkpoint
    from hardpoint.weights.kv_scales import ScalesInUse


class FusedModel(FamilyModel):
    """A `DecoderProgram` with the loader in front of it; the modules that it was made from stay on the meta device."""

    path: ClassVar[str] = "fused"

    def __init__(
        self,
        description: ModelDescription,
        model: Family,
        scales: ScalesInUse,
        seed: int,
        program: DecoderProgram,
        adapters: AdapterSlots | None = None,
    ) -> None:
        super().__init__(description, model, scales, seed)
        self._program, self._adapters = program, adapters

    def declare_sources(self, allocator: DeviceAllocator, source: ModelSource) -> None:
        reloader = WeightReloader(self._reload_all, source)
        for tensor in self._program.weight_memory():
            allocator.declare_source(tensor, reloader)

    def _reload_all(self, source: ModelSource) -> None:
        self.load(self._checkpoint(source))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as the model has them; a program's own layout may pad them."""
        return sum(parameter.nbytes for parameter in self._model.parameters())

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
        embedded: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        adapted = None if self._adapters is None else self._adapters.rows
        return self._program.run(token_ids, positions, metadata, kv_cache, rows, embedded, adapted)

    def take_adapters(self, weights: Mapping[str, AdapterWeights]) -> None:
        self._program.take_adapters(weights)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._program.logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        return self._program.argmax(hidden)

    def logprobs(self, hidden: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor] | None:
        return self._program.logprobs(hidden, token_ids, count)

    def _fill(
        self,
        checkpoint: Checkpoint,
        only: Collection[str] | None,
        begin: Callable[[], None] | None,
    ) -> None:
        # Layers have weights of the same shapes, which are written into the same few tensors: fresh memory costs more than the copy.
        written: defaultdict[tuple[torch.Size, torch.dtype], list[Tensor]] = defaultdict(list)
        parameters = dict(self._model.named_parameters(remove_duplicate=False))

        def place(name: str, rows: int) -> Tensor:
            parameter = parameters[name]
            shape = torch.Size((rows, *parameter.shape[1:]))
            try:
                return written[shape, parameter.dtype].pop()
            except IndexError:
                return torch.empty(shape, dtype=parameter.dtype)

        def finish(name: str, row: int, tensor: Tensor) -> None:
            self._program.load_weight(name, tensor, row)
            written[tensor.shape, tensor.dtype].append(tensor)

        load_weights(self._weights, checkpoint, place, finish, divides=True, only=only, begin=begin)

    def _present(self, name: str) -> Tensor:
        return self._program.read_weight(name)

    def _finish(self, name: str, tensor: Tensor) -> None:
        self._program.load_weight(name, tensor)
