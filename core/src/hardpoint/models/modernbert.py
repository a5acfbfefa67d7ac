"""ModernBERT (arXiv:2412.13663): pre-normalised attention to both sides, in most layers within a window, and gated feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from hardpoint.interfaces.attention import Refusal
from hardpoint.interfaces.batch import Pooling
from hardpoint.layers import Attention, LayerNorm, Linear, RotaryEmbedding, RowLinear, Step, VocabEmbedding
from hardpoint.layers.activations import ACTIVATIONS, KERNEL_ACTIVATIONS
from hardpoint.layers.linear import GateUpLinear
from hardpoint.layers.parallel import aligned_obstacle, aligned_spans
from hardpoint.models.config import FULL, SLIDING
from hardpoint.models.encoder import Encoder
from hardpoint.models.family import label_head

if TYPE_CHECKING:
    from hardpoint.layers import ModelContext
    from hardpoint.models.config import ModelConfig

_BASES = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
"""What configurations call the base of each kind of layer, and its default."""


def _norm(name: str, config: ModelConfig, context: ModelContext) -> LayerNorm:
    return LayerNorm(name, config.hidden_size, config.number("norm_eps"), context, bias=config.flag("norm_bias"))


class ModernBertEmbeddings(nn.Module):
    """The embeddings of tokens, normalised."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.tok_embeddings = VocabEmbedding(config.vocab_size, config.hidden_size, context)
        self.layer_norm = _norm("norm", config, context)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.layer_norm(self.tok_embeddings(token_ids))  # type: ignore[no-any-return]


class ModernBertMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.intermediate_size, self.activation = config.intermediate_size, str(config.values["hidden_activation"])
        self._operators = context.operators
        span = aligned_spans(self.intermediate_size, context.rank.tensor_size)[context.rank.tensor_rank]
        self.gate_up = GateUpLinear(config.hidden_size, self.intermediate_size, context, names=("Wi",))
        self.down = RowLinear("Wo", self.intermediate_size, config.hidden_size, context, span=span)

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        if self.activation in KERNEL_ACTIVATIONS:
            return self.down(self._operators.gated_activation(both, KERNEL_ACTIVATIONS[self.activation]))  # type: ignore[no-any-return]
        gate, up = both.chunk(2, dim=-1)
        return self.down(ACTIVATIONS[self.activation](gate) * up)  # type: ignore[no-any-return]

    def tensor_obstacle(self, size: int) -> str | None:
        """Return why the layer cannot be divided among `size` ranks, or None."""
        return aligned_obstacle(self.intermediate_size, "intermediate size", size)


class ModernBertLayer(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; the first layer's attention is without a norm."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: ModelContext) -> None:
        super().__init__()
        bias = config.flag("attention_bias")
        layer = config.attention(sliding_window=config.window(index), causal=False)
        self.attn_norm = _norm("attn_norm", config, context) if index else nn.Identity()
        self.attn = Attention(
            index,
            layer,
            config.hidden_size,
            rotary,
            context,
            qkv_bias=bias,
            output_bias=bias,
            names=("Wqkv",),
            output="Wo",
        )
        self.mlp_norm = _norm("mlp_norm", config, context)
        self.mlp = ModernBertMLP(config, context)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.attn(self.attn_norm(x), step)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class ModernBertEncoder(nn.Module):
    """Embeddings, layers and the norm after them."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        ropes = config.ropes()
        assert not isinstance(ropes, Refusal), "see refusals"
        tables, uses = ropes
        self.embeddings = ModernBertEmbeddings(config, context)
        self.rotary = nn.ModuleList(RotaryEmbedding(rope, context) for rope in tables)
        self.layers = nn.ModuleList(
            ModernBertLayer(config, index, self.rotary[uses[index]], context)  # type: ignore[arg-type]
            for index in range(config.num_layers)
        )
        self.norm = _norm("final_norm", config, context)

    def forward(self, token_ids: Tensor, step: Step, rows: Tensor) -> Tensor:
        x = self.embeddings(token_ids)
        for layer in self.layers:
            x = layer(x, step)
        return self.norm(x.index_select(0, rows))  # type: ignore[no-any-return]


class ModernBert(Encoder):
    """ModernBERT. A head is a dense layer, an activation and a norm before the labels."""

    activation_names: ClassVar[tuple[str, ...]] = ("hidden_activation", "classifier_activation")

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        self.model = ModernBertEncoder(config, context)
        self.classifier: Linear | None = None
        if config.num_labels:
            size, activation = config.hidden_size, str(config.values["classifier_activation"])
            biased = config.flag("classifier_bias")
            self.dense = Linear([("head.dense", size)], size, context, bias=biased, activation=activation)
            self.norm = _norm("head.norm", config, context)
            self.classifier = label_head("classifier", config, context, bias=True)

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        completed = {
            "hidden_activation": "gelu",
            "classifier_activation": "gelu",
            "classifier_pooling": "cls",
            "norm_eps": 1e-5,
            "local_attention": 128,
            **values,
        }
        count, every = completed.get("num_hidden_layers"), completed.get("global_attn_every_n_layers") or 3
        if completed.get("layer_types") is None and isinstance(count, int) and isinstance(every, int):
            completed["layer_types"] = [SLIDING if index % every else FULL for index in range(count)]
        local, side = completed["local_attention"], completed.get("sliding_window")
        if side is None and isinstance(local, int):
            side = local // 2
        if isinstance(side, int):
            # What a token sees on each side; windows here have the token itself too.
            completed["sliding_window"] = side + 1
        given = completed.get("rope_parameters") or {}
        completed["rope_parameters"] = {
            kind: {"rope_theta": values.get(name) or default, **(given.get(kind) or {})}
            for kind, (name, default) in _BASES.items()
        }
        return completed

    @classmethod
    def refusals(cls, config: ModelConfig) -> list[str]:
        ropes = config.ropes()
        biases = ["its feed-forward has biases"] if config.flag("mlp_bias") else []
        pooling = config.values["classifier_pooling"]
        unknown = [f"its head pools by {pooling}"] if pooling not in ("cls", "mean") else []
        return [*super().refusals(config), *(ropes.reasons if isinstance(ropes, Refusal) else ()), *biases, *unknown]

    @classmethod
    def unused(cls, config: ModelConfig) -> str:
        return r"(head|decoder)\."

    @classmethod
    def pooling_of(cls, config: ModelConfig) -> Pooling:
        if config.num_labels and not config.labels_tokens:
            return Pooling(config.values["classifier_pooling"])
        return super().pooling_of(config)

    def forward(self, token_ids: Tensor, step: Step, rows: Tensor) -> Tensor:
        return self.model(token_ids, step, rows)  # type: ignore[no-any-return]

    def scores(self, hidden: Tensor) -> Tensor:
        if self.classifier is None:
            return super().scores(hidden)
        return self.classifier(self.norm(self.dense(hidden)))  # type: ignore[no-any-return]
