"""Drivers and pools for the tests of the memory engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from hardpoint_conformance.fault_matrix import FaultTarget
from hardpoint_conformance.memory_model import TrackedPool
from tests.fault_matrix.targets import CpuTarget, SimulatedTarget, all_targets

TARGETS = all_targets(cpu_chunk=4)


def on_drivers(targets: list[FaultTarget]) -> pytest.MarkDecorator:
    """Have a test run on some of the drivers alone."""
    return pytest.mark.parametrize("target", targets, ids=lambda target: target.name, indirect=True)


on_simulated_drivers = on_drivers([target for target in TARGETS if isinstance(target, SimulatedTarget)])
on_drivers_with_elastic_memory = on_drivers([target for target in TARGETS if target.elastic])


@pytest.fixture(scope="module", params=TARGETS, ids=lambda target: target.name)
def target(request: pytest.FixtureRequest) -> Iterator[FaultTarget]:
    """Every driver; the vendors' libraries are simulated. Chunks are small where their size can be chosen."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HARDPOINT_ROCM_CHUNK_MB", "1")
        gc.collect()  # a driver keeps what it found by probing until the last pool over it is gone
        yield request.param
        request.param.finish()


@pytest.fixture(scope="module")
def cpu_target() -> CpuTarget:
    """The CPU's driver alone, for what does not depend on the driver."""
    return CpuTarget()


def tracked_pool(target: FaultTarget) -> Iterator[TrackedPool]:
    """Yield a pool; afterwards everything has gone back to the driver and no rule was broken."""
    table = target.table()
    nothing = dict(target.left())
    pool = TrackedPool(table)
    yield pool
    pool.free_all()
    del pool
    assert dict(target.left()) == nothing
    assert target.violations() == []


@pytest.fixture
def pool(target: FaultTarget) -> Iterator[TrackedPool]:
    """A pool on every driver in turn."""
    yield from tracked_pool(target)


@pytest.fixture
def cpu_pool(cpu_target: CpuTarget) -> Iterator[TrackedPool]:
    """A pool on the CPU's driver."""
    yield from tracked_pool(cpu_target)
