"""The contract of paged attention.

A KV cache holds fixed-size blocks of tokens. Token t of a sequence lives in block `block_table[row, t // block_size]` at offset
`t % block_size`. Attention is causal: the query at position p sees the keys at positions `0..p`, and with a sliding window of w
keys only those at `p - w + 1..p`. Entries of the table for blocks that no query of a step sees say nothing: such blocks may be other
sequences'. They, slots beyond a sequence's context, and blocks that no sequence owns, may hold anything, NaN included, and must never
influence a result.

Layers that are not causal (`AttentionLayer.causal`) have no cache: a step has the whole of each of their sequences, and a query sees all
keys of its sequence in the step, with a window those at `p - w + 1..p + w - 1`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hardpoint.interfaces.capabilities import AttentionCapabilities, AttentionLayer, AttentionRequest, GraphLevel
from hardpoint.interfaces.contract import Contract
from hardpoint.interfaces.dtypes import DType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from hardpoint.interfaces.batch import Int32Array, StepBatch


@dataclass(frozen=True)
class Refusal:
    """A request that a backend cannot serve.

    Attributes:
        reasons: one sentence for each obstacle.
    """

    reasons: tuple[str, ...]


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of the KV cache of all layers, one tensor.

    Attributes:
        axes: names of a layer's axes in order, a permutation of ("kv", "block", "head", "token", "dim"); "kv" is the axis
            of keys (0) and values (1). The tensor has one leading axis more, the layer.

    All layers have the same KV heads and head dimension (`AttentionCapabilities.explain`). The cache of layers that are not causal has
    no layers, and its blocks no bytes: they only number the sequences' tokens.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    axes: tuple[str, ...] = ("kv", "block", "head", "token", "dim")

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes in all layers: 2 · layers · block_size · kv_heads · head_dim · itemsize."""
        per_layer = 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return self.num_layers * per_layer

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of the whole cache, the layer axis first."""
        sizes = {
            "kv": 2,
            "block": num_blocks,
            "head": self.num_kv_heads,
            "token": self.block_size,
            "dim": self.head_dim,
        }
        return (self.num_layers, *(sizes[axis] for axis in self.axes))


@dataclass(frozen=True)
class AttentionPlan:
    """What a backend offers for a request: what the engine must keep to.

    Attributes:
        kv_cache: shape of the cache.
        graph_level: what can be captured.
        notes: choices and their reasons, human-readable.
    """

    request: AttentionRequest
    kv_cache: KVCacheSpec
    graph_level: GraphLevel = GraphLevel.NONE
    notes: tuple[str, ...] = ()

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self.kv_cache.block_size


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers of a model that have one block table.

    Layers of unlike windows are in different groups, so that a sequence gives back the blocks that its sliding layers see no more. All
    groups take blocks from one pool: the cache is that of the first group, which has the most layers, and layer `i` of each group uses
    the cache's layer `i`. A block is thus as large in every group; one that has fewer layers leaves a part of its blocks unused. Each
    group has a plan of its own, so that a backend sees one block table at a time.

    Attributes:
        layers: numbers of the group's layers in the model, rising.
        plan: of these layers alone.
        window: keys that a query sees, its own included; 0 for all. No layer of the group has a larger one.
        chunk: positions of a chunk, whose keys alone its queries see; 0 for all. Then the window is as large, and the plan's steps have a
            sequence for each chunk.
    """

    layers: tuple[int, ...]
    plan: AttentionPlan
    window: int = 0
    chunk: int = 0

    @classmethod
    def whole(cls, plan: AttentionPlan) -> tuple[KVCacheGroup, ...]:
        """Return the only group of a model whose layers all have one block table and keep all keys."""
        return (cls(tuple(range(len(plan.request.layers))), plan),)


def mixed_seqs(max_num_seqs: int, num_tokens: int) -> int:
    """Return how many sequences a captured step with prompts has: as many as can have tokens, and a last one that never has any."""
    return min(max_num_seqs, num_tokens) + 1


def places_of(groups: Sequence[KVCacheGroup]) -> tuple[tuple[int, int], ...]:
    """Return each layer's group and its number in the group."""
    found = {layer: (group, i) for group, one in enumerate(groups) for i, layer in enumerate(one.layers)}
    return tuple(found[layer] for layer in range(len(found)))


