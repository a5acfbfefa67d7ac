"""Right backends that the CPU is not: small chunks, copies that are queued, narrow claims; and faults that only narrow claims show."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from hardpoint.interfaces import (
    AttentionFeature,
    AttentionPlan,
    AttentionRequest,
    Capabilities,
    Device,
    DType,
    IntSet,
    MemoryCapabilities,
    Refusal,
    SleepTier,
    TorchPoolScope,
)
from hardpoint.memory import DriverTable, VirtualAllocator, include_dir
from hardpoint_conformance.mutants import Mutant
from hardpoint_conformance.mutants.derived import derived
from hardpoint_conformance.target import Target

COMPILER = "c++"

_EVERYTHING = MemoryCapabilities(frozenset({0, 1, 2}), frozenset(SleepTier), True, TorchPoolScope.FACTORY_CALLS)


@cache
def driver_file() -> Path:
    """Compile the driver of the scaffold, once for this process and its forks; raises CalledProcessError."""
    folder = Path(tempfile.mkdtemp(prefix="hardpoint-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = folder / "driver.so"
    with as_file(files("hardpoint_conformance.scaffold") / "template/native/driver.cpp") as source:
        command = [COMPILER, "-std=c++17", "-fPIC", "-shared", f"-I{include_dir()}", str(source), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True)
    return made


_CORE = (
    "alloc.close.refuses@1",
    "alloc.fault.typed@1",
    "alloc.fault.free@1",
    "alloc.claims.same@1",
    "alloc.tensor.outlives@1",
)
_LEVEL_1 = ("alloc.bytes.preserved@1", "alloc.policy.mixed@1", "alloc.state.repeated@1", "alloc.close.refuses@1")
_LEVEL_2 = ("alloc.policy.discard@1", "alloc.policy.zero@1", "alloc.torch-pool.caught@1")
_SMALL_CHUNKS = (
    *("driver.copy.exact@1", "driver.map.own-memory@1", "driver.map.several-units@1", "driver.flags.host-accessible@1"),
    *("driver.streams.order@1", "driver.streams.device@1", "driver.create.fresh@1", "driver.quirks.stable@1"),
    *("alloc.bytes.chunks@1", "alloc.bytes.preserved@1", "alloc.streams.in-flight@1", "alloc.policy.zero@1"),
    *("alloc.elastic.keeps@1", "alloc.elastic.returns@1", "alloc.fault.wake-oom@1", "alloc.model.any-sequence@1"),
    *("alloc.memory.returned@1", "alloc.transaction.rollback@1", "stress.memory.co-tenant@1"),
)


def over_the_scaffold(target: Target, claimed: MemoryCapabilities) -> Target:
    """Return a target whose memory is the scaffold's, with these claims about it."""

    def capabilities(device: Device) -> Capabilities:
        return replace(target.descriptor.capabilities(device), memory=claimed)

    def driver(device: Device) -> DriverTable:
        return DriverTable(driver_file(), device=device.index)

    @cache
    def allocator() -> Any:
        def make(self: Any, device: Device) -> None:
            VirtualAllocator.__init__(
                self, driver(device), device=device.index, torch_device=device.torch_device, capabilities=claimed
            )

        return derived(VirtualAllocator, {"__init__": make})

    made = target.with_descriptor(capabilities=capabilities, driver=driver, allocator=allocator)
    return replace(made, device=replace(target.device, simulated=True))


