"""The allocator over the simulated driver, with a torch that is not built for the device: what works without it, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hardpoint.interfaces import Device, DType, Policy, SleepPlan, SleepTier, TorchPoolScope
from hardpoint.interfaces.errors import CapabilityRefused, InvalidAllocation, UnknownTag
from hardpoint_cuda.allocator import CudaAllocator
from hardpoint_cuda.descriptor import DRIVER_VARIABLE, hardpoint_backend, probe
from hardpoint_simulators import Simulator


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setenv(DRIVER_VARIABLE, str(Simulator("cuda").path))
    return probe().devices[0]


@pytest.fixture
def allocator(device: Device) -> Iterator[CudaAllocator]:
    made = hardpoint_backend().make("allocator", device)
    yield made
    made.close()


def test_descriptor_makes_the_allocator_for_a_simulated_device(device: Device, allocator: CudaAllocator) -> None:
    assert device.simulated
    assert isinstance(allocator, CudaAllocator)
    claimed = hardpoint_backend().capabilities(device).memory
    assert allocator.capabilities() == claimed
    assert (claimed.sleep_levels, claimed.tiers, claimed.elastic) == ({0, 1, 2}, frozenset(SleepTier), True)


def test_pool_is_neither_claimed_nor_given_without_torchs_build_for_the_device(allocator: CudaAllocator) -> None:
    assert allocator.capabilities().torch_pool is TorchPoolScope.NONE
    with pytest.raises(CapabilityRefused, match="is built without CUDA"), allocator.pool("weights", Policy.DISCARD):
        pass


def test_sleep_and_books_work_without_torchs_build(allocator: CudaAllocator) -> None:
    info = allocator.memory_info()
    assert 0 < info.free <= info.total
    report = allocator.sleep(SleepPlan())
    assert (report.preserved, report.unmapped) == (0, 0)
    assert allocator.wake().still_asleep == frozenset()
    with pytest.raises(UnknownTag):
        allocator.sleep(SleepPlan(tags=frozenset({"wieghts"})))


def test_negative_sizes_are_refused(allocator: CudaAllocator) -> None:
    with pytest.raises(InvalidAllocation):
        allocator.empty((-1, 2), DType.FLOAT32)
