"""Level 0 over every backend that is installed here."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import pytest

from hardpoint.plugins import ENTRY_POINT_GROUP, installed
from hardpoint_conformance import check_contract, check_descriptor_imports_light

INSTALLED = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name)


def test_some_backend_is_installed() -> None:
    assert INSTALLED


@pytest.mark.parametrize("entry_point", INSTALLED, ids=lambda entry: entry.name)
def test_descriptor_is_imported_without_heavy_libraries(entry_point: EntryPoint) -> None:
    check_descriptor_imports_light(entry_point)


@pytest.mark.parametrize("entry_point", INSTALLED, ids=lambda entry: entry.name)
def test_backend_keeps_to_the_contract(entry_point: EntryPoint) -> None:
    (record,) = installed().records(entry_point.name)
    assert record.descriptor is not None, record
    check_contract(record.descriptor)
