"""A model's configuration as a family reads it: a mapping under Hugging Face's names, checked value by value.

It comes from a config.json, or is made from a GGUF file's metadata. What it does not say, the family's `defaults` say, which are
those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hardpoint.interfaces.attention import Refusal
from hardpoint.interfaces.capabilities import AttentionLayer
from hardpoint.interfaces.errors import ModelError
from hardpoint.interfaces.kernels import Activation
from hardpoint.layers.rope import Rope, rope_from_config
from hardpoint.models.pooling import DenseModule
from hardpoint.validation import FLOAT32_MAX, shown

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}
_MAX_INTEGER = 1 << 31
_MAX_LAYERS = 1024
"""Beyond any model's; a configuration that asks for more would take time and memory for each layer before a tensor is missed."""
_MAX_EXPERTS = 1 << 14
"""Beyond any model's; each has tensors of its own, which are listed before one is missed."""
_ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor")
_ROPE_FACTORS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Numbers of rotary parameters, of which these may be 0."""
FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"


def with_kv_heads(values: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return values with so many KV heads where they do not say how many; at most the number of query heads."""
    heads = values.get("num_attention_heads")
    return {"num_key_value_heads": min(count, heads) if isinstance(heads, int) else count, **values}


@dataclass(frozen=True)
class HeadTokens:
    """Whose rows of the language model's head label a text.

    Attributes:
        tokens: as texts or ids.
        is_difference: there is one label, whose row is that of the second token less that of the first: its sigmoid is the probability of
            the second among the two.
        tied: the rows are those of the embedding.
    """

    tokens: tuple[str | int, ...]
    is_difference: bool
    tied: bool

    @property
    def num_labels(self) -> int:
        """Labels of the head."""
        return 1 if self.is_difference else len(self.tokens)


