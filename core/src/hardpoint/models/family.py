"""What all families have in common, decoders and encoders: where their weights come from, what they ask of attention, and their heads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional

from hardpoint.interfaces.batch import EmbeddingKind, Pooling, PoolingTask
from hardpoint.interfaces.errors import ModelError, WorkerError
from hardpoint.layers import AttentionOverCache, Layer, Linear, RotaryEmbedding, Step, StoredWeight

if TYPE_CHECKING:
    from hardpoint.interfaces.capabilities import AttentionLayer
    from hardpoint.layers import ModelContext, StateTensor
    from hardpoint.models.config import ModelConfig


class Family(nn.Module):
    """A family's model, or a rank's share of it.

    Its architectures are the language model, or the model without a head, and those with a head that classifies texts or tokens
    (`LlamaForSequenceClassification`, `BertForTokenClassification`).
    """

    published: ClassVar[Mapping[str, str]] = {}
    """What published checkpoints have in place of parts of the modules' names."""
    norm_offset: ClassVar[float] = 0.0
    """What norms add to their stored weights."""
    embedding_kinds: ClassVar[frozenset[EmbeddingKind]] = frozenset()
    """Sources of embeddings that steps may have in the place of tokens."""
    pooling: ClassVar[Pooling] = Pooling.LAST
    """How hidden states of a text become one, where the model's files do not say it."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self._dtype = context.dtype
        self.dense_modules = config.dense
        width = config.hidden_size
        for number, module in enumerate(config.dense):
            if module.in_features != width:
                raise ModelError(
                    f"the dense layer {module.path} does not fit",
                    found=f"{module.in_features} inputs, where {width} come",
                )
            tensors = [(f"{module.path}.linear", module.out_features)]
            linear = Linear(tensors, width, context, bias=module.bias, activation=module.activation)
            self.add_module(f"projection_{number}", linear)
            width = module.out_features

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration's values with those that transformers fills in where they are left out."""
        return dict(values)

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        """Return why a configuration of the family cannot be run, a sentence for each reason; empty where it can."""
        return []

    @classmethod
    def unused(cls, config: ModelConfig) -> str:
        """Return a regular expression for tensors that published checkpoints have beside the model's; empty where there are none."""
        return ""

    @classmethod
    def context_length(cls, config: ModelConfig, positions: int) -> int:
        """Return the longest text in tokens of a model that counts so many positions."""
        return positions

    @classmethod
    def pooling_of(cls, config: ModelConfig) -> Pooling:
        """Return how hidden states of a text become one, as the configuration says it."""
        return Pooling.ALL if config.labels_tokens else cls.pooling

    @abstractmethod
    def forward(self, token_ids: Tensor, step: Step, rows: Tensor) -> Tensor:
        """Return the hidden states [rows, hidden_size] of the wanted tokens, after the final norm; none before a pipeline's last stage.

        Args:
            token_ids: int64[T].
            rows: int[rows], the tokens of the step whose hidden states are wanted.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32[rows, vocab_size] of hidden states; the hidden states where there is no language-model head."""
        return hidden

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return int64[rows], the lowest id of the highest logit of each row; the hidden states where there is no head."""
        return hidden

    def pooled(self, hidden: Tensor, task: PoolingTask) -> Tensor:
        """Return what a task wants of pooled hidden states [rows, hidden_size]: embeddings, or logits of labels [rows, num_labels]."""
        if task is PoolingTask.CLASSIFY:
            return self.scores(hidden.to(self._dtype))
        for number in range(len(self.dense_modules)):
            hidden = self.get_submodule(f"projection_{number}")(hidden.to(self._dtype))
        return hidden

    def scores(self, hidden: Tensor) -> Tensor:
        """Return the logits of labels [rows, num_labels] of pooled hidden states."""
        raise WorkerError("the model has no head that classifies", hint="Ask for an embedding")

    def encoded(self, kind: EmbeddingKind, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings [num_rows, hidden_size] of a source that is not embeddings itself; see `EmbeddingSource.arrays`."""
        raise WorkerError(f"the model makes no embeddings of a source of the kind {kind}", found=type(self).__name__)

    def largest_source(self) -> dict[str, Tensor]:
        """Return arrays, on the host, of a source that takes the most memory to encode; empty where the model encodes nothing."""
        return {}

    def stages_obstacle(self, stages: int) -> str | None:
        """Return why the layers cannot be divided into so many stages, or None."""
        return None

    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """Return what each of the rank's layers asks of attention, in order."""
        return tuple(module.shard for module in self.modules() if isinstance(module, AttentionOverCache))

    def state_layers(self) -> tuple[tuple[StateTensor, ...], ...]:
        """Return what each layer with recurrent states keeps of a sequence on the rank, in order."""
        return ()

    def stored_weights(self) -> dict[str, StoredWeight]:
        """Return where each parameter comes from, by its name in the model, in the order of use; tied ones once."""
        return dict(self._stored_weights())

    def fill_buffers(self) -> None:
        """Compute the rotary tables, which are not in the checkpoint, once they have memory."""
        for module in self.modules():
            if isinstance(module, RotaryEmbedding):
                module.fill()

    def _stored_weights(self) -> Iterator[tuple[str, StoredWeight]]:
        for path, module in self.named_modules():
            if not isinstance(module, Layer):
                continue
            parent = path.rpartition(".")[0]

            def named(name: str, path: str = path, parent: str = parent) -> str:
                owner = parent if "." in name else path
                found = f"{owner}.{name}" if owner else name
                for ours, theirs in self.published.items():
                    found = found.replace(ours, theirs)
                return found

            for name, stored in module.stored_weights().items():
                yield f"{path}.{name}", stored.renamed(named)


def label_head(name: str, config: ModelConfig, context: ModelContext, *, bias: bool) -> Linear:
    """Return the projection of hidden states to the logits of labels; every rank has all of it."""
    return Linear([(name, config.num_labels)], config.hidden_size, context, bias=bias)


class RewardHead(nn.Module):
    """Two layers from hidden states to rewards, as the checkpoints of Qwen2.5-Math-RM and -PRM have them (arXiv:2409.12122, 2501.07301)."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        size = config.hidden_size
        self.dense = Linear([("0", size)], size, context, bias=True)
        self.rewards = label_head("2", config, context, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [rows, num_labels] of hidden states [rows, hidden_size]."""
        return self.rewards(functional.relu(self.dense(hidden)))  # type: ignore[no-any-return]
