"""Level 0: packaging and contract."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError, fields, replace
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import pytest
from packaging.version import Version

from hardpoint.interfaces import API_VERSION, BackendDescriptor, Capabilities, Device, ProbeResult
from hardpoint.interfaces.errors import CapabilityRefused, HardpointError
from hardpoint.plugins import ENTRY_POINT_GROUP
from hardpoint.plugins.classes import CONTRACTS
from hardpoint_conformance.claims import from_json, to_json
from hardpoint_conformance.clauses import clause
from hardpoint_conformance.examine import examine
from hardpoint_conformance.levels import Level
from hardpoint_conformance.packaging import (
    check_contract,
    check_descriptor_imports_light,
    check_probe_is_light,
    claims_problems,
    consistency_problems,
)
from hardpoint_conformance.target import Target

PROBE_SECONDS = 5.0
"""A probe may take this long; every start of the engine and of `hardpoint doctor` waits for all of them."""


def entry_point(target: Target) -> EntryPoint:
    (entry,) = (entry for entry in entry_points(group=ENTRY_POINT_GROUP) if entry.name == target.record.name)
    return entry


@clause("pack.backend.found@1", Level.PACKAGING)
def test_backend_is_found_in_a_process_of_its_own(target: Target, tmp_path: Path) -> None:
    """In a fresh process the backend is found by its name, and its import, hook, probe and claims end without an error in time."""
    found = examine(target.name, target.device.index, tmp_path)
    assert not found.problem, found.problem
    assert found.device is not None
    assert (found.device["name"], found.device["simulated"]) == (target.device.name, target.device.simulated)


@clause("pack.import.light@1", Level.PACKAGING)
def test_descriptor_imports_light(target: Target) -> None:
    """Importing what the entry point names imports neither torch nor another heavy library, and loads no driver."""
    check_descriptor_imports_light(entry_point(target))


@clause("pack.probe.light@1", Level.PACKAGING)
def test_probe_is_light(target: Target) -> None:
    """Neither the probe nor asking for the claims imports torch or another heavy library."""
    check_probe_is_light(entry_point(target))


@clause("pack.probe.repeatable@1", Level.PACKAGING)
def test_probe_repeats(target: Target) -> None:
    """A probe returns within 5 seconds, and a second one finds the same devices and gives the same reason."""
    results = []
    for _ in range(2):
        start = time.monotonic()
        results.append(target.descriptor.probe())
        assert time.monotonic() - start < PROBE_SECONDS
    assert isinstance(results[0], ProbeResult)
    assert results[0] == results[1]
    assert target.device in results[0].devices


@clause("pack.name.agrees@1", Level.PACKAGING)
def test_names_agree(target: Target) -> None:
    """Entry point, descriptor and devices have one name; vendor, device names and torch devices are not empty; devices count from 0."""
    descriptor, record = target.descriptor, target.record
    assert descriptor.name == record.name
    assert descriptor.vendor.strip(), "the descriptor names no vendor"
    for index, device in enumerate(descriptor.probe().devices):
        assert (device.backend, device.index) == (descriptor.name, index)
        assert device.name.strip(), f"device {index} has no name"
        assert device.torch_device.strip(), f"device {index} does not say what torch calls it"
        assert device.total_memory >= 0


@clause("pack.api.range@1", Level.PACKAGING)
def test_contract_versions_include_the_core(target: Target) -> None:
    """The range of contract versions is two whole numbers and includes the core's version."""
    low, high = target.descriptor.api
    assert type(low) is int
    assert type(high) is int
    assert low <= API_VERSION <= high, f"contract versions {low} to {high} do not include {API_VERSION}"


@clause("pack.distribution.known@1", Level.PACKAGING)
def test_distribution_is_known(target: Target) -> None:
    """The entry point belongs to an installed distribution with a version, which a report and `hardpoint doctor` can name."""
    assert target.record.distribution, "no installed distribution has the entry point"
    assert Version(target.record.version) >= Version("0")
    assert version(target.record.distribution) == target.record.version


@clause("pack.descriptor.frozen@1", Level.PACKAGING)
def test_descriptor_is_frozen(target: Target) -> None:
    """The descriptor is the contract's own frozen class, and no field of it can be changed."""
    descriptor = target.descriptor
    assert type(descriptor) is BackendDescriptor
    for field in fields(descriptor):
        with pytest.raises(FrozenInstanceError):
            setattr(descriptor, field.name, None)


@clause("pack.contract.complete@1", Level.PACKAGING)
def test_parts_keep_to_the_contract(target: Target) -> None:
    """The descriptor's contract versions include the core's; probe, claims and the classes of all parts are what the contract says."""
    check_contract(target.descriptor)


