"""What the families have in common: a decoder of layers between an embedding and a head, or a pipeline stage of one.

A family is one file: a layer whose `forward` is the family's equation over `hardpoint.layers`, and a `CausalLM` with that layer and what
is special about embedding, norms and head. `models.llama` is the one to read first; `models.registry` has one line for each
architecture. Modules are named as in the published checkpoints, since a parameter's name is its path
(`model.layers.3.mlp.down_proj.weight`). Where a module is merged from several tensors, it says their names itself (`layers.linear`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from hardpoint.interfaces.attention import Refusal
from hardpoint.interfaces.batch import EmbeddingKind
from hardpoint.interfaces.errors import WorkerError
from hardpoint.layers import (
    LayerWithStates,
    Linear,
    LMHead,
    RMSNorm,
    RotaryEmbedding,
    StateTensor,
    Step,
    VocabEmbedding,
)
from hardpoint.layers.parallel import ParallelRank, layers_of_stage
from hardpoint.models.config import FULL, SLIDING
from hardpoint.models.family import Family, RewardHead, label_head

if TYPE_CHECKING:
    from hardpoint.interfaces.collectives import Collectives
    from hardpoint.layers import ModelContext
    from hardpoint.models.config import ModelConfig


class MakesLayer(Protocol):
    """What makes a family's decoder layer.

    Its `forward(stream, branch, step)` adds `branch`, which the layer before computed and did not add (None in a stage's first layer),
    to the residual stream [T, hidden_size] in place, goes on, and returns its own last branch. So each sum is made together
    with the norm that follows it.
    """

    def __call__(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext
    ) -> nn.Module: ...


class CausalLM(Family):
    """A family's model. Subclasses give `layer`, and override what they do otherwise.

    Ranks that share layers sum after attention and after the feed-forward (in `RowLinear`); a stage gets the residual stream of the
    stage before it, and only the last one has hidden states, logits and tokens to return.
    """

    layer: ClassVar[MakesLayer]
    embedding_kinds = frozenset({EmbeddingKind.ROWS})
    layer_kinds: ClassVar[frozenset[str]] = frozenset({FULL, SLIDING})
    """Types of layers that the family has."""
    embeds_both_sides: ClassVar[bool] = False
    """Models without the language-model head may have attention that is not causal, without windows."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.model = Decoder(self, config, context)
        self.lm_head: LMHead | None = None
        self.score: Linear | RewardHead | None = None
        if context.rank.is_last and config.rewards_tokens:
            self.score = RewardHead(config, context)
        elif context.rank.is_last and config.num_labels:
            bias = config.labels_tokens and config.flag("token_classification_bias", True)
            self.score = label_head("score", config, context, bias=bias)
        elif context.rank.is_last and not config.is_bare:
            tied = self.model.embed_tokens if config.tied else None
            self.lm_head = self.head(config, context, tied)

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        ropes = cls.ropes(config)
        reasons = [*config.refusals(cls.layer_kinds), *(ropes.reasons if isinstance(ropes, Refusal) else ())]
        if config.sees_both_sides:
            if not cls.embeds_both_sides:
                reasons.append("its attention is not causal")
            elif not config.is_bare:
                reasons.append("its attention is not causal: it makes embeddings (convert='embed') and no text")
            elif SLIDING in config.layer_types:
                reasons.append("its attention is not causal and has windows")
        return reasons

    @classmethod
    def ropes(cls, config: ModelConfig) -> tuple[tuple[Any, ...], tuple[int, ...]] | Refusal:
        """Return the rotary tables and which of them each layer uses; see `ModelConfig.ropes`."""
        return config.ropes()

    def embedding(self, config: ModelConfig, context: ModelContext) -> VocabEmbedding:
        """Return the embedding."""
        return VocabEmbedding(config.vocab_size, config.hidden_size, context)

    def norm(self, config: ModelConfig, context: ModelContext) -> RMSNorm:
        """Return the norm before the head."""
        return RMSNorm(config.hidden_size, config.norm_eps, context)

    def head(self, config: ModelConfig, context: ModelContext, tied: VocabEmbedding | None) -> LMHead:
        """Return the head."""
        return LMHead(config.vocab_size, config.hidden_size, context, tied=tied)

    def forward(self, token_ids: Tensor, step: Step, rows: Tensor) -> Tensor:
        return self.model(token_ids, step, rows)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden if self.lm_head is None else self.lm_head.logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        return hidden if self.lm_head is None else self.lm_head.argmax(hidden)

    def scores(self, hidden: Tensor) -> Tensor:
        return super().scores(hidden) if self.score is None else self.score(hidden)

    def stages_obstacle(self, stages: int) -> str | None:
        layers = len(self.model.layers)
        if stages > 1 and self.state_layers():
            return "a model whose layers keep recurrent states runs in one stage only"
        return f"{layers} layers are fewer than {stages} stages" if stages > layers else None

    def state_layers(self) -> tuple[tuple[StateTensor, ...], ...]:
        return tuple(module.states for module in self.modules() if isinstance(module, LayerWithStates))


class Decoder(nn.Module):
    """The layers of a stage, the embedding before the first stage's and the norm after the last one's."""

    def __init__(self, family: CausalLM, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        rank = context.rank
        first, end = layers_of_stage(config.num_layers, rank)
        context = replace(context, first_layer=first)
        self.hidden_size = config.hidden_size
        self._rank, self._pipeline, self._dtype = rank, context.ranks.pipeline, context.dtype
        ropes = family.ropes(config)
        assert not isinstance(ropes, Refusal), "see refusals"
        tables, uses = ropes
        self.embed_tokens: VocabEmbedding | None = None
        if rank.is_first or (rank.is_last and config.tied and not config.is_bare):
            self.embed_tokens = family.embedding(config, context)
        self.rotary = nn.ModuleList(RotaryEmbedding(rope, context) for rope in tables)
        make: Callable[..., nn.Module] = type(family).layer
        self.layers = nn.ModuleDict(
            {str(index): make(config, index, self.rotary[uses[index]], context) for index in range(first, end)}
        )
        self.norm = family.norm(config, context) if rank.is_last else None

    def forward(self, token_ids: Tensor, step: Step, rows: Tensor) -> Tensor:
        """Return the hidden states [rows, hidden_size] of the wanted tokens, in the model's dtype; none before the last stage.

        The host waits for nothing, and every shape follows from the arguments', so that a step can be captured.

        Args:
            token_ids: int64[T].
            rows: int[rows], the tokens of the step whose hidden states are wanted.
        """
        stream = self._embedded(token_ids, step)
        branch: Tensor | None = None
        for layer in self.layers.values():
            branch = layer(stream, branch, step)
        if self.norm is None:
            stream = stream if branch is None else stream.add_(branch)
            self._link().send(stream, self._rank.stage + 1)
            return stream[:0]
        assert branch is not None, "a stage has at least one layer"
        # Nothing after the last layer mixes tokens.
        return self.norm(stream.index_select(0, rows), branch.index_select(0, rows))  # type: ignore[no-any-return]

    def _embedded(self, token_ids: Tensor, step: Step) -> Tensor:
        if self._rank.is_first and self.embed_tokens is not None:
            stream: Tensor = self.embed_tokens(token_ids)
            return stream if step.embedded is None else stream.index_copy_(0, *step.embedded)
        stream = torch.empty((len(token_ids), self.hidden_size), dtype=self._dtype, device=token_ids.device)
        self._link().receive(stream, self._rank.stage - 1)
        return stream

    def _link(self) -> Collectives:
        if self._pipeline is None:
            raise WorkerError("a stage has no link to the other stages", hint="Build the model with its ranks")
        return self._pipeline


def tensor_obstacles(model: Family, rank: ParallelRank) -> tuple[str, ...]:
    """Return why a whole model cannot be divided like this, one sentence each; empty where it can."""
    reasons = []
    for module in model.modules():
        obstacle: Callable[[int], str | None] | None = getattr(module, "tensor_obstacle", None)
        reason = None if obstacle is None else obstacle(rank.tensor_size)
        if reason is not None:
            reasons.append(reason)
    stages = model.stages_obstacle(rank.stages)
    if stages is not None:
        reasons.append(stages)
    return tuple(dict.fromkeys(reasons))
