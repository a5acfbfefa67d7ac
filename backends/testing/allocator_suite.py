"""A vendor's allocator over its simulated driver, with a torch that is not built for the device: what works, and what is refused.

`backends/<name>/tests/test_allocator.py` derive from `AllocatorSuite` and supply what differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from hardpoint.interfaces import Device, DeviceAllocator, DType, Policy, SleepPlan, SleepTier, TorchPoolScope
from hardpoint.interfaces.errors import CapabilityRefused, InvalidAllocation, UnknownTag
from hardpoint_simulators import Simulator


class AllocatorSuite:
    """The tests. `descriptor` is the backend's module, `refusal` the reason for which `pool` is refused, as a pattern."""

    descriptor: ModuleType
    allocator_class: type[DeviceAllocator]
    refusal: str

    @pytest.fixture
    def device(self, monkeypatch: pytest.MonkeyPatch) -> Device:
        simulator = Simulator(self.descriptor.hardpoint_backend().name)
        monkeypatch.setenv(self.descriptor.DRIVER_VARIABLE, str(simulator.path))
        found: Device = self.descriptor.probe().devices[0]
        return found

    @pytest.fixture
    def allocator(self, device: Device) -> Iterator[DeviceAllocator]:
        made = self.descriptor.hardpoint_backend().make("allocator", device)
        yield made
        made.close()

    def test_descriptor_makes_the_allocator_for_a_simulated_device(
        self, device: Device, allocator: DeviceAllocator
    ) -> None:
        assert device.simulated
        assert isinstance(allocator, self.allocator_class)
        claimed = self.descriptor.hardpoint_backend().capabilities(device).memory
        assert allocator.capabilities() == claimed
        assert (claimed.sleep_levels, claimed.tiers, claimed.elastic) == ({0, 1, 2}, frozenset(SleepTier), True)

    def test_pool_is_neither_claimed_nor_given_without_torchs_build_for_the_device(
        self, allocator: DeviceAllocator
    ) -> None:
        assert allocator.capabilities().torch_pool is TorchPoolScope.NONE
        with pytest.raises(CapabilityRefused, match=self.refusal), allocator.pool("weights", Policy.DISCARD):
            pass

    def test_sleep_and_books_work_without_torchs_build(self, allocator: DeviceAllocator) -> None:
        info = allocator.memory_info()
        assert 0 < info.free <= info.total
        report = allocator.sleep(SleepPlan())
        assert (report.preserved, report.unmapped) == (0, 0)
        assert allocator.wake().still_asleep == frozenset()
        with pytest.raises(UnknownTag):
            allocator.sleep(SleepPlan(tags=frozenset({"wieghts"})))

    def test_negative_sizes_are_refused(self, allocator: DeviceAllocator) -> None:
        with pytest.raises(InvalidAllocation):
            allocator.empty((-1, 2), DType.FLOAT32)
