"""What a backend claims, as names that clauses prove, and as data that a report carries without loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from hardpoint.interfaces import (
    AttentionCapabilities,
    AttentionFeature,
    Capabilities,
    Determinism,
    DType,
    GraphLevel,
    IntSet,
    MemoryCapabilities,
    SleepTier,
    TorchPoolScope,
)


def _feature(feature: AttentionFeature) -> Callable[[Capabilities], bool]:
    return lambda claims: feature in claims.attention.features


def _dtype(dtype: DType) -> Callable[[Capabilities], bool]:
    return lambda claims: dtype in claims.attention.dtypes


def _kv_dtype(dtype: DType) -> Callable[[Capabilities], bool]:
    return lambda claims: any(dtype in kv and dtype is not query for query, kv in claims.attention.kv_dtypes.items())


def _tier(tier: SleepTier) -> Callable[[Capabilities], bool]:
    return lambda claims: tier in claims.memory.tiers


def _level(level: int) -> Callable[[Capabilities], bool]:
    return lambda claims: level in claims.memory.sleep_levels


CLAIMS: Mapping[str, Callable[[Capabilities], bool]] = {
    "attention": lambda claims: bool(claims.attention.dtypes),
    **{f"attention.{feature.value}": _feature(feature) for feature in AttentionFeature},
    **{f"attention.dtype.{dtype.value}": _dtype(dtype) for dtype in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)},
    **{
        f"attention.kv_dtype.{dtype.value}": _kv_dtype(dtype)
        for dtype in (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2, DType.INT8)
    },
    "attention.graphs": lambda claims: claims.attention.graph_level > GraphLevel.NONE,
    "attention.graphs.mixed": lambda claims: claims.attention.graph_level >= GraphLevel.MIXED,
    "determinism.run_to_run": lambda claims: claims.attention.determinism >= Determinism.RUN_TO_RUN,
    "determinism.batch_invariant": lambda claims: claims.attention.determinism >= Determinism.BATCH_INVARIANT,
    "determinism.worker.batch_invariant": lambda claims: (
        min(claims.determinism, claims.attention.determinism) >= Determinism.BATCH_INVARIANT
    ),
    **{f"memory.sleep.{level}": _level(level) for level in (1, 2)},
    **{f"memory.tier.{tier.value}": _tier(tier) for tier in SleepTier},
    "memory.elastic": lambda claims: claims.memory.elastic,
    "memory.torch_pool": lambda claims: claims.memory.torch_pool is not TorchPoolScope.NONE,
    "tensor_parallel": lambda claims: 2 in claims.tensor_parallel,
    "collectives": lambda claims: bool(claims.collectives),
}
"""Every capability that a clause can prove, and whether a backend claims it."""


def claimed(capability: str, claims: Capabilities) -> bool:
    """Return whether a backend claims a capability; "" (the core) is always claimed. Raises KeyError for an unknown name."""
    return not capability or CLAIMS[capability](claims)


def plain_tier(claims: MemoryCapabilities) -> SleepTier:
    """Return the tier to which tests sleep that are about none: host, or else the first that is claimed."""
    return next((tier for tier in SleepTier if tier in claims.tiers), SleepTier.HOST)


def to_json(claims: Capabilities) -> dict[str, Any]:
    """Return plain data that `from_json` turns back into the same claims."""
    attention, memory = claims.attention, claims.memory
    return {
        "attention": {
            "dtypes": sorted(attention.dtypes),
            "kv_dtypes": {str(dtype): sorted(kv) for dtype, kv in sorted(attention.kv_dtypes.items())},
            "head_dims": _from_set(attention.head_dims),
            "block_sizes": _from_set(attention.block_sizes),
            "default_block_size": attention.default_block_size,
            "group_sizes": _from_set(attention.group_sizes),
            "max_context": attention.max_context,
            "features": sorted(feature.value for feature in attention.features),
            "graph_level": attention.graph_level.name.lower(),
            "determinism": attention.determinism.name.lower(),
            "max_cache_elements": attention.max_cache_elements,
        },
        "memory": {
            "sleep_levels": sorted(memory.sleep_levels),
            "tiers": sorted(tier.value for tier in memory.tiers),
            "elastic": memory.elastic,
            "torch_pool": memory.torch_pool.value,
        },
        "tensor_parallel": _from_set(claims.tensor_parallel),
        "determinism": claims.determinism.name.lower(),
        "collectives": list(claims.collectives),
        "notes": list(claims.notes),
    }


def from_json(data: Mapping[str, Any]) -> Capabilities:
    """Return the claims of a report; raises KeyError, ValueError, TypeError for data that are none."""
    attention, memory = data["attention"], data["memory"]
    return Capabilities(
        attention=AttentionCapabilities(
            dtypes=frozenset(map(DType, attention["dtypes"])),
            kv_dtypes={DType(dtype): frozenset(map(DType, kv)) for dtype, kv in attention["kv_dtypes"].items()},
            head_dims=_to_set(attention["head_dims"]),
            block_sizes=_to_set(attention["block_sizes"]),
            default_block_size=attention["default_block_size"],
            group_sizes=_to_set(attention["group_sizes"]),
            max_context=attention["max_context"],
            features=frozenset(map(AttentionFeature, attention["features"])),
            graph_level=GraphLevel[attention["graph_level"].upper()],
            determinism=Determinism[attention["determinism"].upper()],
            max_cache_elements=attention.get("max_cache_elements"),
        ),
        memory=MemoryCapabilities(
            sleep_levels=frozenset(memory["sleep_levels"]),
            tiers=frozenset(map(SleepTier, memory["tiers"])),
            elastic=memory["elastic"],
            torch_pool=TorchPoolScope(memory["torch_pool"]),
        ),
        tensor_parallel=_to_set(data["tensor_parallel"]),
        determinism=Determinism[data["determinism"].upper()],
        collectives=tuple(data["collectives"]),
        notes=tuple(data.get("notes", ())),
    )


def _from_set(numbers: IntSet) -> dict[str, Any]:
    return {
        "values": sorted(numbers.values),
        "minimum": numbers.minimum,
        "maximum": numbers.maximum,
        "multiple_of": numbers.multiple_of,
    }


def _to_set(data: Mapping[str, Any]) -> IntSet:
    return IntSet(frozenset(data["values"]), data["minimum"], data["maximum"], data["multiple_of"])


@cache
def members(numbers: IntSet, limit: int) -> tuple[int, ...]:
    """Return the members of a set up to `limit`, in order."""
    return tuple(number for number in range(limit + 1) if number in numbers)
