"""What the backend claims: by what is installed, and by facts of the device."""

from __future__ import annotations

from hardpoint_rocm import capabilities, descriptor

from ...testing.claims_suite import TritonClaimsSuite


class TestRocmClaims(TritonClaimsSuite):
    descriptor = descriptor
    capabilities = capabilities
    platform = "ROCm"
    collectives = "rccl"
    fact = "wavefront"
    usable = ("64",)
    unusable = ("32", "the device has wavefronts of 32 lanes, and the kernels' tiles are made for 64")
