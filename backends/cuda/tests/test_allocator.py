"""The CUDA allocator over the simulated driver, without torch's build for the device."""

from __future__ import annotations

from hardpoint_cuda import descriptor
from hardpoint_cuda.allocator import CudaAllocator

from ...testing.allocator_suite import AllocatorSuite


class TestCudaAllocator(AllocatorSuite):
    descriptor = descriptor
    allocator_class = CudaAllocator
    refusal = "is built without CUDA"
