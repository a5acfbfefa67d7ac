"""What tests of the conformance suite share."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hardpoint_conformance.report import canonical, collect
from tests.fork_servers import shared_fork_servers


@pytest.fixture(scope="session")
def collect_once() -> Iterator[None]:
    """Collect the tests once for each set of claims: importing all of them takes seconds."""
    found: dict[bytes, list[dict[str, Any]]] = {}

    def cached(
        claims: dict[str, Any], scratch: Path, modules: Sequence[Path], *, explore: int = 0, **options: Any
    ) -> list[dict[str, Any]]:
        key = canonical([claims, [module.name for module in modules], explore])
        if key not in found:
            found[key] = collect(claims, scratch, modules, explore=explore, **options)
        return copy.deepcopy(found[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hardpoint_conformance.report.collect", cached)
        patch.setattr("hardpoint_conformance.runner.collect", cached)
        yield


@pytest.fixture(scope="session")
def one_fork_server() -> Iterator[None]:
    """Have all runs in this process share their servers."""
    with shared_fork_servers():
        yield
