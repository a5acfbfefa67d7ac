"""Decoders of the Qwen3 family by their numbers alone, and what a step of theirs has to move and to compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ITEMSIZE = 2
"""Bytes of an element: weights, activations and KV cache are bfloat16."""


@dataclass(frozen=True)
class Decoder:
    """The shape of a decoder with tied embeddings.

    Attributes:
        intermediate: width of the feed-forward layers.
        max_len: longest context in tokens.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_len: int

    @property
    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_len,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "attention_bias": False,
            "tie_word_embeddings": True,
        }

    @property
    def matrix_parameters(self) -> int:
        """Weights of the layers' matrices, without embedding and norms."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (queries + 2 * keys) + queries * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: all matrices once, the embedding as the head among them; norms are left out."""
        return (self.matrix_parameters + self.vocab * self.hidden) * ITEMSIZE

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ITEMSIZE

    def decode_bytes(self, steps: int, context: int) -> int:
        """Return the least bytes that decode steps move.

        Args:
            steps: each reads all weights.
            context: keys that are read, the sum over all tokens of all steps.
        """
        return steps * self.step_weight_bytes + context * self.kv_bytes

    def prefill_operations(self, prompts: int, length: int) -> int:
        """Return the floating-point operations of prefilling prompts from nothing, with the logits of each one's last token.

        Two per weight and token; in attention two for the scores and two for the values, per visible key and element.
        """
        visible = length * (length + 1) // 2
        attention = 4 * visible * self.heads * self.head_dim * self.layers
        return prompts * (2 * length * self.matrix_parameters + attention + 2 * self.vocab * self.hidden)


QWEN3_0_6B = Decoder(
    layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151936, max_len=8192
)
TINY = Decoder(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=64, intermediate=128, vocab=512, max_len=1024)
"""For showing that a benchmark runs; its figures mean nothing."""

DECODERS = {"qwen3-0.6b": QWEN3_0_6B, "tiny": TINY}
