"""What the backend claims for a device.

The limits of attention are those on which torch_npu's descriptions of its operators and CANN's public sources of their tiling agree, for
prompts and single tokens. No hardware has shown them yet, and the claims say so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec

from hardpoint.interfaces import (
    AttentionCapabilities,
    AttentionFeature,
    AttentionRequest,
    Capabilities,
    Determinism,
    Device,
    DType,
    GraphLevel,
    IntSet,
    MemoryCapabilities,
    SleepTier,
    TorchPoolScope,
)
from hardpoint.interfaces.errors import CapabilityRefused, ConfigError

GRAPHS_VARIABLE = "HARDPOINT_ASCEND_GRAPHS"
"""Environment variable that asks for decode steps as graphs (1), which are left out while no device has shown them."""

MAX_ELEMENTS = 2**31 - 1
"""Elements of a layer's keys that the attention operator can address."""

MAX_SEQUENCES = 4096
"""Sequences in one call of the attention operator."""

MAX_TOKENS = 1 << 20
"""Query tokens in one call of the attention operator."""

_MAX_HEADS = 256
_MAX_ROW = 65535
"""Elements of one token's keys (heads * dim) in a cache of the format [blocks, block_size, heads * dim]."""

_DTYPES = frozenset({DType.FLOAT16, DType.BFLOAT16})

CHIPS = ("Ascend910B", "Ascend910_93")
"""Beginnings of the names of chips for which torch_npu describes the operators: the Atlas A2 and A3 series."""

MAX_RANKS = 8
"""Devices of one machine that share a model's layers."""

MIN_CANN = 9
"""CANN's major version that the torch_npu of every torch that Hardpoint runs with (2.11 and later) needs."""

INSTALL = f"Install the torch_npu that goes with torch, and CANN {MIN_CANN} or later"

NOTES = (
    "attention: no hardware has run it; its calls are proved over reference operators, and its operators' schemas over torch_npu 2.13",
    "one query head per KV head: refused, since CANN sends it another way, which by public reports takes no paged cache in this layout",
    "sinks: refused, since the operator takes them in bfloat16 only",
    "soft cap, ALiBi: refused, since the operator has neither in the layout that mixes prompts and single tokens",
    "weights and KV cache stay in the plain format (ND), at the addresses that they were given; NZ is not used",
    "ranks: not verified on hardware",
)


def capabilities(device: Device) -> Capabilities:
    """Return the claims; where something is missing, every request for attention is refused, and the notes say why."""
    missing = reasons(device)
    return Capabilities(
        attention=Capabilities.none().attention if missing else _attention(),
        memory=MemoryCapabilities(
            sleep_levels=frozenset({0, 1, 2}), tiers=frozenset(SleepTier), elastic=True, torch_pool=_torch_pool_scope()
        ),
        tensor_parallel=IntSet() if missing else IntSet.between(1, MAX_RANKS),
        collectives=() if missing else ("hccl",),
        notes=tuple(f"no attention: {reason}" for reason in missing) or (_graphs_note(), *NOTES),
    )


def graphs_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether decode steps are to be captured; raises ConfigError where the environment says neither 1 nor 0."""
    asked = environment.get(GRAPHS_VARIABLE, "")
    if asked not in ("", "0", "1"):
        raise ConfigError(
            f"{GRAPHS_VARIABLE}={asked} was asked for",
            found="it is neither 1 nor 0",
            hint="Set it to 1 for decode steps as graphs, or unset it",
        )
    return asked == "1"


def reasons(device: Device) -> tuple[str, ...]:
    """Return why nothing can be computed on a device, one sentence each; empty when it can. Torch is not imported."""
    found = requirements()
    if not device.name.startswith(CHIPS):
        known = " and ".join(f"{chip}*" for chip in CHIPS)
        found += (f"the device is {device.name}, and torch_npu describes the attention operator for {known}",)
    version = device.properties.get("cann", "")
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < MIN_CANN:
        found += (f"CANN {version} is installed, and the torch_npu of torch 2.11 and later needs CANN {MIN_CANN}",)
    return found


def requirements() -> tuple[str, ...]:
    """Return what is not installed that computing needs, one sentence each."""
    return () if _has_torch_npu() else ("torch_npu is not installed, whose operators compute on the device",)


def refusal(part: str) -> CapabilityRefused:
    """Return the error for a part that cannot be made for want of what `requirements` lists."""
    return CapabilityRefused(f"the {part} of backend 'ascend' was asked for", requirements(), hint=INSTALL)


def reasons_beyond_claims(request: AttentionRequest) -> tuple[str, ...]:
    """Return why the operators refuse a request that the claims alone would allow, one sentence each."""
    reasons = []
    for layer in dict.fromkeys(request.layers):
        if layer.num_heads > _MAX_HEADS:
            reasons.append(f"{layer.num_heads} query heads exceed the operator's {_MAX_HEADS}")
        row = layer.num_kv_heads * layer.head_dim
        if row > _MAX_ROW:
            reasons.append(
                f"{layer.num_kv_heads} KV heads of {layer.head_dim} exceed the operator's {_MAX_ROW} elements a token"
            )
    return tuple(reasons)


def _attention() -> AttentionCapabilities:
    return AttentionCapabilities(
        dtypes=_DTYPES,
        kv_dtypes={dtype: frozenset({dtype}) for dtype in _DTYPES},
        head_dims=IntSet.of(64, 128),
        block_sizes=IntSet.of(128),
        default_block_size=128,
        group_sizes=IntSet.between(2, 64),
        max_context=1 << 18,
        features=frozenset(
            {AttentionFeature.SLIDING_WINDOW, AttentionFeature.CHUNKED_PREFILL, AttentionFeature.MIXED_BATCH}
        ),
        graph_level=GraphLevel.UNIFORM_DECODE if graphs_wanted() else GraphLevel.NONE,
        determinism=Determinism.NONE,
        max_cache_elements=MAX_ELEMENTS,
    )


def _graphs_note() -> str:
    if graphs_wanted():
        return f"graphs: decode steps, since {GRAPHS_VARIABLE}=1 asks for them; no hardware has run them"
    return f"graphs: not used, since no hardware has run them; {GRAPHS_VARIABLE}=1 asks for decode steps as graphs"


def _torch_pool_scope() -> TorchPoolScope:
    """Return what `pool` catches with the torch that is installed, which is not imported."""
    return TorchPoolScope.ALL if _has_torch_npu() else TorchPoolScope.NONE


def _has_torch_npu() -> bool:
    return find_spec("torch_npu") is not None
