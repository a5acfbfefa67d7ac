"""The optional contract of fused operators: what a backend computes faster than plain torch.

A model runs without any kernel set. Where a backend has one, the core asks it first for a whole decoder step
(`plan_decoder`), and where that is refused, for single operators.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from hardpoint.interfaces.attention import AttentionPlan, Refusal
from hardpoint.interfaces.capabilities import AttentionLayer
from hardpoint.interfaces.contract import Contract
from hardpoint.interfaces.dtypes import DType

if TYPE_CHECKING:
    from torch import Tensor

    from hardpoint.interfaces.allocator import DeviceAllocator
    from hardpoint.interfaces.batch import StepBatch
    from hardpoint.interfaces.sampling import SamplingTables


class Activation(StrEnum):
    """Activation of the gated feed-forward: `act(gate) * up`."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True)
class DecoderSpec:
    """A lean decoder: embedding, pre-normalised attention and gated feed-forward layers, final norm, head.

    Every normalisation is RMSNorm, `x / sqrt(mean(x²) + norm_eps) * weight`, computed in float32; the offset of families whose
    weights are stored as `weight - 1` is added when they are loaded. Rotary embedding uses halves (`rotate_half`) and per-layer tables.

    Weights, by name, shapes in torch's [out, in] order (`N` is the layer's index):

    ============================  ==============================================================
    embed                         [vocab_size, hidden_size]
    layers.N.input_norm           [hidden_size]
    layers.N.qkv                  [(num_heads + 2 · num_kv_heads) · head_dim, hidden_size]: rows of q, then k, then v
    layers.N.qkv_bias             [(num_heads + 2 · num_kv_heads) · head_dim], where qkv_bias
    layers.N.q_norm, .k_norm      [head_dim], where qk_norm: RMSNorm of each head before rotary embedding
    layers.N.o                    [hidden_size, num_heads · head_dim]
    layers.N.o_bias               [hidden_size], where o_bias
    layers.N.attention_out_norm   [hidden_size], where sandwich_norms: applied to the attention's output before it is added
    layers.N.mlp_norm             [hidden_size]: applied before the feed-forward
    layers.N.gate_up              [2 · intermediate_size, hidden_size]: rows of gate, then up
    layers.N.down                 [hidden_size, intermediate_size]
    layers.N.mlp_out_norm         [hidden_size], where sandwich_norms: applied to the feed-forward's output
    final_norm                    [hidden_size]
    head                          [vocab_size, hidden_size], unless tied (then `embed` is the head)
    ============================  ==============================================================

    Attributes:
        attention: one entry per layer.
        rope_tables: for each layer, which of the rotary tables it uses.
        rotary_dim: leading elements of each head that are rotated (even, at most head_dim).
        embed_scale: factor of the embedding's output.
        logit_soft_cap: `cap * tanh(logit / cap)` of the final logits; None for off.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: tuple[AttentionLayer, ...]
    rope_tables: tuple[int, ...]
    rotary_dim: int
    norm_eps: float
    activation: Activation = Activation.SILU
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    embed_scale: float = 1.0
    logit_soft_cap: float | None = None

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.attention)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight by name, in the order of use."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden)}
        for index, layer in enumerate(self.attention):
            qkv_rows = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
            attention_width = layer.num_heads * layer.head_dim
            parts: dict[str, tuple[tuple[int, ...], bool]] = {
                "input_norm": ((hidden,), True),
                "qkv": ((qkv_rows, hidden), True),
                "qkv_bias": ((qkv_rows,), self.qkv_bias),
                "q_norm": ((layer.head_dim,), self.qk_norm),
                "k_norm": ((layer.head_dim,), self.qk_norm),
                "o": ((hidden, attention_width), True),
                "o_bias": ((hidden,), self.o_bias),
                "attention_out_norm": ((hidden,), self.sandwich_norms),
                "mlp_norm": ((hidden,), True),
                "gate_up": ((2 * self.intermediate_size, hidden), True),
                "down": ((hidden, self.intermediate_size), True),
                "mlp_out_norm": ((hidden,), self.sandwich_norms),
            }
            shapes |= {f"layers.{index}.{name}": shape for name, (shape, present) in parts.items() if present}
        shapes["final_norm"] = (hidden,)
        if not self.tied:
            shapes["head"] = (self.vocab_size, hidden)
        return shapes


@dataclass(frozen=True)
class DecoderRequest:
    """What the core asks of a kernel set: run this decoder with this attention plan.

    Attributes:
        spec: the decoder.
        dtype: of weights and activations.
        attention: the plan made by this backend's attention.
        max_num_tokens: most tokens in one step.
        max_num_samples: most rows of logits in one step.
        max_context: longest context; the rotary tables have this many rows.
    """

    spec: DecoderSpec
    dtype: DType
    attention: AttentionPlan
    max_num_tokens: int
    max_num_samples: int
    max_context: int


class DecoderOutput(StrEnum):
    """What a decoder step returns.

    LOGITS: float32[rows, vocab_size]. ARGMAX: int64[rows], the lowest id of the highest logit. HIDDEN: final-normed hidden
    states, model dtype, [rows, hidden_size].
    """

    LOGITS = "logits"
    ARGMAX = "argmax"
    HIDDEN = "hidden"


class DecoderProgram(Contract, contract=True):
    """A decoder whose whole step is one call. It owns its weights, in the device's own layout, in the allocator's memory."""

    @abstractmethod
    def load_weight(self, name: str, tensor: Tensor) -> None:
        """Copy one weight (named and shaped as `DecoderSpec` says, any dtype, host or device) into its place.

        May be called again at any time between steps to update the weight. Raises ValueError on a wrong name or shape.
        """

    @abstractmethod
    def read_weight(self, name: str) -> Tensor:
        """Return a copy of one weight in the shape and order that `load_weight` takes."""

    def weight_memory(self) -> tuple[Tensor, ...]:
        """Return the allocator's tensors that hold nothing but weights; empty where they cannot be told apart."""
        return ()

    @abstractmethod
    def set_rope_tables(self, tables: tuple[tuple[Tensor, Tensor], ...]) -> None:
        """Set the rotary tables: pairs (cos, sin), each float32[max_context, rotary_dim / 2]."""

    @abstractmethod
    def scratch_bytes(self) -> int:
        """Return the bytes of working memory held for the largest step."""

    @abstractmethod
    def run(self, batch: StepBatch, metadata: object, kv_cache: Tensor, rows: Tensor, output: DecoderOutput) -> Tensor:
        """Run one step and return `output` for the given token rows; the result may be overwritten by the next step.

        Args:
            metadata: what the attention backend's `prepare` returned for `batch`.
            kv_cache: the whole cache, all layers.
            rows: int32[rows], indices of tokens in the step (for sampling, the last token of each sampled sequence).
        """


