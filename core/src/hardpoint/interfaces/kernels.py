"""The optional contract of fused operators: what a backend computes faster than plain torch.

A model runs without any kernel set. Where a backend has one, the core asks it first whether it runs the whole model as one program
(`fuse`), and where that is refused, for single operators.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from hardpoint.interfaces.attention import KVCacheGroup, Refusal
from hardpoint.interfaces.contract import Contract
from hardpoint.interfaces.dtypes import DType

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hardpoint.interfaces.allocator import DeviceAllocator
    from hardpoint.interfaces.sampling import SamplingTables


class Activation(StrEnum):
    """Activation of the gated feed-forward: `act(gate) * up`.

    CLAMPED_SWIGLU is GPT-OSS's: `(up + 1) * gate * sigmoid(1.702 * gate)`, gate at most 7 and up between -7 and 7.
    """

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"


@dataclass(frozen=True)
class FuseRequest:
    """What the core asks of a kernel set: run a model's decoder as one program, with these attention plans.

    Attributes:
        dtype: of weights and activations.
        groups: the model's KV cache groups, with the plans that this backend's attention made for them.
        max_num_tokens: most tokens in one step.
        max_num_samples: most rows of logits in one step.
        max_context: longest context.
    """

    dtype: DType
    groups: tuple[KVCacheGroup, ...]
    max_num_tokens: int
    max_num_samples: int
    max_context: int


class DecoderProgram(Contract, contract=True):
    """A decoder whose whole step is one call. It owns its weights, in the device's own layout, in the allocator's memory.

    What a call returns may be overwritten by the next step.
    """

    @abstractmethod
    def load_weight(self, name: str, tensor: Tensor) -> None:
        """Copy one parameter (named and shaped as in the model, any dtype, host or device) into its place.

        May be called again at any time between steps to update the weight. Raises ValueError on a wrong name or shape.
        """

    @abstractmethod
    def read_weight(self, name: str) -> Tensor:
        """Return a copy of one parameter in the shape and order that `load_weight` takes."""

    def weight_memory(self) -> tuple[Tensor, ...]:
        """Return the allocator's tensors that hold nothing but weights; empty where they cannot be told apart."""
        return ()

    @abstractmethod
    def scratch_bytes(self) -> int:
        """Return the bytes of working memory held for the largest step."""

    @abstractmethod
    def run(
        self, token_ids: Tensor, positions: Tensor, metadata: tuple[object, ...], kv_cache: Tensor, rows: Tensor
    ) -> Tensor:
        """Run one step, whose inputs are on the device, and return the hidden states [rows, hidden_size] after the final norm.

        Args:
            token_ids, positions: int64[T].
            metadata: what the attention backend's `prepare` returned for each KV cache group of the step.
            kv_cache: the whole cache, all layers.
            rows: int32[rows], indices of tokens in the step (for sampling, the last token of each sampled sequence).
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32[rows, vocab_size] of hidden states that `run` returned, or rows of them."""

    @abstractmethod
    def argmax(self, hidden: Tensor) -> Tensor:
        """Return int64[rows], the lowest id of the highest logit of each row; see `logits`."""


@dataclass(frozen=True)
class LinearRequest:
    """What the core asks of a kernel set: multiply by a weight [rows, columns], as a rank has it.

    Attributes:
        dtype: of the weight, the bias and the activations.
    """

    rows: int
    columns: int
    dtype: DType


