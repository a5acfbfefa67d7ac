"""A model whose whole step is one call into a backend's kernel set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint.interfaces.batch import StepBatch
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.kernels import DecoderOutput, DecoderProgram
from hardpoint.models.base import RunnableModel
from hardpoint.models.checkpoint import Checkpoint
from hardpoint.models.families import LeanModel
from hardpoint.models.rereading import Restorer
from hardpoint.models.weights import Progress, check_same_model, lean_checkpoint, load_weights, update_weights

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.allocator import DeviceAllocator
    from hardpoint.models.source import ModelSource


class FusedDecoder(RunnableModel):
    """A kernel set's `DecoderProgram` with the loader in front of it."""

    path: ClassVar[str] = "fused"

    def __init__(
        self, model: LeanModel, program: DecoderProgram, dtype: DType, max_context: int, seed: int = 0
    ) -> None:
        self._model = model
        self._program = program
        self._dtype = dtype
        self._seed = seed
        program.set_rope_tables(model.rope_tables(max_context))

    def load(
        self, checkpoint: Checkpoint, progress: Progress | None = None, *, begin: Callable[[], None] | None = None
    ) -> None:
        """Hand every weight to the program, whole, one at a time; raises CorruptWeights.

        Args:
            begin: called before the first weight is written, when the checkpoint was found to fit.
        """
        shapes = self._model.spec.weight_shapes()

        def place(name: str) -> Tensor:
            import torch

            kept = DType.FLOAT32 if self._model.offset(name) else self._dtype
            return torch.empty(shapes[name], dtype=kept.to_torch())

        load_weights(self._model, checkpoint, place, self._program.load_weight, progress, begin=begin)

    def weight_names(self) -> frozenset[str]:
        return self._model.weight_names()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], written: set[str] | None = None) -> int:
        return update_weights(self._model, weights, self._program.read_weight, self._program.load_weight, written)

    def reload(self, source: ModelSource, written: set[str] | None = None) -> int:
        check_same_model(self._model, source, self._dtype)
        names = self.weight_names()
        begin = None if written is None else partial(written.update, names)
        self.load(lean_checkpoint(source, self._model, self._seed), begin=begin)
        return len(names)

    def declare_sources(self, allocator: DeviceAllocator, source: ModelSource) -> None:
        memory = self._program.weight_memory()
        restorer = Restorer(self._restore, source)
        for tensor in memory:
            allocator.declare_source(tensor, restorer)

    def _restore(self, source: ModelSource) -> None:
        self.load(lean_checkpoint(source, self._model, self._seed))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as the spec has them; a program's own layout may pad them."""
        return sum(prod(shape) for shape in self._model.spec.weight_shapes().values()) * self._dtype.itemsize

    @property
    def scratch_bytes(self) -> int:
        return self._program.scratch_bytes()

    def run(self, batch: StepBatch, metadata: Any, kv_cache: Tensor, rows: Tensor, output: DecoderOutput) -> Tensor:
        return self._program.run(batch, metadata, kv_cache, rows, output)