class AttentionBackend(Contract, contract=True):
    """Paged attention of one device; made by the descriptor's factory with the device as its only argument.

    `plan` is called for each KV cache group of a model, `prepare` once per step and group, `write_kv` and then `forward` once per layer
    and step; for layers that are not causal `forward` alone.

    Arrays, tensors or block pairs that contradict the plan, the cache or each other are an InvalidBatch, before anything is written;
    `hardpoint.worker.attention_checks` has these checks.
    """

    @abstractmethod
    def capabilities(self) -> AttentionCapabilities:
        """Return what this backend does on its device."""

    @abstractmethod
    def plan(self, request: AttentionRequest) -> AttentionPlan | Refusal:
        """Return how the request will be served, or the reasons why it cannot be.

        Does no work on the device but to try kernels, where it chooses among several; requests that are equal get equal plans.
        """

    @abstractmethod
    def prepare(self, plan: AttentionPlan, batch: StepBatch) -> Any:
        """Return this step's metadata (device copies of the batch's arrays, the split of the work), used by all layers of the plan.

        The metadata of other plans hold at the same time.
        """

    @abstractmethod
    def write_kv(self, layer: int, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: Any) -> None:
        """Write the step's keys and values to their slots; a slot of -1 is not written.

        Args:
            layer: index into the plan's layers.
            k, v: [num_tokens, num_kv_heads, head_dim] in the request's dtype; heads and dims contiguous, any stride between tokens.
            kv_cache: this layer's slice of the cache, contiguous: the plan's `kv_cache.axes`, in its dtype.
            metadata: what `prepare` returned for the step.
        """

    @abstractmethod
    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        out: Tensor,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        """Compute attention of the step's queries over their sequences' caches into `out`.

        Args:
            layer: index into the plan's layers.
            q, out: [num_tokens, num_heads, head_dim] in the request's dtype; heads and dims contiguous, any stride between tokens.
            k, v: the step's new keys and values, already written by `write_kv`, as that takes them. For a layer that is not causal they
                are all that there is.
            kv_cache: as `write_kv` takes it; for a layer that is not causal an empty tensor.
            metadata: what `prepare` returned for the step.
            sinks, alibi_slopes: float32[num_heads], contiguous, where the layer was planned with them.
        """

    @abstractmethod
    def copy_blocks(self, kv_cache: Tensor, pairs: Int32Array) -> None:
        """Copy whole blocks in all layers, pair by pair: a later pair may read or write what an earlier one wrote.

        Args:
            kv_cache: the whole cache, as `KVCacheSpec.shape` has it, contiguous.
            pairs: int32[k, 2], (source, destination), on the host.
        """

    @abstractmethod
    def swap_blocks(self, source: Tensor, destination: Tensor, pairs: Int32Array) -> None:
        """Copy whole blocks in all layers from one whole cache to another (device to host or back).

        Args:
            source, destination: as `copy_blocks` takes one; they differ in their devices and in the number of blocks.
            pairs: int32[k, 2], (block of the source, block of the destination), on the host.
        """

    def begin_capture(self, plan: AttentionPlan, max_num_seqs: int) -> None:
        """Allocate a plan's static metadata for graph capture, called for each plan before the first one. Default: nothing.

        Called again where steps are captured anew, over another KV cache: all graphs from before are gone then.
        """

    def begin_mixed_capture(self, plan: AttentionPlan, max_num_seqs: int, num_tokens: Sequence[int]) -> None:
        """Allocate a plan's static metadata for captured steps with prompts. Default: nothing.

        Called after `begin_capture` where the plan's graph level is MIXED. A captured step of T tokens is padded to `mixed_seqs` sequences,
        decodes first, and so are those that replay it; by that number `prepare` knows them from all others.

        Args:
            max_num_seqs: as `begin_capture` got it.
            num_tokens: of the steps that will be captured, rising.
        """

    def end_capture(self) -> None:
        """Called after the last capture. Default: nothing."""

    def can_replay(self, plan: AttentionPlan, batch: StepBatch, num_seqs: int, num_blocks: int) -> bool:
        """Return whether a captured step can compute a batch, of decodes alone or where MIXED is planned any; others run eagerly.

        Default: it can.

        Args:
            num_seqs: sequences of the captured step; those that the batch does not have are padding. A size at which no step
                without sequences can be replayed is not captured.
            num_blocks: blocks of the KV cache that was captured.
        """
        return True

    def host_arguments(self, metadata: Any) -> Mapping[str, Any] | None:
        """Return what captured operators take from the host for a step, and not from memory that `prepare` wrote. Default: nothing.

        `GraphRunner.update` gets it before the step is replayed.
        """
        return None


__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "AttentionPlan",
    "AttentionRequest",
    "KVCacheGroup",
    "KVCacheSpec",
    "Refusal",
    "mixed_seqs",
    "places_of",
]
