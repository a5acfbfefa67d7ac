"""Level 0: packaging and contract."""

from __future__ import annotations

from importlib.metadata import entry_points

from hardpoint_conformance.clauses import clause
from hardpoint_conformance.levels import Level
from hardpoint_conformance.packaging import check_contract, check_descriptor_imports_light
from hardpoint_conformance.target import Target


@clause("pack.import.light@1", Level.PACKAGING)
def test_descriptor_imports_light(target: Target) -> None:
    """Importing what the entry point names imports neither torch nor another heavy library, and loads no driver."""
    (entry,) = (e for e in entry_points(group="hardpoint.backends") if e.name == target.record.name)
    check_descriptor_imports_light(entry)


@clause("pack.contract.complete@1", Level.PACKAGING)
def test_parts_keep_to_the_contract(target: Target) -> None:
    """The descriptor's contract versions include the core's; probe, claims and the classes of all parts are what the contract says."""
    check_contract(target.descriptor)