class KernelSet(Contract, contract=True):
    """Fused operators of one device; made by the descriptor's factory with the device as its only argument.

    Each operator allocates its result unless it works in place; inputs are contiguous in their last axis.
    """

    @abstractmethod
    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return `x -> x @ weight.T + bias` for a weight that does not change, in the layout that runs fastest here.

        The weight may be packed into a copy: the caller drops its own reference if it needs it no more.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return RMSNorm over the last axis, computed in float32, in x's dtype."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place, and return RMSNorm of the sum."""

    @abstractmethod
    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate q [T, heads, dim] and k [T, kv_heads, dim] in place (halves); cos, sin float32[max, rotary_dim / 2]."""

    @abstractmethod
    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Return `act(x[..., :n]) * x[..., n:]` where n is half the last axis."""

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """Return int64[rows], the lowest index of the highest value in each row of float32[rows, columns]."""

    def sample(self, logits: Tensor, step: Tensor, tables: SamplingTables) -> Tensor | None:
        """Sample a token for each row of logits, and write it to the tables: `last_tokens`, and the counts of rows with a history.

        `hardpoint.sampling.reference` defines the tokens. A row's token depends on that row alone, bit for bit.

        Args:
            logits: float32[S, vocab_size], not changed.
            step: int64[3, S] on the device: each sample's row in the tables, how many tokens its sequence has, and its draw.
            tables: parameters and state; only `last_tokens` and `history` are written.

        Returns:
            int64[S] on the device, token ids or a `SampleFailure` for a row that has none; None (the default) where this kernel set has no
            sampler, and nothing was done.
        """
        return None

    def logprobs(self, logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return log probabilities of rows of logits: ids and values, [rows, 1 + count], and ranks from 1, int64[rows].

        The token of each row stands first (token 0 for a negative id), then the `count` best ones: the higher logit first, the lower id
        first among equals. None (the default) where this kernel set does not do it.

        Args:
            logits: float32[rows, vocab_size].
            token_ids: int64[rows].
        """
        return None

    def plan_decoder(self, request: DecoderRequest, allocator: DeviceAllocator) -> DecoderProgram | Refusal:
        """Return a program that runs the whole decoder, its weights uninitialised, or why there is none."""
        return Refusal(("this kernel set has no fused decoder",))
