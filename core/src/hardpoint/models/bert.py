"""BERT (arXiv:1810.04805), RoBERTa (arXiv:1907.11692) and XLM-RoBERTa (arXiv:1911.02116): attention to both sides, norms after each sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hardpoint.layers import Attention, ColumnLinear, LayerNorm, Linear, RowLinear, SmallEmbedding, Step, VocabEmbedding
from hardpoint.layers.parallel import aligned_obstacle, aligned_spans
from hardpoint.models.encoder import Encoder
from hardpoint.models.family import label_head

if TYPE_CHECKING:
    from hardpoint.layers import ModelContext
    from hardpoint.models.config import ModelConfig

_QKV = ("self.query", "self.key", "self.value")


def _norm(name: str, config: ModelConfig, context: ModelContext) -> LayerNorm:
    return LayerNorm(name, config.hidden_size, config.number("layer_norm_eps"), context)


class BertEmbeddings(nn.Module):
    """The sum of the embeddings of token, position and text, normalised; the first position is not 0 in every family."""

    def __init__(self, config: ModelConfig, context: ModelContext, first_position: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.word_embeddings = VocabEmbedding(config.vocab_size, size, context)
        self.position_embeddings = SmallEmbedding(config.max_position_embeddings, size, context)
        self.token_type_embeddings = SmallEmbedding(config.integer("type_vocab_size"), size, context)
        self.norm = _norm("LayerNorm", config, context)
        self.first_position = first_position

    def forward(self, token_ids: Tensor, step: Step) -> Tensor:
        """Return [T, hidden_size] of token ids int64[T]."""
        # A model with one type does not tell two texts apart, whatever types its tokenizer gives them.
        tells_apart = step.token_types is not None and self.token_type_embeddings.num_rows > 1
        types = step.token_types if tells_apart else torch.zeros_like(token_ids)
        embedded = self.word_embeddings(token_ids) + self.token_type_embeddings(types)
        return self.norm(embedded + self.position_embeddings(self._places(token_ids, step.positions)))  # type: ignore[no-any-return]

    def _places(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return each token's row of the position embeddings.

        Where the first is not 0, the row before it is that of padding, which every token of padding in a text has; none of them is counted.
        """
        if not self.first_position:
            return positions
        padding = self.first_position - 1
        counted = (token_ids != padding).long()
        # A step has whole texts, one after the other.
        first = torch.arange(len(positions), device=positions.device) - positions
        before = counted.cumsum(0) - counted
        return padding + counted * (before + 1 - before[first])


class BertLayer(nn.Module):
    """`norm(x + attention(x))`, then `norm(x + down(act(up(x))))`; the sums are taken by the norms, the activation by `up`."""

    def __init__(self, config: ModelConfig, index: int, context: ModelContext) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        ranks = context.rank
        span = aligned_spans(inner, ranks.tensor_size)[ranks.tensor_rank]
        self.intermediate_size = inner
        activation = str(config.values["hidden_act"])
        layer = config.attention(causal=False)
        self.attention = Attention(
            index, layer, size, None, context, qkv_bias=True, output_bias=True, names=_QKV, output="output.dense"
        )
        self.attention_norm = _norm("attention.output.LayerNorm", config, context)
        self.up = ColumnLinear("intermediate.dense", size, inner, context, span=span, bias=True, activation=activation)
        self.down = RowLinear("output.dense", inner, size, context, span=span, bias=True)
        self.norm = _norm("output.LayerNorm", config, context)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = self.attention_norm(x, self.attention(x, step))
        return self.norm(x, self.down(self.up(x)))  # type: ignore[no-any-return]

    def tensor_obstacle(self, size: int) -> str | None:
        """Return why the layer cannot be divided among `size` ranks, or None."""
        return aligned_obstacle(self.intermediate_size, "intermediate size", size)


class BertLayers(nn.Module):
    """The layers, by the name that checkpoints give them."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config, index, context) for index in range(config.num_layers))


class BertEncoder(nn.Module):
    """Embeddings and layers."""

    def __init__(self, config: ModelConfig, context: ModelContext, first_position: int) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(config, context, first_position)
        self.encoder = BertLayers(config, context)

    def forward(self, token_ids: Tensor, step: Step) -> Tensor:
        x = self.embeddings(token_ids, step)
        for layer in self.encoder.layer:
            x = layer(x, step)
        return x  # type: ignore[no-any-return]


class Bert(Encoder):
    """BERT. A head that classifies texts takes the first token's hidden state, through a dense layer and tanh."""

    prefix: ClassVar[str] = "bert"
    """What checkpoints call the encoder."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.add_module(self.prefix, BertEncoder(config, context, self.first_position(config)))
        self.dense: Linear | None = None
        self.classifier: Linear | None = None
        if config.num_labels:
            self.add_heads(config, context)

    def add_heads(self, config: ModelConfig, context: ModelContext) -> None:
        """Make the layers after the encoder."""
        size = config.hidden_size
        if not config.labels_tokens:
            self.dense = Linear([(f"{self.prefix}.pooler.dense", size)], size, context, bias=True)
        self.classifier = label_head("classifier", config, context, bias=True)

    @classmethod
    def first_position(cls, config: ModelConfig) -> int:
        """Return the row of the position embeddings that a text begins with."""
        return 0

    @classmethod
    def unused(cls, config: ModelConfig) -> str:
        # Heads of the training, and the pooler where nothing comes after it.
        return rf"cls\.|lm_head\.|({cls.prefix}\.)?(pooler\.|embeddings\.position_ids$)"

    @classmethod
    def context_length(cls, config: ModelConfig, positions: int) -> int:
        return positions - cls.first_position(config)

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "type_vocab_size": 2, **values}

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        kind = config.values.get("position_embedding_type") or "absolute"
        unlike = [f"its positions are {kind}"] if kind != "absolute" else []
        decoder = ["it is configured as a decoder"] if config.flag("is_decoder") else []
        return [*super().refusals(config), *unlike, *decoder]

    def forward(self, token_ids: Tensor, step: Step, rows: Tensor) -> Tensor:
        return self.get_submodule(self.prefix)(token_ids, step).index_select(0, rows)  # type: ignore[no-any-return]

    def scores(self, hidden: Tensor) -> Tensor:
        if self.classifier is None:
            return super().scores(hidden)
        return self.classifier(hidden if self.dense is None else torch.tanh(self.dense(hidden)))  # type: ignore[no-any-return]


class Roberta(Bert):
    """RoBERTa: the rows of positions before the first are those of padding; a head has its dense layer itself."""

    prefix: ClassVar[str] = "roberta"

    @classmethod
    def first_position(cls, config: ModelConfig) -> int:
        return config.integer("pad_token_id", 1, least=0) + 1

    def add_heads(self, config: ModelConfig, context: ModelContext) -> None:
        size = config.hidden_size
        if config.labels_tokens:
            self.classifier = label_head("classifier", config, context, bias=True)
        else:
            self.dense = Linear([("classifier.dense", size)], size, context, bias=True)
            self.classifier = label_head("classifier.out_proj", config, context, bias=True)


class XLMRoberta(Roberta):
    """XLM-RoBERTa: RoBERTa of many languages."""
