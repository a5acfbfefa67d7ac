"""What every way of running a model has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint.interfaces.errors import WorkerError

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.allocator import DeviceAllocator
    from hardpoint.interfaces.batch import EmbeddingKind, PoolingTask
    from hardpoint.layers.states import StateTensor
    from hardpoint.models.source import ModelSource


class RunnableModel(ABC):
    """A loaded model: a step gives hidden states, and these, where they are wanted, logits or tokens.

    Attributes:
        path: how it runs: "fused" (the kernel set's program), "modules" (the core's layers) or "transformers".
    """

    path: ClassVar[str]

    @abstractmethod
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
        """Run one step, whose inputs are on the device, and return the hidden states of the given tokens, after the final norm.

        Args:
            token_ids: int64[T].
            positions: int64[T], or int64[3, T] where they have three axes; see `StepInput.positions`.
            metadata: what the attention backend's `prepare` returned for each KV cache group of the step, and last, for a model with
                `state_layers`, what is known of the sequences' states.
            kv_cache: the whole cache, all layers; the step's slots are written.
            rows: int32[rows], indices of tokens in the step.
            token_types: int64[T], to which of two texts each token belongs, for encoders; None where all are the first's.
            embedded: indices of tokens in the step, int64[k], and their embeddings, [k, hidden_size] in the model's dtype, which stand in
                the place of those of their ids; for models with `embedding_kinds`.

        Returns:
            [rows, hidden_size] in the model's dtype, on the model's device; no rows on a pipeline's stages before the last. Valid
            until the next step, which may use the same memory.
        """

    @property
    def embedding_kinds(self) -> frozenset[EmbeddingKind]:
        """Sources of embeddings that steps may have in the place of tokens."""
        return frozenset()

    def encoded(self, kind: EmbeddingKind, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings [num_rows, hidden_size] of a source that is not embeddings itself; see `EmbeddingSource.arrays`."""
        raise WorkerError(f"the model makes no embeddings of a source of the kind {kind}", found=type(self).__name__)

    def largest_source(self) -> dict[str, Tensor]:
        """Return arrays, on the host, of a source that takes the most memory to encode; empty where the model encodes nothing."""
        return {}

    def state_layers(self) -> tuple[tuple[StateTensor, ...], ...]:
        """Return what each layer that keeps recurrent states keeps of a sequence; empty for a model of attention alone."""
        return ()

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32[rows, vocab_size] of hidden states that `run` returned, or of rows of them, valid until the next step.

        All ranks of a stage call it for the same rows.
        """

    @abstractmethod
    def argmax(self, hidden: Tensor) -> Tensor:
        """Return int64[rows], the lowest id of the highest logit of each row; see `logits`."""

    def logprobs(self, hidden: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return log probabilities without the logits, or None for a model that cannot; see `DecoderProgram.logprobs`."""
        return None

    @property
    def num_labels(self) -> int:
        """Labels of the head that classifies; 0 where there is none."""
        return 0

    def pooled(self, hidden: Tensor, task: PoolingTask) -> Tensor:
        """Return [rows, width] of what a task wants of pooled hidden states [rows, hidden_size]; themselves where the model has no head."""
        return hidden

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
    def weight_formats(self) -> Mapping[str, int]:
        """How many of the weights' matrices are stored in which format of blocks or dtype."""

    @property
    @abstractmethod
    def scratch_bytes(self) -> int:
        """Bytes of working memory that are held between steps."""


class CapturableModel(RunnableModel):
    """A model whose steps can be captured into device graphs.

    In `run`, every shape follows from those of the arguments, and the host is never waited for, so that a step of given shapes can be
    captured once and replayed with other contents.
    """

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Elements of one token's hidden state."""