@dataclass(frozen=True)
class ModelConfig:
    """Reads a configuration; every method raises ModelError for a value that cannot be.

    Attributes:
        architecture: as the configuration names it.
        values: by name, with the family's defaults in them.
        where: the file that they come from, for messages.
        rope_divisors: see `Rope.frequency_divisors`.
        dense: layers after the pooling of hidden states, from files of their own.
    """

    architecture: str
    values: Mapping[str, Any]
    where: str = "the configuration"
    rope_divisors: tuple[float, ...] | None = None
    dense: tuple[DenseModule, ...] = ()

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number from `least` on, below 2^31."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MAX_INTEGER:
            raise self._unusable(name, value, f"a whole number of at least {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number above 0 that float32 holds."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= FLOAT32_MAX:
            raise self._unusable(name, value, "a number above 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return a finite number above 0, or None where there is none."""
        return None if self.values.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._unusable(name, value, "true or false")
        return value

    def experts_per_token(self, num_experts: int, default: int | None = None) -> int:
        """Return how many of a layer's experts each token goes through."""
        if num_experts > _MAX_EXPERTS:
            raise self._unusable("the number of experts", num_experts, f"at most {_MAX_EXPERTS}")
        count = self.integer("num_experts_per_tok", default)
        if count > num_experts:
            raise self._unusable("num_experts_per_tok", count, f"at most the number of experts, {num_experts}")
        return count

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers; an empty one where there is none."""
        value = self.values.get(name)
        value = () if value is None else value
        if not isinstance(value, (list, tuple)) or not all(type(number) is int for number in value):
            raise self._unusable(name, value, "a list of whole numbers")
        return tuple(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """Return an object; an empty one where there is none."""
        value = self.values.get(name)
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            raise self._unusable(name, value, "an object")
        return dict(value)

    def part(self, name: str, defaults: Mapping[str, Any]) -> ModelConfig:
        """Return the object of this name as a configuration, with defaults for what it does not say."""
        return replace(self, values={**defaults, **self.mapping(name)}, where=f"{name} of {self.where}")

    @property
    def positions(self) -> ModelConfig:
        """What the configuration says of rotary positions, under the present or the former name."""
        return replace(self, values=self.mapping("rope_parameters") or self.mapping("rope_scaling"))

    @property
    def is_bare(self) -> bool:
        """The model has no head of its own (`LlamaModel`)."""
        return not self.architecture.endswith(("ForCausalLM", "ForConditionalGeneration"))

    @property
    def labels_tokens(self) -> bool:
        """The model has a head that labels, or rewards, each token."""
        return self.architecture.endswith("ForTokenClassification") or self.rewards_tokens

    @property
    def rewards_tokens(self) -> bool:
        """The head has two layers: the reward of the text so far, or the probability that a step of it is right."""
        return self.architecture.endswith(("ForRewardModel", "ForProcessRewardModel"))

    @cached_property
    def head_tokens(self) -> HeadTokens | None:
        """The tokens whose rows of the language model's head are the head that labels texts; None where it has rows of its own.

        As vLLM reads it: `classifier_from_token` with a `method`, or with `is_original_qwen3_reranker`.
        """
        tokens, method = self.values.get("classifier_from_token"), self.values.get("method")
        original = self.flag("is_original_qwen3_reranker")
        if not original and (tokens is None or method is None):
            return None
        if not isinstance(tokens, list) or not tokens or not all(isinstance(one, (str, int)) for one in tokens):
            raise self._unusable("classifier_from_token", tokens, "a list of tokens")
        method = "from_2_way_softmax" if original else method
        if method not in ("from_2_way_softmax", "no_post_processing"):
            raise self._unusable("method", method, "'from_2_way_softmax' or 'no_post_processing'")
        is_difference = method == "from_2_way_softmax"
        if is_difference and len(tokens) != 2:
            raise self._unusable("classifier_from_token", tokens, "the two tokens that mean no and yes")
        if self.labels_tokens or not self.architecture.endswith("ForSequenceClassification"):
            raise self._unusable(
                "architectures", [self.architecture], "of a model that labels texts, since it has classifier_from_token"
            )
        return HeadTokens(tuple(tokens), is_difference, self.tied)

    @cached_property
    def num_labels(self) -> int:
        """Labels of the head that classifies texts or tokens; 0 where the model has none."""
        if self.rewards_tokens:
            return 2 if self.architecture.endswith("ForProcessRewardModel") else 1
        if not self.labels_tokens and not self.architecture.endswith("ForSequenceClassification"):
            return 0
        if self.head_tokens is not None:
            return self.head_tokens.num_labels
        named = self.mapping("id2label")
        count = self.integer("num_labels", len(named) or 2)
        if named and len(named) != count:
            raise self._unusable("num_labels", count, f"the number of names in id2label, {len(named)}")
        return count

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels, in their order."""
        named = {str(number): str(name) for number, name in self.mapping("id2label").items()}
        return tuple(named.get(str(number), f"LABEL_{number}") for number in range(self.num_labels))

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.integer("vocab_size")

    @cached_property
    def hidden_size(self) -> int:
        """Elements of the residual stream."""
        return self.integer("hidden_size")

    @cached_property
    def intermediate_size(self) -> int:
        """Inner elements of the feed-forward."""
        return self.integer("intermediate_size")

    @cached_property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        # Configurations that name the kind of each layer may leave their number to that.
        kinds = self.values.get("layers_block_type")
        count = self.integer("num_hidden_layers", len(kinds) if isinstance(kinds, list) else None)
        if count > _MAX_LAYERS:
            raise self._unusable("num_hidden_layers", count, f"at most {_MAX_LAYERS}")
        return count

    def check_has_layers(self, num_tensors: int) -> None:
        """Raise ModelError where a checkpoint of so many tensors cannot have a tensor of each layer."""
        if "num_hidden_layers" in self.values and self.num_layers > num_tensors:
            raise self._unusable(
                "num_hidden_layers", self.num_layers, f"as many as the checkpoint's tensors, {num_tensors}, have"
            )

    @cached_property
    def num_heads(self) -> int:
        """Query heads of a layer."""
        return self.integer("num_attention_heads")

    @cached_property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        count = self.integer("num_key_value_heads", self.num_heads)
        if self.num_heads % count:
            raise self._unusable("num_key_value_heads", count, f"a divisor of num_attention_heads, {self.num_heads}")
        return count

    @cached_property
    def head_dim(self) -> int:
        """Elements of a head."""
        if self.values.get("head_dim") is None and self.hidden_size % self.num_heads:
            raise self._unusable(
                "hidden_size", self.hidden_size, f"a multiple of num_attention_heads, {self.num_heads}"
            )
        return self.integer("head_dim", self.hidden_size // self.num_heads)

    @cached_property
    def norm_eps(self) -> float:
        """Added to the mean square in every norm."""
        return self.number("rms_norm_eps", 1e-6)

    @cached_property
    def tied(self) -> bool:
        """The head is the embedding."""
        return self.flag("tie_word_embeddings")

    @cached_property
    def max_position_embeddings(self) -> int:
        """The context length that rotary embeddings were made for, before scaling."""
        return self.integer("max_position_embeddings")

    @property
    def activation(self) -> Activation:
        """Activation of the feed-forward; see `refusals`."""
        return _ACTIVATIONS[self.activation_name]

    @property
    def activation_name(self) -> str:
        """The same as the configuration calls it, in all that is not refused one of `layers.activations.ACTIVATIONS`."""
        return str(self.values.get("hidden_act") or "silu")

    @cached_property
    def layer_types(self) -> tuple[str, ...]:
        """What attention each layer has: "full_attention" or "sliding_attention"; see `refusals`."""
        given = self.values.get("layer_types")
        kinds = [FULL] * self.num_layers if given is None else given
        if not isinstance(kinds, Sequence) or isinstance(kinds, str) or len(kinds) < self.num_layers:
            raise self._unusable("layer_types", given, f"a list of {self.num_layers} names")
        return tuple(map(str, kinds[: self.num_layers]))

    def window(self, index: int) -> int | None:
        """Return the window of a layer by its type: visible keys, the query's own included, as transformers masks them."""
        return self.sliding_window if self.layer_types[index] == SLIDING else None

    @property
    def sliding_window(self) -> int | None:
        """Visible keys of windowed layers, None for all."""
        return None if self.values.get("sliding_window") is None else self.integer("sliding_window", least=0)

    @property
    def sees_both_sides(self) -> bool:
        """A decoder's queries see the keys on both sides, as transformers reads `is_causal`: null is false."""
        return not self.values.get("is_causal", True)

    def attention(
        self,
        *,
        sliding_window: int | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        causal: bool | None = None,
    ) -> AttentionLayer:
        """Return what a layer of the usual heads asks of attention; the scale is `head_dim ** -0.5` unless given.

        Args:
            causal: None for what the configuration says.
        """
        return AttentionLayer(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if scale is None else scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            causal=not self.sees_both_sides if causal is None else causal,
        )

    def ropes(self, *, partial: bool = False) -> tuple[tuple[Rope, ...], tuple[int, ...]] | Refusal:
        """Return the rotary tables and which of them each layer uses, or why they are not to be had.

        Args:
            partial: the family may rotate a part of each head.
        """
        given = dict(self.positions.values)
        if self.values.get("original_max_position_embeddings") is not None:
            given["original_max_position_embeddings"] = self.number("original_max_position_embeddings")
        kinds = list(dict.fromkeys(self.layer_types))
        nested = [kind for kind in kinds if isinstance(given.get(kind), Mapping)]
        entries = [dict(given[kind]) for kind in nested] if nested else [given]
        reasons: list[str] = []
        if nested and len(nested) < len(kinds):
            reasons.append("some of its layers have no rotary embedding")
        own_factor = self.number("partial_rotary_factor", 1.0)
        factors = {replace(self, values=entry).number("partial_rotary_factor", own_factor) for entry in entries}
        if max(factors) > 1:
            raise self._unusable("partial_rotary_factor", max(factors), "at most 1")
        if len(factors) > 1 or (factors != {1.0} and not partial):
            reasons.append(f"it has partial_rotary_factor {sorted(factors)}")
        rotary_dim = int(self.head_dim * factors.pop())
        if rotary_dim % 2:
            reasons.append(f"{rotary_dim} elements of each head are rotated, an odd number")
        found = [self._rope(entry, rotary_dim) for entry in entries]
        for rope in found:
            reasons += rope.reasons if isinstance(rope, Refusal) else ()
        if reasons:
            return Refusal(tuple(reasons))
        uses = tuple(nested.index(kind) if nested else 0 for kind in self.layer_types)
        return tuple(rope for rope in found if isinstance(rope, Rope)), uses

    def check(self) -> None:
        """Raise ModelError for the first number that every family needs and that cannot be."""
        # LFM2 has another name for its feed-forward's.
        inner = self.integer("intermediate_size" if self.values.get("block_ff_dim") is None else "block_ff_dim")
        sizes = (self.vocab_size, self.hidden_size, inner, self.num_layers, self.max_position_embeddings)
        assert all((*sizes, self.num_heads, self.num_kv_heads, self.head_dim, self.norm_eps))
        assert len(self.layer_types) == self.num_layers

    def check_foreign(self) -> None:
        """Raise ModelError for sizes that cannot be, before transformers' code makes a model of them."""
        assert self.vocab_size
        for name in ("hidden_size", "num_attention_heads"):
            if name in self.values:
                self.integer(name)
        if "num_hidden_layers" in self.values:
            assert self.num_layers

    def refusals(self, kinds: Set[str]) -> list[str]:
        """Return what no family of the core runs, and what one with these types of layers does not."""
        reasons = []
        if self.activation_name not in _ACTIVATIONS:
            reasons.append(f"its activation is {self.activation_name}")
        unknown = sorted(set(self.layer_types) - kinds)
        if unknown:
            reasons.append(f"it has layers of the type {', '.join(unknown)}")
        return reasons

    def _rope(self, entry: dict[str, Any], rotary_dim: int) -> Rope | Refusal:
        if entry.get("rope_theta") is None:
            entry["rope_theta"] = self.number("rope_theta", 10000.0)
        given = replace(self, values=entry)
        if given.number("rope_theta") <= 1:
            raise self._unusable("rope_theta", entry["rope_theta"], "a number above 1")
        for name in _ROPE_NUMBERS:
            given.optional_number(name)
        for name in _ROPE_FACTORS:
            if entry.get(name) != 0:
                given.optional_number(name)
        if entry.get("original_max_position_embeddings") is not None:
            given.integer("original_max_position_embeddings", least=2)
        divisors = self.rope_divisors
        if divisors is not None and not (
            len(divisors) == rotary_dim // 2 and all(0 < one < math.inf for one in divisors)
        ):
            raise self._unusable("rope_freqs.weight", divisors, f"{rotary_dim // 2} numbers above 0")
        return rope_from_config(entry, rotary_dim, self.max_position_embeddings, self.rope_divisors)

    def _unusable(self, name: str, value: object, wanted: str) -> ModelError:
        found = f"{name} is missing" if value is None else f"{name} is {shown(value)}"
        return ModelError(f"{self.where} is not a usable configuration", found=f"{found}, not {wanted}")
