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
from hardpoint.interfaces.blocks import BlockFormat
from hardpoint.interfaces.contract import Contract
from hardpoint.interfaces.dtypes import DType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from hardpoint.interfaces.allocator import DeviceAllocator
    from hardpoint.interfaces.sampling import SamplingTables


class Activation(StrEnum):
    """Activation of the gated feed-forward, `act(gate) * up`, and of a linear layer.

    GELU is the exact one, by the error function (arXiv:1606.08415).
    CLAMPED_SWIGLU is GPT-OSS's, of gates only: `(up + 1) * gate * sigmoid(1.702 * gate)`, gate at most 7 and up between -7 and 7.
    """

    SILU = "silu"
    GELU = "gelu"
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
        adapters: steps may go through adapters, which the program then adds to the model's linear layers.
    """

    dtype: DType
    groups: tuple[KVCacheGroup, ...]
    max_num_tokens: int
    max_num_samples: int
    max_context: int
    adapters: bool = False


class DecoderProgram(Contract, contract=True):
    """A decoder whose whole step is one call. It owns its weights, in the device's own layout, in the allocator's memory.

    What a call returns may be overwritten by the next step.
    """

    @abstractmethod
    def load_weight(self, name: str, tensor: Tensor, first_row: int | None = None) -> None:
        """Copy one parameter (named and shaped as in the model, any dtype, host or device) into its place.

        A parameter in blocks is uint8[rows, bytes of a row], as `BlockFormat` says.

        May be called again at any time between steps to update the weight, and by several threads at once for rows that are not the same.
        Raises ValueError on a wrong name or shape.

        Args:
            first_row: where the tensor's rows begin in the parameter, of which it may be a part; None for a whole parameter.
        """

    @abstractmethod
    def read_weight(self, name: str) -> Tensor:
        """Return a copy of one parameter in the shape and order that `load_weight` takes."""

    def take_adapters(self, weights: Mapping[str, AdapterWeights]) -> None:
        """Add from here on what adapters in these slots make of the inputs of linear layers, by the names of their weights.

        Called once, before the first step, of a program whose request has `adapters`. What is in the slots changes between steps.
        """
        raise NotImplementedError

    def weight_memory(self) -> tuple[Tensor, ...]:
        """Return the allocator's tensors that hold nothing but weights; empty where they cannot be told apart."""
        return ()

    @abstractmethod
    def scratch_bytes(self) -> int:
        """Return the bytes of working memory held for the largest step."""

    @abstractmethod
    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: tuple[object, ...],
        kv_cache: Tensor,
        rows: Tensor,
        embedded: tuple[Tensor, Tensor] | None = None,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """Run one step, whose inputs are on the device, and return the hidden states [rows, hidden_size] after the final norm.

        Args:
            token_ids, positions: int64[T].
            metadata: what the attention backend's `prepare` returned for each KV cache group of the step.
            kv_cache: the whole cache, all layers.
            rows: int32[rows], indices of tokens in the step (for sampling, the last token of each sampled sequence).
            embedded: indices of tokens in the step, int64[k], and their embeddings, [k, hidden_size] in the request's dtype, which stand in
                the place of those of their ids.
            adapters: which tokens go through which adapter, as `KernelSet.add_adapters` says; None where none does.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32[rows, vocab_size] of hidden states that `run` returned, or rows of them."""

    @abstractmethod
    def argmax(self, hidden: Tensor) -> Tensor:
        """Return int64[rows], the lowest id of the highest logit of each row; see `logits`."""

    def logprobs(self, hidden: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return what `KernelSet.logprobs` does of these rows' logits, in tensors of its own, without the logits in memory.

        None (the default) where this program does not do it for that `count`, and nothing was done.

        Args:
            hidden: as in `logits`, of as many rows as a step may have tokens.
            token_ids: int64[rows] on the device, each in the vocabulary.
        """
        return None


@dataclass(frozen=True)
class LinearRequest:
    """What the core asks of a kernel set: multiply by a weight [rows, columns], as a rank has it.

    Attributes:
        dtype: of the weight, the bias and the activations.
        blocks: the weight's format where it is stored in blocks, one of `KernelSet.block_formats`.
    """

    rows: int
    columns: int
    dtype: DType
    blocks: BlockFormat | None = None


class LinearProgram(Contract, contract=True):
    """A linear layer over a weight in a layout of the kernel set's own.

    The weight is the caller's: its only copy, in the allocator's memory.
    """

    def __init__(self, request: LinearRequest) -> None:
        self._request = request

    @abstractmethod
    def weight_shape(self) -> tuple[int, ...]:
        """Return the shape of the stored weight, in the request's dtype; of one in blocks in uint8."""

    @abstractmethod
    def write(self, stored: Tensor, row: int, values: Tensor) -> None:
        """Store rows [n, columns] of the weight, in any floating dtype, from `row` on; of one in blocks uint8[n, bytes of a row]."""

    @abstractmethod
    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x @ weight.T + bias`, [..., rows], of x [..., columns] and the stored weight.

        With a weight in blocks a row's result is the same, bit for bit, whatever rows are beside it. A program may round activations
        to 8 bits in blocks of 32, to the nearest: its error is then at most half a step, `max|x| / 254`, of each, in which activations
        beyond four root mean squares of their row do not count; those are not rounded so.
        """

    def run_activated(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor | None:
        """Return `act(x @ weight.T + bias)` as `run` does, in one pass and rounded once.

        None (the default) where this program does not do it for that activation, and nothing was done.
        """
        return None

    def gather(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Return [n, columns] in the request's dtype: rows int64[n] of a stored weight in blocks. Asked of no other weights."""
        raise NotImplementedError


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


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The adapters of one linear layer, in as many slots as a step may have adapters (LoRA, arXiv:2106.09685).

    A layer that is merged of several has a part for each, with matrices of its own. What a slot has beyond its rank is zero.

    Attributes:
        down: [slots, parts * max_rank, columns], the matrices A in the activations' dtype, those of the parts one below the other.
        up: [slots, max_rank, rows], the matrices B transposed, those of the parts side by side.
        ranks: int32[slots, parts]; 0 where an adapter has nothing for the part.
        scales: float32[slots, parts], by which the products are multiplied.
        spans: (first, end) of each part's rows, one after the other.

    All are on the device; `down` and `up` are contiguous within a slot, `ranks` and `scales` in their last axis.
    """

    down: Tensor
    up: Tensor
    ranks: Tensor
    scales: Tensor
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which of a step's tokens go through which adapter, those of one adapter together.

    Attributes:
        tokens: int64[k] on the device, indices in the step; each at most once.
        slots, starts: int32[g] and int32[g + 1] on the device: group i goes through the adapter in `slots[i]`, and is
            `tokens[starts[i]:starts[i + 1]]`. No two groups have one slot.
        groups: the same on the host: (slot, first, end).
    """

    tokens: Tensor
    slots: Tensor
    starts: Tensor
    groups: tuple[tuple[int, int, int], ...]


class KernelSet(Contract, contract=True):
    """Fused operators of one device; made by the descriptor's factory with the device as its only argument.

    Each operator allocates its result unless it works in place; inputs are on the device, and contiguous in their last axis. The core
    calls with tensors as they are described here: an operator that finds others may raise a ValueError of its own, or not look.
    """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return `x / sqrt(mean(x²) + eps) * weight` over the last axis, computed in float32, in x's dtype and shape.

        Args:
            x: [rows, size], or heads [rows, heads, size] of any strides but the last axis's, as a slice of wider rows has them.
            weight: [size], in x's dtype.
        """

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place, and return RMSNorm of the sum, as it was rounded to their dtype, in x's dtype and shape.

        Args:
            x, residual: [rows, size] of one dtype, whose rows may lie apart.
            weight: [size], in x's dtype.
        """

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, branch: Tensor | None = None
    ) -> Tensor | None:
        """Return `(y - mean(y)) / sqrt(variance(y) + eps) * weight + bias` over the last axis of `y = x + branch`, in x's dtype.

        It is computed in float32 and rounded once. None (the default) where this kernel set does not do it, and torch does.

        Args:
            x: [rows, size], whose rows may lie apart.
            weight, bias: [size], in x's dtype; None for no bias.
            branch: as x, and not changed; None for `y = x`.
        """
        return None

    @abstractmethod
    def rotary(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate the first `rotary_dim` elements of each head in place, element i with element `i + rotary_dim / 2` (arXiv:2104.09864).

        Args:
            q, k: [T, heads, dim] and [T, kv_heads, dim] of one dtype; heads and dims contiguous, any stride between tokens.
            positions: int64[T], from 0, each a row of `cos` and `sin`.
            cos, sin: float32[max positions, rotary_dim / 2], contiguous; `rotary_dim` is at most `dim`.
        """

    @abstractmethod
    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Return `act(x[:, :n]) * x[:, n:]`, [rows, n] in x's dtype, of x [rows, 2 * n], whose rows may lie apart."""

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """Return int64[rows], the lowest index of the highest value in each row of float32[rows, columns]."""

    def sample(self, logits: Tensor, step: Tensor, tables: SamplingTables) -> Tensor | None:
        """Sample a token for each row of logits, and write it to the tables: `last_tokens`, and the counts of rows with a history.

        `hardpoint_conformance.sampling_reference` defines the tokens. A row's token depends on that row alone, bit for bit.

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

    def add_adapters(self, out: Tensor, x: Tensor, weights: AdapterWeights, rows: AdapterRows) -> bool:
        """Add to rows of `out`, in place, what their adapters make of the same rows of x; other rows keep their bits.

        For token t in the group of slot a, and part p with the rows from f to e: `out[t, f:e] += scales[a, p] * (x[t] @ A.T @ B.T)`, where
        A and B are the part's matrices up to its rank. Products are summed in float32, what lies between the matrices is not rounded, and
        the sum with `out` is rounded once. False (the default) where this kernel set does not do it, and nothing was done: torch does.

        Args:
            out: [T, rows] in x's dtype, contiguous in its last axis.
            x: [T, columns].
        """
        return False

    def fuse(self, model: nn.Module, request: FuseRequest, allocator: DeviceAllocator) -> DecoderProgram | Refusal:
        """Return a program that computes what a model's modules compute, its weights uninitialised, or why there is none.

        An optimisation that a backend offers itself: it recognises the modules that it can run, by their exact classes, and refuses
        what it does not know. A model that is refused runs as modules. A kernel set whose programs take no adapters refuses a request
        with `adapters`.

        Args:
            model: a `hardpoint.models.decoder.CausalLM`, whole, on the meta device.
        """
        return Refusal(("this kernel set has no fused decoder",))

    def block_formats(self) -> frozenset[BlockFormat]:
        """Return the formats of blocks that `plan_linear` and `fuse` multiply by as they are stored; others are expanded."""
        return frozenset()

    def plan_linear(self, request: LinearRequest) -> LinearProgram | Refusal:
        """Return what multiplies by a weight in a layout of its own, or why the plain weight is left to torch."""
        return Refusal(("this kernel set multiplies by plain weights, as torch does",))

    def plan_experts(self, request: ExpertsRequest) -> ExpertsProgram | Refusal:
        """Return what runs the experts of a mixture, or why this kernel set does not; the core's plain torch does then."""
        return Refusal(("this kernel set has no operator for experts",))
