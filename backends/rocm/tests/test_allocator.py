"""The ROCm allocator over the simulated driver, without torch's build for the device."""

from __future__ import annotations

from hardpoint_rocm import descriptor
from hardpoint_rocm.allocator import RocmAllocator

from ...testing.allocator_suite import AllocatorSuite


class TestRocmAllocator(AllocatorSuite):
    descriptor = descriptor
    allocator_class = RocmAllocator
    refusal = "is built without ROCm"
