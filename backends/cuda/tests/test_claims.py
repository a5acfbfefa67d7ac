"""What the backend claims: by what is installed, and by facts of the device."""

from __future__ import annotations

from hardpoint_cuda import capabilities, descriptor

from ...testing.claims_suite import TritonClaimsSuite


class TestCudaClaims(TritonClaimsSuite):
    descriptor = descriptor
    capabilities = capabilities
    platform = "CUDA"
    collectives = "nccl"
    fact = "compute_capability"
    usable = ("8.0", "9.0", "10.0")
    unusable = ("7.5", "the device has compute capability 7.5, and Triton's kernels need 8.0")
