"""A vendor's allocator over its simulated driver, with a torch that is not built for the device: what works, and what is refused.

`backends/<name>/tests/test_allocator.py` derive from `AllocatorSuite` and supply what differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hardpoint.interfaces import (
    Device,
    DeviceAllocator,
    DType,
    KVCacheSpec,
    Platform,
    Policy,
    SleepPlan,
    SleepTier,
    TorchPoolScope,
)
from hardpoint.interfaces.errors import CapabilityRefused, HostBudgetExceeded, InvalidAllocation, UnknownTag
from hardpoint.memory import VirtualAllocator
from hardpoint.worker.kv_memory import KVMemory
from hardpoint_simulators import Simulator


def whole_pages(size: int) -> int:
    return -(-size // 4096) * 4096


class AllocatorSuite:
    """The tests. `descriptor` is the backend's module, `refusal` the reason for which `pool` is refused, as a pattern."""

    descriptor: ModuleType
    allocator_class: type[DeviceAllocator]
    refusal: str

    @pytest.fixture
    def simulator(self) -> Simulator:
        return Simulator(self.descriptor.hardpoint_backend().name)

    @pytest.fixture
    def device(self, simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> Device:
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

    def test_pinned_host_memory_is_as_large_as_asked_for(
        self, allocator: VirtualAllocator, simulator: Simulator
    ) -> None:
        """And not as large as the next power of two, as what torch pins."""
        before = simulator.stats().host_bytes
        tensor = allocator.empty_host((5, 300_001), DType.INT32)
        assert tensor is not None
        assert (tensor.shape, tensor.dtype, tensor.device.type) == ((5, 300_001), torch.int32, "cpu")
        row = tensor.fill_(7)[3]
        del tensor
        assert simulator.stats().host_bytes - before == whole_pages(5 * 300_001 * 4)
        assert int(row.sum()) == 7 * 300_001
        del row
        assert simulator.stats().host_bytes == before

    def test_pinned_host_memory_stays_until_the_device_has_done_with_it(
        self, allocator: VirtualAllocator, simulator: Simulator
    ) -> None:
        before, driver, size = simulator.stats().host_bytes, allocator.driver, 2 << 20
        simulator.set("deferred", 1)
        address = allocator.native.allocate(size, "default", Policy.DISCARD)
        stream = driver.stream_create()
        tensor = allocator.empty_host((size,), DType.UINT8)
        assert tensor is not None
        driver.copy_to_device(address, tensor.fill_(7).data_ptr(), size, stream)
        del tensor
        assert (simulator.stats().host_bytes, simulator.violations()) == (before, [])
        held = bytearray(size)
        allocator.native.read(address, held)
        assert held == b"\7" * size
        allocator.native.free(address)
        driver.stream_destroy(stream)
        simulator.set("deferred", 0)

    def test_more_host_memory_than_there_is_is_refused(self, allocator: VirtualAllocator, simulator: Simulator) -> None:
        before = simulator.stats().host_bytes
        with pytest.raises(HostBudgetExceeded, match="the host has room for"):
            allocator.empty_host((1 << 50,), DType.UINT8)
        assert simulator.stats().host_bytes == before

    def test_blocks_on_the_host_are_pinned_and_take_what_the_settings_allow(
        self, allocator: VirtualAllocator, simulator: Simulator, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Swapped ones, and those of the prefix cache's tier, for a torch that sees what the driver pinned; this one has no such device."""
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: simulator.stats().host_ranges > 0)
        monkeypatch.setattr(
            allocator, "empty", lambda shape, dtype, *more: torch.empty(tuple(shape), dtype=dtype.to_torch())
        )
        spec = KVCacheSpec(num_layers=3, block_size=16, num_kv_heads=2, head_dim=72, dtype=DType.BFLOAT16)
        attention: Any = SimpleNamespace(capabilities=lambda: SimpleNamespace(max_cache_elements=None))
        before = simulator.stats().host_bytes
        memory = KVMemory(spec, allocator=allocator, attention=attention, platform=Platform(device), torch_device="cpu")
        memory.initialize(4, 37)
        swapped = whole_pages(37 * spec.block_bytes)
        assert simulator.stats().host_bytes - before == swapped
        memory.open_tiers(75, 0, None)
        assert simulator.stats().host_bytes - before == swapped + whole_pages(75 * spec.block_bytes)
        memory.initialize(4, 0)
        assert simulator.stats().host_bytes - before == whole_pages(75 * spec.block_bytes)
        del memory
        assert simulator.stats().host_bytes == before

    def test_negative_sizes_are_refused(self, allocator: DeviceAllocator) -> None:
        with pytest.raises(InvalidAllocation):
            allocator.empty((-1, 2), DType.FLOAT32)
