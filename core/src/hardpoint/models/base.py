"""What every way of running a model has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint.interfaces.batch import StepBatch
from hardpoint.interfaces.kernels import DecoderOutput

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.allocator import DeviceAllocator
    from hardpoint.models.source import ModelSource


class RunnableModel(ABC):
    """A loaded model: its whole step is one call.

    Attributes:
        path: how it runs: "fused" (the kernel set's decoder), "lean" (the core's decoder) or "transformers".
    """

    path: ClassVar[str]

    @abstractmethod
    def run(self, batch: StepBatch, metadata: Any, kv_cache: Tensor, rows: Tensor, output: DecoderOutput) -> Tensor:
        """Run one step and return `output` for the given token rows; see `DecoderProgram.run`.

        Args:
            metadata: what the attention backend's `prepare` returned for `batch`.
            kv_cache: the whole cache, all layers; the batch's slots are written.
            rows: int32[rows], indices of tokens in the step.

        Returns:
            float32[rows, vocab_size], int64[rows] or [rows, hidden_size] in the model's dtype, on the model's device; valid
            until the next step, which may use the same memory.
        """

    @abstractmethod
    def weight_names(self) -> frozenset[str]:
        """Return the checkpoint names of all weights; a tied head, which is another weight's, is left out."""

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], written: set[str] | None = None) -> int:
        """Replace weights by (checkpoint name, tensor) pairs between steps; returns how many were used.

        Names are those of the published checkpoint, also for a model from a GGUF file. Tensors of a tied head are passed over.
        Each tensor is checked before it is written; raises CorruptWeights for a name or shape that the model does not
        have, with the tensors before it already in place. Scales of the KV cache are passed over where it takes none, or has the
        same; others raise ModelError: they belong to the attention plan, which is made when a model is loaded.

        Args:
            written: gets the name of each tensor, as `weight_names` has it, before it is written.
        """

    @abstractmethod
    def reload(self, source: ModelSource, written: set[str] | None = None) -> int:
        """Load all weights again, from a checkpoint of the same model; returns how many tensors were loaded.

        The configuration and the names and shapes of all tensors are compared before the first is written. Raises ModelError
        (CorruptWeights), and what reading raises.

        Args:
            written: gets `weight_names` before the first tensor is written.
        """

    @abstractmethod
    def declare_sources(self, allocator: DeviceAllocator, source: ModelSource) -> None:
        """Tell the allocator where the weights, which were just loaded from `source`, can be read again."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of the weights on the device."""

    @property
    @abstractmethod
    def scratch_bytes(self) -> int:
        """Bytes of working memory that are held between steps."""


class CapturableModel(RunnableModel):
    """A model whose steps can be captured into device graphs: its work on the device follows from shapes alone."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Elements of one token's hidden state."""

    @abstractmethod
    def compute(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: Any,
        kv_cache: Tensor,
        rows: Tensor,
        output: DecoderOutput,
    ) -> Tensor:
        """Run one step whose inputs are on the device, and return what `run` does.

        Every shape follows from those of the arguments, and the host is never waited for, so that a step of given shapes can be
        captured once and replayed with other contents.

        Args:
            token_ids: int64[T].
            positions: int64[T].
            metadata: what the attention backend's `prepare` returned for the step.
            kv_cache: the whole cache, all layers.
            rows: int32[rows], indices of tokens in the step.
        """

    @abstractmethod
    def head(self, hidden: Tensor, output: DecoderOutput) -> Tensor:
        """Return the logits or tokens (`output`) of hidden states [rows, hidden_size], those of `DecoderOutput.HIDDEN`."""
