"""A family's model made of the core's layers, its weights in the allocator's memory."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hardpoint.interfaces.allocator import WEIGHTS
from hardpoint.interfaces.attention import Refusal
from hardpoint.interfaces.dtypes import DType
from hardpoint.interfaces.errors import ModelError
from hardpoint.layers import Step
from hardpoint.layers.linear import Linear
from hardpoint.models.base import CapturableModel, RunnableModel
from hardpoint.weights.kv_scales import ScalesInUse
from hardpoint.weights.loading import load_weights, update_weights, with_standard_names
from hardpoint.weights.sources import WeightReloader, extents

if TYPE_CHECKING:
    from hardpoint.interfaces.allocator import DeviceAllocator
    from hardpoint.interfaces.attention import AttentionBackend
    from hardpoint.interfaces.batch import EmbeddingKind, PoolingTask
    from hardpoint.interfaces.kernels import AdapterWeights
    from hardpoint.layers.states import StateTensor
    from hardpoint.models.description import ModelDescription
    from hardpoint.models.family import Family
    from hardpoint.models.source import ModelSource
    from hardpoint.weights.checkpoint import Checkpoint
    from hardpoint.weights.token_head import TokenHead


class FamilyModel(RunnableModel):
    """What running a family's model by its modules and by a backend's program have in common: their weights.

    Args:
        model: the rank's share, whose parameters have memory or stay on the meta device.
        seed: of dummy weights.
        token_head: how the head is made of the language model's, where it is.
    """

    def __init__(
        self,
        description: ModelDescription,
        model: Family,
        scales: ScalesInUse,
        seed: int,
        token_head: TokenHead | None = None,
    ) -> None:
        self._description, self._model, self._scales, self._seed = description, model, scales, seed
        self._token_head = token_head
        self._weights = description.weights_of(model)

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        only: Collection[str] | None = None,
        begin: Callable[[], None] | None = None,
    ) -> None:
        """Fill the weights; raises CorruptWeights. For `only` and `begin` see `load_weights`."""
        with torch.no_grad():
            self._fill(checkpoint, only, begin)

    @property
    def share(self) -> Family:
        """The modules of the rank's share."""
        return self._model

    @property
    def whole(self) -> Family:
        """The modules of the whole model, on the meta device."""
        return self._description.whole

    @abstractmethod
    def take_adapters(self, weights: Mapping[str, AdapterWeights]) -> None:
        """Add from here on what adapters in these slots make of the inputs of linear layers, by the names of their weights."""

    @property
    def weight_formats(self) -> Mapping[str, int]:
        parameters = ((self._model.get_parameter(name), stored) for name, stored in self._weights.stored.items())
        return Counter(
            str(DType.of(parameter.dtype) if stored.blocks is None else stored.blocks)
            for parameter, stored in parameters
            if parameter.ndim > 1
        )

    @property
    def num_labels(self) -> int:
        return self._description.config.num_labels

    @property
    def embedding_kinds(self) -> frozenset[EmbeddingKind]:
        return self._model.embedding_kinds

    def weight_names(self) -> frozenset[str]:
        return self._weights.names()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], written: set[str] | None = None) -> int:
        head = self._token_head
        with torch.no_grad():
            weights = weights if head is None else head.with_head(weights)
            return update_weights(self._weights, weights, self._present, self._finish, self._scales, written)

    def reload(self, source: ModelSource, written: set[str] | None = None) -> int:
        self._check_same_model(source)
        begin = None if written is None else partial(written.update, self.weight_names())
        self.load(self._checkpoint(source), begin=begin)
        return len(self._weights.shapes)

    def _check_same_model(self, source: ModelSource) -> None:
        """Raise ModelError unless `source` is a checkpoint of this model with its KV scales, whose weights may be other ones."""
        other = source.describe(self._description.dtype)
        if isinstance(other, Refusal) or not self._description.computes_the_same(other):
            found = f"{source.architecture} with another configuration"
            if not isinstance(other, Refusal) and self._description.config.tied != other.config.tied:
                heads = "its own", "its embedding"
                mine, its = heads if other.config.tied else heads[::-1]
                found = f"its head is {its}, and that of the loaded model is {mine}"
            raise ModelError(
                f"{source.path} is not a checkpoint of the model that is loaded",
                found=found,
                hint="Make a new engine for another model",
            )
        self._scales.check(source.kv_scales)

    def _checkpoint(self, source: ModelSource) -> Checkpoint:
        """Return the weights of a source; random ones where its format is dummy."""
        return source.weights(self._weights.shapes, self._seed if source.format == "dummy" else None)

    @abstractmethod
    def _fill(
        self,
        checkpoint: Checkpoint,
        only: Collection[str] | None,
        begin: Callable[[], None] | None,
    ) -> None:
        """Write what a checkpoint has into its places; see `load_weights`."""

    @abstractmethod
    def _present(self, name: str) -> Tensor:
        """Return a tensor with a parameter's present value, of which a part is written."""

    @abstractmethod
    def _finish(self, name: str, tensor: Tensor) -> None:
        """Take a parameter that was written."""


