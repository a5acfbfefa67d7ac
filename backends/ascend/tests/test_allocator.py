"""The Ascend allocator over the simulated driver, without torch's build for the device."""

from __future__ import annotations

from hardpoint_ascend import descriptor
from hardpoint_ascend.allocator import AscendAllocator

from ...testing.allocator_suite import AllocatorSuite


class TestAscendAllocator(AllocatorSuite):
    descriptor = descriptor
    allocator_class = AscendAllocator
    refusal = "torch_npu cannot be imported"
