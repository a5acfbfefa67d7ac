"""Faults of what a backend says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from hardpoint.interfaces import (
    API_VERSION,
    AttentionBackend,
    BackendDescriptor,
    Capabilities,
    Device,
    IntSet,
    ProbeResult,
)
from hardpoint_conformance.claims import members
from hardpoint_conformance.mutants.derived import Faults, derived
from hardpoint_conformance.target import Target

_FAULTS = Faults("descriptor")
MUTANTS = _FAULTS.mutants
fault = _FAULTS.target_fault


def described(target: Target, **parts: Any) -> Target:
    """Return the target with other parts in its descriptor, and the claims that it was collected for."""
    return replace(target, descriptor=replace(target.descriptor, **parts))


@fault("The backend is for a later contract than this core's.", "pack.api.range@1", "pack.contract.complete@1")
def later_contract_only(target: Target) -> Target:
    return described(target, api=(API_VERSION + 1, API_VERSION + 1))


@fault("The descriptor is of a class of its own, derived from the contract's.", "pack.descriptor.frozen@1")
def descriptor_of_another_class(target: Target) -> Target:
    @dataclass(frozen=True)
    class Own(BackendDescriptor):
        pass

    parts = {part.name: getattr(target.descriptor, part.name) for part in fields(target.descriptor)}
    return replace(target, descriptor=Own(**parts))


@fault("The attention backend lacks a method of the contract, which its import finds.", "pack.contract.complete@1")
def contract_method_missing(target: Target) -> Target:
    @cache
    def attention() -> Any:
        return derived(target.descriptor.attention(), {"forward": AttentionBackend.forward})

    return described(target, attention=attention)


@fault("A method of the worker has another signature than the contract.", "pack.contract.complete@1")
def contract_signature_wrong(target: Target) -> Target:
    @cache
    def worker() -> Any:
        def submit(self: Any, batch: Any, stream: Any) -> Any:
            return None

        return derived(target.descriptor.worker(), {"submit": submit})

    return described(target, worker=worker)


@fault(
    "The factory of the allocator gives an allocator instead of its class.",
    "pack.contract.complete@1",
    "pack.part.constructor@1",
)
def factory_gives_instance(target: Target) -> Target:
    return described(target, allocator=target.allocator)


@fault("The probe returns a list of devices, not a ProbeResult.", "pack.contract.complete@1")
def probe_returns_list(target: Target) -> Target:
    return described(target, probe=lambda: [target.device])


@fault("The probe finds other devices each time.", "pack.probe.repeatable@1")
def probe_unstable(target: Target) -> Target:
    counts = iter(range(1, 1 << 30))

    def probe() -> ProbeResult:
        return ProbeResult(tuple(replace(target.device, index=index) for index in range(next(counts) % 3 + 1)))

    return described(target, probe=probe)


@fault("The claims are a dictionary.", "pack.claims.known@1", "pack.contract.complete@1")
def claims_of_another_type(target: Target) -> Target:
    return described(target, capabilities=lambda device: target.claims.to_json())


def _claiming(target: Target, **attention: Any) -> Callable[[Device], Capabilities]:
    def capabilities(device: Device) -> Capabilities:
        claims = target.descriptor.capabilities(device)
        return replace(claims, attention=replace(claims.attention, **attention))

    return capabilities


@fault(
    "The default block size is not among the block sizes claimed.",
    "pack.contract.complete@1",
    "pack.claims.consistent@1",
)
def default_block_size_not_claimed(target: Target) -> Target:
    sizes = set(members(target.claims.attention.block_sizes, 1024)) - {target.claims.attention.default_block_size}
    return described(target, capabilities=_claiming(target, block_sizes=IntSet.of(*sizes)))


@fault("KV dtypes are claimed for queries that are not.", "pack.contract.complete@1")
def kv_dtypes_of_unclaimed_queries(target: Target) -> Target:
    dtypes = target.claims.attention.dtypes
    return described(target, capabilities=_claiming(target, dtypes=frozenset(sorted(dtypes)[1:])))


@fault("The claims of the attention backend and of the descriptor differ.", "pack.claims.one-object@1")
def claims_differ(target: Target) -> Target:
    return target.with_descriptor(capabilities=_claiming(target, max_context=1 << 10))


@fault("The descriptor has another name than its entry point and its devices.", "pack.name.agrees@1")
def name_differs(target: Target) -> Target:
    return described(target, name=f"{target.name}2")


@fault("A factory makes its class anew each time.", "pack.part.repeatable@1")
def parts_made_anew(target: Target) -> Target:
    return described(target, attention=lambda: derived(target.descriptor.attention(), {}))


@fault("The claims are others each time they are asked for.", "pack.claims.plain@1")
def claims_change(target: Target) -> Target:
    contexts = iter(range(1 << 10, 1 << 62))
    return described(target, capabilities=lambda device: _claiming(target, max_context=next(contexts))(device))


@fault("The backend says that it can be used, and claims nothing.", "pack.claims.core@1")
def nothing_claimed(target: Target) -> Target:
    return described(target, capabilities=lambda device: Capabilities.none())


@fault("Every device number opens the first device.", "pack.device.absent@1", "driver.open.no-device@1")
def absent_device_opened(target: Target) -> Target:
    below = target.descriptor.driver
    base = target.descriptor.allocator()

    def init(self: Any, device: Device) -> None:
        vars(base)["__init__"](self, target.device)

    made = derived(base, {"__init__": init})
    return described(target, allocator=lambda: made, driver=below and (lambda device: below(target.device)))