def _left_out() -> Iterator[tuple[str, MemoryCapabilities, tuple[str, ...]]]:
    """Yield a name, the claims without it, and clauses that this, or such a device, touches."""
    levels = _EVERYTHING.sleep_levels
    tiers = sorted(_EVERYTHING.tiers, key=lambda tier: tier.value)
    no_level_1 = ("alloc.sleep.refused@1", "alloc.transaction.refused@1", "worker.sleep.level-refused@1", *_CORE)
    yield "nothing", _EVERYTHING, _SMALL_CHUNKS
    yield "level_1", replace(_EVERYTHING, sleep_levels=levels - {1}, tiers=frozenset()), (*no_level_1, *_LEVEL_2)
    yield "level_2", replace(_EVERYTHING, sleep_levels=levels - {2}), (*_LEVEL_1, "alloc.discard.refused@1")
    for tier in tiers:
        clauses = (
            *_LEVEL_1,
            "alloc.policy.plan@1",
            f"alloc.tier.{tier.value}-refused@1",
            "worker.sleep.tier-refused@1",
        )
        yield f"tier_{tier.value}", replace(_EVERYTHING, tiers=_EVERYTHING.tiers - {tier}), clauses
    yield "elastic", replace(_EVERYTHING, elastic=False), ("alloc.elastic.refused@1", "alloc.model.any-sequence@1")
    yield "torch_pool", replace(_EVERYTHING, torch_pool=TorchPoolScope.NONE), ("alloc.torch-pool.refused@1",)
    refused = (f"alloc.tier.{tier.value}-refused@1" for tier in tiers)
    yield (
        "anything",
        MemoryCapabilities(),
        (*no_level_1, *refused, "alloc.discard.refused@1", "alloc.elastic.refused@1"),
    )


OVER_THE_SCAFFOLD = tuple(
    Mutant(
        f"without_{name}",
        f"No fault: small chunks, queued copies, and claims about memory without {name.replace('_', ' ')}.",
        clauses,
        lambda target, claimed=claimed: over_the_scaffold(target, claimed),  # type: ignore[misc]
        harmless=True,
    )
    for name, claimed, clauses in _left_out()
)


def _claiming_less(target: Target, **parts: Any) -> Target:
    """Return a target that claims neither float16, nor windows, nor more than one rank, with other parts."""

    def capabilities(device: Device) -> Capabilities:
        claims = target.descriptor.capabilities(device)
        kv_dtypes: dict[DType, frozenset[DType]] = {
            dtype: kv for dtype, kv in claims.attention.kv_dtypes.items() if dtype is not DType.FLOAT16
        }
        features = claims.attention.features - {AttentionFeature.SLIDING_WINDOW}
        attention = replace(claims.attention, dtypes=frozenset(kv_dtypes), kv_dtypes=kv_dtypes, features=features)
        return replace(claims, attention=attention, tensor_parallel=IntSet.of(1), collectives=())

    return target.with_descriptor(capabilities=capabilities, **parts)


def _refusing(target: Target) -> Target:
    """Return a target that claims less, and refuses what it does not claim."""

    @cache
    def attention() -> Any:
        base: Any = target.descriptor.attention()

        def plan(self: Any, request: AttentionRequest) -> AttentionPlan | Refusal:
            reasons = claimed.explain(request)
            return Refusal(reasons) if reasons else base.plan(self, request)

        return derived(base, {"plan": plan, "capabilities": lambda self: claimed})

    made = _claiming_less(target, attention=attention, collectives=None)
    claimed = made.claims.attention
    return made


def _alone(target: Target) -> Target:
    from hardpoint_conformance.mutants import mutant_named

    return mutant_named("world_size_ignored").apply(_refusing(target))


_OF_LESS = ("attn.dtype.refused@1", "worker.refuse.window@1", "dist.collectives.absent@1", "dist.world-size.refused@1")
LESS = (
    Mutant(
        "less_claimed",
        "No fault: neither float16, nor windows, nor more than one rank is claimed, and they are refused.",
        _OF_LESS,
        _refusing,
        harmless=True,
    ),
    Mutant(
        "unclaimed_attention_planned",
        "Attention that is not claimed is planned all the same.",
        _OF_LESS[:2],
        _claiming_less,
    ),
    Mutant(
        "unclaimed_collectives_there", "There are collectives, and none are claimed.", _OF_LESS[2:3], _claiming_less
    ),
    Mutant("unclaimed_ranks_run_alone", "One of two ranks, which are not claimed, runs alone.", _OF_LESS[3:], _alone),
)
OWN_ALLOCATOR = Mutant(
    "allocator_of_its_own",
    "No fault: there is no memory driver; the allocator is the backend's own.",
    ("alloc.claims.same@1", "alloc.tensor.outlives@1", *_LEVEL_1, *_LEVEL_2),
    lambda target: target.with_descriptor(driver=None),
    harmless=True,
)
MUTANTS = (*OVER_THE_SCAFFOLD, OWN_ALLOCATOR, *LESS)