class LinearProgram(Contract, contract=True):
    """A linear layer over a weight in a layout of the kernel set's own.

    The weight is the caller's: its only copy, in the allocator's memory.
    """

    def __init__(self, request: LinearRequest) -> None:
        self._request = request

    @abstractmethod
    def weight_shape(self) -> tuple[int, ...]:
        """Return the shape of the stored weight, in the request's dtype."""

    @abstractmethod
    def write(self, stored: Tensor, row: int, values: Tensor) -> None:
        """Store rows [n, columns] of the weight, in any floating dtype, from `row` on."""

    @abstractmethod
    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`, [..., rows], of x [..., columns] and the stored weight."""


@dataclass(frozen=True)
class ExpertsRequest:
    """What the core asks of a kernel set: run the experts of a mixture's layer, as a rank has them.

    Attributes:
        num_experts: gated feed-forwards.
        top_k: how many of them each token goes through.
        hidden_size: elements of a token.
        intermediate_size: inner elements of an expert that the rank has.
        activation: of the gates.
        dtype: of weights, biases and activations.
        renormalise: the chosen experts' probabilities are divided by their sum.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    dtype: DType
    renormalise: bool


class ExpertsProgram(Contract, contract=True):
    """The experts of one layer. Their weights are the caller's, in the layout that this program says; it has none of its own."""

    def __init__(self, request: ExpertsRequest) -> None:
        self._request = request

    def weight_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the stored weights (gate_up, down), in the request's dtype.

        Without an override [num_experts, 2 * intermediate_size, hidden_size], rows of gate, then up, and
        [num_experts, hidden_size, intermediate_size].
        """
        asked = self._request
        experts, hidden, inner = asked.num_experts, asked.hidden_size, asked.intermediate_size
        return (experts, 2 * inner, hidden), (experts, hidden, inner)

    def stores_plainly(self) -> bool:
        """Whether the stored weights are the plain ones, byte for byte."""
        return True

    def write_gate_up(self, stored: Tensor, row: int, values: Tensor) -> None:
        """Store rows [n, hidden_size], in any floating dtype, from `row` on; all experts' rows are counted, one expert after the other."""
        plain = stored.view(-1, self._request.hidden_size)
        plain[row : row + len(values)].copy_(values)

    def write_down(self, stored: Tensor, row: int, values: Tensor) -> None:
        """Store rows [n, intermediate_size]; as `write_gate_up` counts them."""
        plain = stored.view(-1, self._request.intermediate_size)
        plain[row : row + len(values)].copy_(values)

    @abstractmethod
    def run(
        self,
        x: Tensor,
        logits: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """Return [T, hidden_size], the sum of the experts' outputs that each token of x [T, hidden_size] chooses, weighted.

        A token chooses the `top_k` experts of the greatest logits, the lower number first of equal ones. Their weights are their
        probabilities, the softmax of all logits in float32. No shape depends on what is chosen, and the host waits for nothing,
        so that a step can be captured.

        Args:
            logits: the router's, [T, num_experts], in the request's dtype or in float32.
            gate_up, down: stored weights.
            gate_up_bias: [num_experts, 2 * intermediate_size].
            down_bias: [num_experts, hidden_size].
        """


class KernelSet(Contract, contract=True):
    """Fused operators of one device; made by the descriptor's factory with the device as its only argument.

    Each operator allocates its result unless it works in place; inputs are contiguous in their last axis.
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

    def fuse(self, model: nn.Module, request: FuseRequest, allocator: DeviceAllocator) -> DecoderProgram | Refusal:
        """Return a program that computes what a model's modules compute, its weights uninitialised, or why there is none.

        An optimisation that a backend offers itself: it recognises the modules that it can run, by their exact classes, and refuses
        what it does not know. A model that is refused runs as modules.

        Args:
            model: a `hardpoint.models.decoder.CausalLM`, whole, on the meta device.
        """
        return Refusal(("this kernel set has no fused decoder",))

    def plan_linear(self, request: LinearRequest) -> LinearProgram | Refusal:
        """Return what multiplies by a weight in a layout of its own, or why the plain weight is left to torch."""
        return Refusal(("this kernel set multiplies by plain weights, as torch does",))

    def plan_experts(self, request: ExpertsRequest) -> ExpertsProgram | Refusal:
        """Return what runs the experts of a mixture, or why this kernel set does not; the core's plain torch does then."""
        return Refusal(("this kernel set has no operator for experts",))
