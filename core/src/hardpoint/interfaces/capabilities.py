"""What a backend can do on one device, as typed sets and ranges.

The engine plans with these objects, the conformance suite proves them, and the documentation tables are generated from
them. Nothing here imports torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any

from hardpoint.interfaces.dtypes import DType


@dataclass(frozen=True)
class IntSet:
    """A set of integers: listed values, or a range with a step.

    `IntSet.of(16, 32)` has two members; `IntSet.between(8, 256, multiple_of=8)` has all multiples of 8 from 8 to 256.
    """

    values: frozenset[int] = frozenset()
    minimum: int | None = None
    maximum: int | None = None
    multiple_of: int = 1

    @classmethod
    def of(cls, *values: int) -> IntSet:
        """Return the set of the given values."""
        return cls(values=frozenset(values))

    @classmethod
    def between(cls, minimum: int, maximum: int | None = None, *, multiple_of: int = 1) -> IntSet:
        """Return all multiples of `multiple_of` from `minimum` to `maximum` (None: no upper end), both included."""
        return cls(minimum=minimum, maximum=maximum, multiple_of=multiple_of)

    def __contains__(self, value: int) -> bool:
        if value in self.values:
            return True
        if self.minimum is None or value < self.minimum or value % self.multiple_of:
            return False
        return self.maximum is None or value <= self.maximum

    def __str__(self) -> str:
        listed = ", ".join(map(str, sorted(self.values)))
        if self.minimum is None:
            return listed or "none"
        upper = "" if self.maximum is None else f" to {self.maximum}"
        step = "" if self.multiple_of == 1 else f" in multiples of {self.multiple_of}"
        span = f"{self.minimum}{upper or ' and more'}{step}"
        return f"{listed}, {span}" if listed else span


class AttentionFeature(enum.Enum):
    """A feature of attention that a model may need; each is correct or refused, never ignored."""

    SLIDING_WINDOW = "sliding_window"
    SOFT_CAP = "soft_cap"
    SINKS = "sinks"
    ALIBI = "alibi"
    CHUNKED_PREFILL = "chunked_prefill"
    MIXED_BATCH = "mixed_batch"
    FP8_KV_SCALES = "fp8_kv_scales"
    BIDIRECTIONAL = "bidirectional"


class GraphLevel(enum.IntEnum):
    """Which steps can be captured into device graphs: none, decodes alone, or any mix of decodes and prompts."""

    NONE = 0
    UNIFORM_DECODE = 1
    MIXED = 2


class Determinism(enum.IntEnum):
    """What repeats bit by bit: nothing, the same run, or a sequence whatever else is in its batch."""

    NONE = 0
    RUN_TO_RUN = 1
    BATCH_INVARIANT = 2


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention, as the model's configuration states it.

    Attributes:
        num_heads: query heads on this rank.
        num_kv_heads: key and value heads on this rank; divides num_heads.
        head_dim: elements of one head.
        scale: factor of the query-key product.
        sliding_window: number of visible keys including the query's own position; None for all. Where `causal` is False it counts to
            each side: the keys at less than so many positions from the query are seen.
        chunk: a query sees the keys of its own chunk of so many positions, from its first one on; None for all. No backend is asked
            for it: the core gives each chunk to the backend as a sequence of its own (`KVCacheGroup.chunk`).
        soft_cap: `cap * tanh(logit / cap)` replaces each logit; None for off.
        sinks: the layer has one learned extra logit per head in the softmax denominator.
        alibi: `slope * (key position - query position)` is added to each logit.
        k_scale, v_scale: a cache of a narrower dtype holds keys divided by k_scale and values by v_scale, and attention is that of
            what it holds times these; positive.
        causal: False for a layer whose queries see the keys on both sides (an encoder's). Its steps have whole sequences, whose keys and
            values are those of the step: there is no KV cache.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    chunk: int | None = None
    causal: bool = True

    @property
    def features(self) -> frozenset[AttentionFeature]:
        """Features beyond plain causal attention that this layer needs."""
        needed = {
            AttentionFeature.SLIDING_WINDOW: self.sliding_window is not None,
            AttentionFeature.SOFT_CAP: self.soft_cap is not None,
            AttentionFeature.SINKS: self.sinks,
            AttentionFeature.ALIBI: self.alibi,
            AttentionFeature.FP8_KV_SCALES: (self.k_scale, self.v_scale) != (1.0, 1.0),
            AttentionFeature.BIDIRECTIONAL: not self.causal,
        }
        return frozenset(feature for feature, on in needed.items() if on)


@dataclass(frozen=True)
class AttentionRequest:
    """What the engine asks of an attention backend for one model.

    Attributes:
        layers: the layers in order, of one KV cache group; all have the same num_kv_heads and head_dim.
        dtype: of queries and outputs.
        kv_dtype: of the KV cache.
        block_size: tokens per KV block, or None to let the backend choose.
        max_context: longest context in tokens.
        features: further needs of the engine, for example chunked prefill.
        kv_group: which of the model's KV cache groups; tells requests apart that are otherwise equal, and have steps of their own.
    """

    layers: tuple[AttentionLayer, ...]
    dtype: DType
    kv_dtype: DType
    block_size: int | None
    max_context: int
    features: frozenset[AttentionFeature] = frozenset()
    kv_group: int = 0

    @property
    def bidirectional(self) -> bool:
        """The layers see both sides of a query, in whole sequences and without a cache; a plan has such layers alone or none of them."""
        return self._bidirectional

    @cached_property
    def _bidirectional(self) -> bool:
        # Every step asks for it.
        return any(not layer.causal for layer in self.layers)

    @property
    def num_cached_layers(self) -> int:
        """Layers that the KV cache has."""
        return 0 if self.bidirectional else len(self.layers)


@dataclass(frozen=True)
class AttentionCapabilities:
    """What an attention backend does correctly.

    Attributes:
        dtypes: of queries and outputs.
        kv_dtypes: of the KV cache, for each dtype of queries.
        head_dims, block_sizes: accepted values.
        group_sizes: query heads per KV head.
        max_context: longest context in tokens.
        features: supported features; all others are refused.
        max_cache_elements: most elements of one layer's keys in the KV cache; None for as many as fit into memory.
    """

    dtypes: frozenset[DType]
    kv_dtypes: Mapping[DType, frozenset[DType]] = field(hash=False)
    head_dims: IntSet
    block_sizes: IntSet
    default_block_size: int
    group_sizes: IntSet
    max_context: int
    features: frozenset[AttentionFeature]
    graph_level: GraphLevel = GraphLevel.NONE
    determinism: Determinism = Determinism.RUN_TO_RUN
    max_cache_elements: int | None = None

    def explain(self, request: AttentionRequest) -> tuple[str, ...]:
        """Return why `request` is refused, one sentence each; empty when it can be done."""
        reasons: list[str] = []
        if request.dtype not in self.dtypes:
            reasons.append(f"dtype {request.dtype} is not supported (supported: {_listed(self.dtypes)})")
        elif request.kv_dtype not in self.kv_dtypes.get(request.dtype, frozenset()):
            supported = _listed(self.kv_dtypes.get(request.dtype, frozenset()))
            reasons.append(
                f"KV dtype {request.kv_dtype} with {request.dtype} is not supported (supported: {supported})"
            )
        if request.block_size is not None and request.block_size not in self.block_sizes:
            reasons.append(f"block size {request.block_size} is not supported (supported: {self.block_sizes})")
        if request.max_context > self.max_context:
            reasons.append(f"context of {request.max_context} tokens exceeds the maximum of {self.max_context}")
        needed = set(request.features)
        for layer in dict.fromkeys(request.layers):
            needed |= layer.features
            if layer.head_dim not in self.head_dims:
                reasons.append(f"head dimension {layer.head_dim} is not supported (supported: {self.head_dims})")
            group, rest = divmod(layer.num_heads, layer.num_kv_heads) if layer.num_kv_heads > 0 else (0, 1)
            if rest:
                reasons.append(f"{layer.num_heads} query heads are not a multiple of {layer.num_kv_heads} KV heads")
            elif group not in self.group_sizes:
                reasons.append(f"{group} query heads per KV head are not supported (supported: {self.group_sizes})")
            if layer.sliding_window is not None and layer.sliding_window < 1:
                reasons.append(f"sliding window of {layer.sliding_window} keys is not positive")
            if layer.chunk is not None:
                reasons.append(f"keys in chunks of {layer.chunk} positions are not passed to a backend")
            if min(layer.k_scale, layer.v_scale) <= 0:
                reasons.append(f"scales of the cache {layer.k_scale} and {layer.v_scale} are not positive")
            if AttentionFeature.FP8_KV_SCALES in layer.features and request.kv_dtype is request.dtype:
                reasons.append(f"fp8_kv_scales are for a cache of a narrower dtype than {request.dtype}")
        if len({(layer.num_kv_heads, layer.head_dim) for layer in request.layers}) > 1:
            reasons.append("layers differ in KV heads or head dimension, so they cannot share one KV cache")
        if request.bidirectional:
            reasons += _bidirectional_reasons(request)
        missing = sorted(feature.value for feature in needed - self.features)
        reasons.extend(f"{feature} is not supported" for feature in missing)
        return tuple(dict.fromkeys(reasons))


def _bidirectional_reasons(request: AttentionRequest) -> list[str]:
    """Return what no backend does for layers that see both sides."""
    reasons = []
    if any(layer.causal for layer in request.layers):
        reasons.append(
            "causal layers keep their keys, and bidirectional ones do not, so they cannot be planned together"
        )
    if any(layer.alibi for layer in request.layers):
        reasons.append("alibi of bidirectional layers is not defined")
    if request.kv_dtype is not request.dtype:
        reasons.append(f"bidirectional layers have no KV cache, which could be {request.kv_dtype}")
    return reasons


class SleepTier(enum.Enum):
    """Where preserved bytes go while their memory is given back."""

    HOST = "host"
    DISK = "disk"
    SOURCE = "source"


class TorchPoolScope(enum.Enum):
    """Which of torch's own allocations the allocator's `pool` (`hardpoint.memory.TensorAllocator`) catches.

    ALL: every one. FACTORY_CALLS: those of factory calls of this thread. NONE: none.
    """

    ALL = "all"
    FACTORY_CALLS = "factory_calls"
    NONE = "none"


@dataclass(frozen=True)
class MemoryCapabilities:
    """What an allocator does.

    Attributes:
        sleep_levels: levels of sleep that work; empty when sleep mode is not supported.
        tiers: where level-1 bytes can go.
        elastic: allocations can grow and shrink in place.
        torch_pool: which of torch's own allocations `pool` catches.
    """

    sleep_levels: frozenset[int] = frozenset()
    tiers: frozenset[SleepTier] = frozenset()
    elastic: bool = False
    torch_pool: TorchPoolScope = TorchPoolScope.NONE


@dataclass(frozen=True)
class Capabilities:
    """Everything that a backend claims for one device.

    Attributes:
        tensor_parallel: how many ranks may share each layer.
        determinism: what a whole worker's results repeat, as far as its attention does. Matrix products of a vendor's library are often
            chosen by the size of a batch: RUN_TO_RUN.
        collectives: names of the collective libraries, best first; with one, layers may be divided into stages.
        notes: human-readable: what was chosen and why, what is missing and why, and what no hardware has shown yet.
    """

    attention: AttentionCapabilities
    memory: MemoryCapabilities = field(default_factory=MemoryCapabilities)
    tensor_parallel: IntSet = field(default_factory=lambda: IntSet.of(1))
    determinism: Determinism = Determinism.BATCH_INVARIANT
    collectives: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def none(cls) -> Capabilities:
        """Return the claims of a backend that runs nothing: every request is refused with reasons."""
        attention = AttentionCapabilities(
            dtypes=frozenset(),
            kv_dtypes={},
            head_dims=IntSet(),
            block_sizes=IntSet(),
            default_block_size=0,
            group_sizes=IntSet(),
            max_context=0,
            features=frozenset(),
        )
        return cls(attention, tensor_parallel=IntSet())

    def explain(self, request: AttentionRequest) -> tuple[str, ...]:
        """Return why `request` is refused, one sentence each; empty when it can be done."""
        return self.attention.explain(request)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for reports and `doctor --json`."""
        data: dict[str, Any] = _plain(self)
        return data


def _listed(items: Iterable[DType]) -> str:
    return ", ".join(sorted(str(item) for item in items)) or "none"


def _plain(value: Any) -> Any:
    if isinstance(value, IntSet):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, enum.Enum):
        return value.name.lower() if isinstance(value, enum.IntEnum) else value.value
    if isinstance(value, Mapping):
        return {str(_plain(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(v) for v in value)
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value