class ModularModel(FamilyModel, CapturableModel):
    """The model as its modules compute it, wherever torch runs: one rank's share, or all of it.

    Norms, rotary embedding, activation and argmax are the kernel set's where there is one, and so are linear layers and experts that it has
    a layout of its own for; other matrix products are torch's. A weight's only copy lies in the allocator's memory.
    """

    path: ClassVar[str] = "modules"

    def __init__(
        self,
        description: ModelDescription,
        model: Family,
        scales: ScalesInUse,
        seed: int,
        *,
        attention: AttentionBackend,
        places: tuple[tuple[int, int], ...],
        allocator: DeviceAllocator,
        token_head: TokenHead | None = None,
    ) -> None:
        """Take memory for the weights.

        Args:
            places: each layer's KV cache group and its number there.
        """
        allocator.materialise(model, WEIGHTS)
        with torch.no_grad():
            model.fill_buffers()
        super().__init__(description, model, scales, seed, token_head)
        self._attention, self._places = attention, places
        self._has_states = bool(model.state_layers())
        self._without_extents: frozenset[str] = frozenset()

    def declare_sources(self, allocator: DeviceAllocator, source: ModelSource) -> None:
        checkpoint = with_standard_names(self._checkpoint(source), self._weights.shapes)
        reloader = WeightReloader(self._reload_rest, source)
        without: set[str] = set()
        for name, stored in self._weights.stored.items():
            parameter = self._model.get_parameter(name)
            found = extents(checkpoint, stored, DType.of(parameter.dtype))
            if found is None:
                without.add(name)
            allocator.declare_source(parameter, reloader if found is None else found)
        self._without_extents = frozenset(without)

    def _reload_rest(self, source: ModelSource) -> None:
        self.load(self._checkpoint(source), only=self._without_extents)

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    @property
    def scratch_bytes(self) -> int:
        return 0

    @property
    def hidden_size(self) -> int:
        return self._model.hidden_size

    @torch.no_grad()
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
        states = metadata[-1] if self._has_states else None
        step = Step(positions, self._attention, metadata, kv_cache, self._places, token_types, states, embedded)
        return self._model(token_ids, step, rows)  # type: ignore[no-any-return]

    @torch.no_grad()
    def encoded(self, kind: EmbeddingKind, arrays: Mapping[str, Tensor]) -> Tensor:
        return self._model.encoded(kind, arrays)

    def take_adapters(self, weights: Mapping[str, AdapterWeights]) -> None:
        for name, slots in weights.items():
            layer = self._model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(layer, Linear)
            layer.take_adapters(slots)

    def largest_source(self) -> dict[str, Tensor]:
        return self._model.largest_source()

    def state_layers(self) -> tuple[tuple[StateTensor, ...], ...]:
        return self._model.state_layers()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    @torch.no_grad()
    def argmax(self, hidden: Tensor) -> Tensor:
        return self._model.argmax(hidden)

    @torch.no_grad()
    def pooled(self, hidden: Tensor, task: PoolingTask) -> Tensor:
        return self._model.pooled(hidden, task)

    def _fill(
        self,
        checkpoint: Checkpoint,
        only: Collection[str] | None,
        begin: Callable[[], None] | None,
    ) -> None:
        def place(name: str, rows: int) -> Tensor:
            return self._model.get_parameter(name)

        def finish(name: str, row: int, tensor: Tensor) -> None:
            pass

        load_weights(self._weights, checkpoint, place, finish, only=only, begin=begin)

    def _present(self, name: str) -> Tensor:
        return self._model.get_parameter(name)

    def _finish(self, name: str, tensor: Tensor) -> None:
        pass