@pytest.mark.parametrize("part", list(CONTRACTS))
@clause("pack.part.repeatable@1", Level.PACKAGING)
def test_factory_gives_one_class(target: Target, part: str) -> None:
    """A factory gives the same class each time, or refuses with reasons each time; an optional part that is not there is None."""
    factory = getattr(target.descriptor, part)
    if factory is None:
        assert part in ("platform", "kernels", "graph_runner", "collectives"), f"{part} is not optional"
        return
    made: list[type] = []
    reasons: list[tuple[str, ...]] = []
    for _ in range(2):
        try:
            made.append(factory())
        except CapabilityRefused as refusal:
            reasons.append(refusal.reasons)
            made.append(CapabilityRefused)
    assert made[0] is made[1]
    assert all(given and all(map(str.strip, given)) for given in reasons), "a refusal without reasons"


@pytest.mark.parametrize("part", list(CONTRACTS))
@clause("pack.part.constructor@1", Level.PACKAGING)
def test_constructor_takes_one_argument(target: Target, part: str) -> None:
    """The class of a part is made from one positional argument: the device, and for a worker its context."""
    factory = getattr(target.descriptor, part)
    if factory is None:
        return
    try:
        made = factory()
    except CapabilityRefused:
        return
    inspect.signature(made).bind(target.device)


@clause("pack.claims.known@1", Level.PACKAGING)
def test_claims_are_known_to_the_contract(target: Target) -> None:
    """Everything that is claimed is of the contract's own types: an unknown capability cannot be claimed, since nothing proves it."""
    for device in target.descriptor.probe().devices:
        assert claims_problems(target.descriptor.capabilities(device)) == []


@clause("pack.claims.plain@1", Level.PACKAGING)
def test_claims_are_plain_data(target: Target) -> None:
    """Claims are the same each time they are asked for, are frozen, and survive being written as JSON and read again."""
    claims = target.descriptor.capabilities(target.device)
    assert target.descriptor.capabilities(target.device) == claims
    data = json.loads(json.dumps(to_json(claims)))
    assert from_json(data) == claims
    assert json.loads(json.dumps(claims.to_json())).keys() >= {"attention", "memory"}
    with pytest.raises(FrozenInstanceError):
        claims.attention = Capabilities.none().attention  # type: ignore[misc]


@clause("pack.claims.consistent@1", Level.PACKAGING)
def test_claims_do_not_contradict_one_another(target: Target) -> None:
    """Claims agree with one another: block sizes with the default one, dtypes with KV dtypes, sleep levels with tiers, sizes not empty."""
    for device in target.descriptor.probe().devices:
        assert consistency_problems(target.descriptor.capabilities(device)) == []


@clause("pack.claims.core@1", Level.PACKAGING)
def test_usable_backend_claims_the_core(target: Target) -> None:
    """A backend that says it can be used claims attention for at least one dtype; one that claims none says in its probe why."""
    if not target.descriptor.probe().reason:
        claimed = target.descriptor.capabilities(target.device).attention.dtypes
        assert claimed, "the probe gives no reason against its use, and no dtype of attention is claimed"


@clause("pack.claims.one-object@1", Level.PACKAGING, capability="attention")
def test_attention_claims_what_the_descriptor_claims(target: Target) -> None:
    """The attention backend's capabilities are those of the descriptor: the engine plans with what the suite proves."""
    assert target.attention().capabilities() == target.descriptor.capabilities(target.device).attention


@pytest.mark.parametrize("part", ["allocator", "driver"])
@clause("pack.device.absent@1", Level.PACKAGING)
def test_absent_device_is_a_typed_error(target: Target, part: str) -> None:
    """Opening the memory of a device that is not there raises a typed error, and no other."""
    index = len(target.descriptor.probe().devices) + 6
    absent: Device = replace(target.device, index=index)
    elsewhere = replace(target, device=absent)
    if part == "driver" and target.descriptor.driver is None:
        return
    with pytest.raises(HardpointError):
        getattr(elsewhere, part)()


@clause("pack.doctor.record@1", Level.PACKAGING)
def test_doctor_describes_the_backend(target: Target) -> None:
    """`hardpoint doctor --json` has a record of the backend without a fault, with its device and what it claims for it."""
    command = [sys.executable, "-m", "hardpoint.cli", "doctor", "--json", "--no-classes", "--backend", target.name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.stdout.startswith("{"), f"standard output is not the record alone: {ended.stdout[:200]!r}"
    (record,) = json.loads(ended.stdout)["backends"]
    assert record["state"] in ("ok", "unavailable"), record["reason"]
    device = record["devices"][target.device.index]
    assert (device["name"], device["simulated"]) == (target.device.name, target.device.simulated)
    assert device["capabilities_error"] == ""
    assert device["capabilities"]["attention"]["dtypes"] is not None
